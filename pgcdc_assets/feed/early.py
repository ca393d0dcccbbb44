"""Feed files that are derived while their transaction is in progress, from what the receiver has spooled of it.

The commit of the rows is not known then: a mark stands in its place (:mod:`pgcdc_assets.feed.mark`). Some segments that
follow each other are derived by one task. Once the transaction has committed, and nothing of them was rolled back, the
commit is written over the marks and the file goes into the feed. In all other cases the segments are derived as any
others: early files are never needed, and nobody reads them before.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.evolve import alignment, evolved
from pgcdc_assets.feed.mark import Mark
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.feed.task import Derivation, Derived, FeedTarget, derive
from pgcdc_assets.log.latefacts import LateFacts
from pgcdc_assets.log.reader import Segment
from pgcdc_assets.log.segment import SegmentFile
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.spark.tasks import run_tasks
from pgcdc_assets.store import storage

GATHERED: Final = 4
"""Segments of a transaction that one task derives: some half a second of work. A task costs as much as deriving two
segments, whatever it derives."""
GATHERED_SECONDS: Final = 2.0
"""So long a task waits for more segments at most; what waits at the commit is derived then."""


@dataclass(frozen=True)
class EarlySegment:
    """A segment of a transaction in progress, and how its rows are read."""

    xid: int
    draft: str
    """Where it lies now."""
    place: Location
    """Where it is going to be in the log."""
    shapes: Mapping[int, Shape]
    """By provisional schema id, as far as the catalog shows them before the commit."""


@dataclass
class EarlyGroup:
    """Segments of one transaction and of the same tables, which one task derives."""

    xid: int
    tables: Mapping[TableName, Table]
    folder: Location
    mark: Mark = field(default_factory=Mark.new)
    since: float = field(default_factory=time.monotonic)
    """When its first segment came."""
    files: dict[str, SegmentFile] = field(default_factory=dict)
    """By the segment's name in the log."""
    routes: dict[int, Route] = field(default_factory=dict)
    future: Future[list[Derived]] | None = None
    """None until its task is asked for."""
    commit_lsn: int | None = None
    """None while the transaction is in progress."""

    def add(self, segment: EarlySegment, routes: Mapping[int, Route]) -> None:
        schema_ids = {provisional: shape.schema_id for provisional, shape in segment.shapes.items()}
        late = LateFacts(self.mark.commit_lsn, self.mark.commit_ts, (), schema_ids)
        self.files[segment.place.name] = SegmentFile(Location(segment.draft), late, moved=segment.place)
        self.routes |= routes

    def task(self) -> Derivation:
        span = LsnRange(Lsn(self.mark.commit_lsn), Lsn(self.mark.commit_lsn + 1))
        targets = {name: FeedTarget(table, self.folder, span) for name, table in self.tables.items()}
        return Derivation(tuple(self.files.values()), targets, self.routes, provisional=True)

    def derived(self) -> Derived | None:
        """What came of its task, which is waited for; None if that is of no use."""
        if self.future is None or self.future.cancelled() or self.future.exception() is not None:
            # Deriving the segments of the log says what is wrong, if it still is.
            return None
        derived = self.future.result()[0]
        return None if derived.set_aside or not self._there(derived) else derived

    def _there(self, derived: Derived) -> bool:
        """Whether the files are still there: a maintenance clears what lies beside the tables."""
        names = [file.name for files in derived.files.values() for file in files]
        return all(storage.head(self.folder / name) is not None for name in names)


@dataclass(frozen=True)
class Claim:
    """A group that stands for segments of the log in this turn, as far as can be told before it is derived."""

    feeds: EarlyFeeds
    group: EarlyGroup
    segments: Sequence[Segment]
    turn: Derivation

    def landed(self) -> Derived | None:
        """What was derived of the segments, as files of the feeds; None if they have to be derived now."""
        group, late = self.group, self.segments[0].late
        self.feeds.forget(group)
        derived = group.derived()
        if derived is None or late is None:
            self.feeds.discard(group)
            return None
        files = {
            name: [group.mark.landed(group.folder, file, self.turn.targets[name].folder, late) for file in files]
            for name, files in derived.files.items()
        }
        passed(FaultPoint.EARLY_LANDED)
        storage.delete_folder(group.folder)
        return replace(derived, files=files)


