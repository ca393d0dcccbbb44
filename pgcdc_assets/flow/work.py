"""The objects that every operation on a lake uses. They are opened under the lake's lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.messages import MessageFeed
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.flow.meter import Meter
from pgcdc_assets.flow.outcomes import Operation
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.reports import Observer
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.target import Target
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.session import SparkOnDemand


@dataclass
class Work:
    settings: Settings
    catalog: Catalog
    log: ChangeLog
    target: Target
    progress: TablesProgress
    observer: Observer
    session: SparkOnDemand
    """The Spark session of the transform. The target uses the same session."""
    feeds: Feeds = field(init=False)
    messages: MessageFeed | None = None
    """The feed of logical messages; None if the setting ``messages`` is empty, or if the feed cannot be opened."""
    messages_reported: set[str] = field(default_factory=set)
    """Failures of the feed of messages that this run has reported."""
    operation: Operation = field(default_factory=Operation)
    """The record of how this run ends, which ``status`` reports."""
    looked_to: Lsn = ZERO
    """Turns look for rows of dropped partitions only above this LSN. Below it, the run has looked for them before its
    first catalog check."""
    meter: Meter = field(init=False)

    after_point: Callable[[], None] = lambda: None
    """Called in the run's thread after each point."""

    def __post_init__(self) -> None:
        self.feeds = Feeds(self.layout, self.identity)
        self.meter = Meter(self.layout, self.log, self.progress.points)

    def say(self, stage: str, message: str, table: TableName | None = None, lsn: Lsn | None = None) -> None:
        """Report a message to people. ``table``, ``lsn``: what the message is about."""
        about = {"table": table, "lsn": lsn}
        self.observer.progress(stage, message, **{name: str(of) for name, of in about.items() if of is not None})

    def put_aside(self, name: TableName, lsn: Lsn, reason: str) -> None:
        """Set a followed table aside, and report it."""
        self.progress.put_aside(name, lsn, reason)
        self.say("apply", f"{name} is set aside, so its mirror no longer changes: {reason}", name, lsn)

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    @property
    def identity(self) -> Identity:
        return self.catalog.identity