class EarlyFeeds:
    """The early files of one run. ``folder`` is one of its own, which nobody else writes to."""

    def __init__(self, session: Callable[[], SparkSession], folder: Location) -> None:
        self._session = session
        self._folder = folder
        self.groups: list[EarlyGroup] = []
        self._committed: dict[int, int] = {}
        """By xid, the ``commit_lsn`` of transactions that tables are still to take."""
        # One at a time: the turns of other transactions want the cores, too.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="early-feeds")

    def spooled(self, segment: EarlySegment, router: Router) -> None:
        """Derive a segment, unless something about its tables has to wait for the commit."""
        routes = _routes(segment.shapes, router)
        if not routes or segment.xid in self._committed:
            # The turn that takes the transaction is as soon as a task that begins now.
            return
        tables = {route.table.name: route.table for route in routes.values()}
        group = next((one for one in self._gathering if one.xid == segment.xid and one.tables == tables), None)
        if group is None:
            group = EarlyGroup(segment.xid, tables, self._folder / uuid.uuid4().hex)
            self.groups.append(group)
        group.add(segment, routes)
        if len(group.files) >= GATHERED:
            self._begin(group)

    def begin_due(self) -> None:
        """Derive what has been gathered for long enough."""
        before = time.monotonic() - GATHERED_SECONDS
        for group in self._gathering:
            if group.since < before:
                self._begin(group)

    @property
    def _gathering(self) -> list[EarlyGroup]:
        return [group for group in self.groups if group.future is None]

    def _begin(self, group: EarlyGroup) -> None:
        task = group.task()
        group.future = self._pool.submit(lambda: run_tasks(self._session(), derive, [task]))

    def ended(self, xid: int | None, commit_lsn: int | None) -> None:
        """The transaction has committed there, or was rolled back; without xid, all that are open come again."""
        if xid is None:
            self._committed.clear()
        elif commit_lsn is not None:
            self._committed[xid] = commit_lsn
        for group in [group for group in self.groups if xid is None or group.xid == xid]:
            if commit_lsn is None:
                self.forget(group)
                self.discard(group)
            else:
                group.commit_lsn = commit_lsn
                if group.future is None:
                    # The log takes a moment to hold the transaction.
                    self._begin(group)

    def passed(self, lsn: Lsn) -> None:
        """All tables have taken what commits below: what was not taken until now never is, for it was rolled back to a
        savepoint, or its table waits for a copy."""
        self._committed = {xid: commit_lsn for xid, commit_lsn in self._committed.items() if commit_lsn >= lsn}
        for group in list(self.groups):
            if group.commit_lsn is not None and group.commit_lsn < lsn:
                self.forget(group)
                self.discard(group)

    def claimed(self, segments: Sequence[Segment], turn: Derivation) -> list[Claim]:
        """What stands for some of these segments of the log; the others have to be derived now. ``turn`` is how this
        turn derives."""
        by_name = {segment.path.name: segment for segment in segments}
        claims: list[Claim] = []
        for group in list(self.groups):
            members = [by_name[name] for name in group.files if name in by_name]
            if not members:
                continue
            if len(members) == len(group.files) and _fits(group, members, turn):
                claims.append(Claim(self, group, members, turn))
            else:
                self.forget(group)
                self.discard(group)
        return claims

    def close(self) -> None:
        """Leave nothing behind. A task that is under way is not waited for: what it makes goes once it is done."""
        self.ended(None, None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        storage.delete_folder(self._folder)

    def forget(self, group: EarlyGroup) -> None:
        self.groups.remove(group)

    @staticmethod
    def discard(group: EarlyGroup) -> None:
        if group.future is not None:
            group.future.cancel()
            group.future.add_done_callback(lambda done: storage.delete_folder(group.folder))


def _routes(shapes: Mapping[int, Shape], router: Router) -> dict[int, Route]:
    """By schema id; none at all if a row might show a table to be changed."""
    found: dict[int, Route] = {}
    for shape in shapes.values():
        place = router.place(shape)
        if place.refused:
            return {}
        if place.table is None:
            continue
        table = router.names[place.table]
        if table.multiset or evolved(table, shape, None, past=False) != table:
            return {}
        found[shape.schema_id] = Route.of(shape, table, place.leaf, alignment(table, shape, None))
    return found


def _fits(group: EarlyGroup, members: Sequence[Segment], turn: Derivation) -> bool:
    """Whether nothing of the segments was rolled back, their tables are what they were, and the task has begun."""
    if group.future is None or not (group.future.running() or group.future.done()):
        return False
    ids: set[int] = set()
    for segment in members:
        late, early = segment.late, group.files[segment.path.name].late
        if late is None or early is None or late.aborted or dict(late.schema_ids) != early.schema_ids:
            return False
        ids |= set(late.schema_ids.values())
    commit_lsn = members[0].late.commit_lsn if members[0].late else 0
    return (
        {schema_id: route for schema_id, route in turn.routes.items() if schema_id in ids} == group.routes
        and not ids & turn.refused.keys()
        and all(_wants(turn.targets.get(name), commit_lsn) for name in group.tables)
    )


def _wants(target: FeedTarget | None, commit_lsn: int) -> bool:
    return target is not None and target.buckets == 1 and target.span.holds_commit(commit_lsn)
