"""Deletes data that is no longer needed, and merges small files, under the lake's lock.

A consistent point promises readers the mirrors' versions that it names. Nothing is deleted that a point promises, so a
kill at any time is harmless. First a new point is published, with the versions that OPTIMIZE wrote. Then old points are
deleted, then the oldest part of the log, and files last. Each step looks in the lake for what is left to do. So if a
maintenance is killed, the next one continues where it stopped.

A sync also deletes old points and old versions of mirrors, because every turn adds to them. A mirror that is no longer
followed is deleted only on request, because it may be the last copy of its table.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from pgcdc_assets.core import retention
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.retention import LogFile, log_cut, oldest_kept
from pgcdc_assets.errors import IdentityMismatch, LakeError, UnknownTable, UsageError
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.table import FeedTable
from pgcdc_assets.flow.messages import messages_needed
from pgcdc_assets.flow.requests import verify_request
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.upkeep import forget, sweep_log
from pgcdc_assets.points.ledger import sweep_ledgers
from pgcdc_assets.points.points import Point
from pgcdc_assets.points.states import StateRow
from pgcdc_assets.points.untaken import UntakenLedger
from pgcdc_assets.store import storage
from pgcdc_assets.structure.record import TableState

THIN_AFTER_VERSIONS: Final = 600
"""Old versions of a mirror are deleted after this many new versions: ten minutes at one turn per second."""
PRUNE_SECONDS: Final = 600.0
"""Seconds after which old points are deleted even if no mirror has THIN_AFTER_VERSIONS new versions."""


def prune_points(work: Work, now: datetime) -> int:
    """Delete the points that are older than the retention, and thin out the newer points: ``retention.LADDER`` says how
    many stay. The point that a running ``verify`` reads stays, however long ``verify`` takes. Returns how many points
    were deleted."""
    span = min(work.settings.retention, retention.LONGEST_POINTS)
    oldest, needed = retention.oldest_kept(now, span, retention.GRACE), work.progress.needed_listings
    request = verify_request(work.layout)
    return work.progress.points.prune(oldest, needed, now, in_use=None if request is None else request.lsn)


class Thinning:
    """Deletes old versions of mirrors during a run of the sync."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seen = {entry.table.name: entry.version for entry in work.progress}
        self._pruned = time.monotonic()

    def after_range(self, tables: Iterable[TableName]) -> None:
        """After a range was closed, delete old versions of its ``tables`` that have many new versions. Also deletes old
        points."""
        due = [name for name in tables if self._is_due(name)]
        # The versions that points promise are read before old points are deleted, because readers may still be using
        # these points.
        promised = self._work.progress.points.versions(due) if due else {}
        if due or time.monotonic() - self._pruned >= PRUNE_SECONDS:
            prune_points(self._work, datetime.now(UTC))
            self._pruned = time.monotonic()
        for name in due:
            self._thin(name, promised.get(name, frozenset()))

    def _is_due(self, name: TableName) -> bool:
        """Whether the table has THIN_AFTER_VERSIONS new versions since the last check, and the newest point lists it.
        The listed version and all newer versions stay, because the run may still have to make these versions durable. A
        table that is being copied is never due: no version names the copy's files yet, so they would be deleted."""
        progress = self._work.progress
        if name not in progress or progress[name].state is not TableState.STREAMING:
            return False
        version = progress[name].version
        before = self._seen.setdefault(name, version)
        if version // THIN_AFTER_VERSIONS == before // THIN_AFTER_VERSIONS:
            return False
        self._seen[name] = version
        return True

    def _thin(self, name: TableName, promised: frozenset[int]) -> None:
        """Delete old versions of one mirror. A failure is only reported: the next turn that needs the mirror sets its
        table aside if the mirror cannot be read."""
        work = self._work
        with contained() as failed:
            work.target.delete_unneeded(name, promised, retention.GRACE, lambda: True)
        if failed.reason is not None:
            work.say("maintain", f"old versions of {name} were not deleted: {failed.reason}", name)


@dataclass(frozen=True)
class Forgotten:
    """What was deleted of one table: its mirror and its change feed."""

    table: TableName
    files: int
    bytes: int


def forget_tables(work: Work, tables: Sequence[TableName]) -> list[Forgotten]:
    """Delete the mirrors and feeds of these tables. They can then no longer be read at older points. Nothing is deleted
    if one of the tables is followed (UsageError), or has no mirror in the lake (UnknownTable)."""
    for name in tables:
        _refuse(work, name)
    return [_forgotten(work, name) for name in dict.fromkeys(tables)]


def _refuse(work: Work, name: TableName) -> None:
    if name in work.progress:
        do = "first exclude it in the setting `tables`, or drop it on the source, and run `pgcdc sync`"
        raise UsageError("is still mirrored, so its mirror is not deleted", thing=f"table {name}", do=do)
    if (waiting := next((one for one in work.progress if one.former == name), None)) is not None:
        do = f"run `pgcdc sync` first: it renames the mirror to {waiting.table.name}"
        raise UsageError("holds the rows of a table that was renamed", thing=f"mirror {name}", do=do)
    if not work.target.keeps(name):
        raise UnknownTable("has no mirror in this lake", thing=str(name))


def _forgotten(work: Work, name: TableName) -> Forgotten:
    of_feed, of_mirror = work.feeds.remove(name), work.target.forget(name)
    work.say("forget", f"table {name}: its mirror and feed were deleted", name)
    return Forgotten(name, of_feed[0] + of_mirror.files, of_feed[1] + of_mirror.bytes)


@dataclass
class MaintenanceReport:
    """The result of a maintenance. All counts are zero if there was nothing to do."""

    log_start: Lsn
    """The log's first LSN. A range can be repaired, and its feeds written again, only at or above it."""
    oldest_point: Lsn | None = None
    """The LSN of the oldest point that is kept. ``Lake.at`` refuses lower LSNs."""
    log_files: int = 0
    """Deleted files of the log's oldest part."""
    feed_files: int = 0
    """Files of change feeds that were deleted or merged."""
    points: int = 0
    optimized: list[TableName] = field(default_factory=list)
    vacuumed: list[TableName] = field(default_factory=list)
    deleted_files: int = 0
    deleted_bytes: int = 0
    """The total size of ``deleted_files`` (files of mirrors)."""
    left: list[TableName] = field(default_factory=list)
    """Mirrors that were skipped for lack of time. The next maintenance handles them."""
    failed: list[tuple[TableName, str]] = field(default_factory=list)
    runs: int = 0
    """Dagster runs that the job of this maintenance deleted."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Allowance:
    """How long a maintenance may hold the lake's lock. After ``max_seconds``, or if ``stop`` is set, it begins no work
    on another table."""

    max_seconds: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def runs_out(self, started: float) -> bool:
        spent = time.monotonic() - started
        return self.stop.is_set() or (self.max_seconds is not None and spent >= self.max_seconds)


class Maintenance:
    """One maintenance of the lake of ``work``."""

    def __init__(self, work: Work, allowance: Allowance) -> None:
        self._work = work
        self._allowance = allowance
        self._started = time.monotonic()
        self._grace = retention.GRACE
        self._now = datetime.now(UTC)
        self._report = MaintenanceReport(work.log.start)

    def run(self) -> MaintenanceReport:
        for step in (self.optimize, self.publish, self.prune, self.cut, self.vacuum, self.sweep):
            step()
        report, points = self._report, self._work.progress.points
        report.log_start = self._work.log.start
        report.oldest_point = points.oldest()
        report.seconds = time.monotonic() - self._started
        return report

    # The steps, in their order ------------------------------------------------------------------

    def optimize(self) -> None:
        """Merge the small files of mirrors that have many. Also writes a new checkpoint for mirrors without recent
        commits. Otherwise Delta's log clean-up could delete the commits of their present version, which points still
        need."""
        newest = self._work.progress.points.newest()
        listed = {} if newest is None else newest.tables
        for name, row in self._copied():
            if name not in listed:
                continue
            with self._failure_noted(name):
                if self._work.target.upkeep(name, row.table, listed[name], partial(self._may_begin, name)):
                    self._work.say("maintain", f"optimized {name}")
                    self._report.optimized.append(name)

    def publish(self) -> None:
        """Publish the newest point again, with the present versions of mirrors whose rows are the same as in the point.
        Otherwise the newest point would keep the old versions of tables that do not change, and all their files."""
        newest = self._work.progress.points.newest()
        if newest is not None:
            self._work.progress.republish(self._level(newest))

    def prune(self) -> None:
        """Delete the points that are older than the retention, and thin out the newer points."""
        self._report.points = prune_points(self._work, self._now)
        self._work.progress.states.prune()
        passed(FaultPoint.POINTS_PRUNED)

    def cut(self) -> None:
        """Delete the oldest part of log and feeds, and Dagster's partition keys of ranges that are no longer in the
        log."""
        work = self._work
        files = [LogFile(s.first_batch_end, s.batch_end, s.written) for s in work.log.all_segments()]
        needed = [entry.replay_lsn for entry in work.progress.followed()] + messages_needed(work)
        oldest = oldest_kept(self._now, work.settings.retention, self._grace)
        self._report.log_files = forget(work.log, log_cut(files, work.log.start, needed, oldest))
        UntakenLedger(work.layout).forget(work.log.start)
        passed(FaultPoint.LOG_CUT)
        if self._report.log_files:
            self._work.say("maintain", f"the log now starts at {work.log.start}")
        for feed in self._feeds():
            self._report.feed_files += feed.forget(work.log.start)
        if work.messages is not None:
            self._report.feed_files += work.messages.forget(work.log.start) + work.messages.compact()
        for entry in work.progress.followed():
            with self._failure_noted(entry.table.name):
                feed = work.feeds.open(entry.table)
                self._report.feed_files += feed.compact(entry.replay_lsn)
        passed(FaultPoint.FEEDS_CUT)
        work.observer.known_ranges()

    def vacuum(self) -> None:
        """Delete the files of mirrors, and of their Delta logs, that no promised version needs."""
        promised = self._work.progress.points.versions(self._work.progress.states.all())
        # Each mirror is read right before its files are deleted, because another writer may commit to it.
        for name, _ in self._copied():
            if self._catches_up(name):
                continue
            with self._failure_noted(name):
                may_begin = partial(self._may_begin, name)
                freed = self._work.target.delete_unneeded(name, promised.get(name, frozenset()), self._grace, may_begin)
                if freed is None:
                    continue
                passed(FaultPoint.MIRROR_VACUUMED)
                if freed.files:
                    self._work.say("maintain", f"vacuumed {name}: {freed.files} files, {freed.bytes:,} bytes")
                    self._report.vacuumed.append(name)
                    self._report.deleted_files += freed.files
                    self._report.deleted_bytes += freed.bytes

    def _catches_up(self, name: TableName) -> bool:
        """Whether the table is published and not set aside, but the newest point does not list it yet. All versions of
        its mirror stay until a point lists it, because a sync still has to make one of these versions durable."""
        progress = self._work.progress
        newest = progress.points.newest()
        listed = newest is not None and name in newest.tables
        return name in progress and progress[name].state is not TableState.SET_ASIDE and not listed

    def sweep(self) -> None:
        """Delete the unneeded files of the change log, the feeds and the points, and files that killed runs left. No
        other program writes to these tables."""
        layout = self._work.layout
        sweep_log(self._work.log, self._grace)
        passed(FaultPoint.LOG_SWEPT)
        sweep_ledgers(layout, self._grace)
        for feed in self._feeds():
            feed.sweep(self._grace)
        if self._work.messages is not None:
            self._work.messages.sweep(self._grace)
        storage.delete_folder(layout.staging)

    # Helper methods -----------------------------------------------------------------------------

    def _copied(self) -> list[tuple[TableName, StateRow]]:
        """All tables that were ever copied, also tables that are no longer followed."""
        return sorted(self._work.progress.states.all().items())

    def _level(self, newest: Point) -> dict[TableName, int]:
        """The present versions of the mirrors whose rows are the same as in the version that the newest point names."""
        found: dict[TableName, int] = {}
        for name, _ in self._copied():
            with self._failure_noted(name):
                version = None if name not in newest.tables else self._work.target.unmoved(name, newest.tables[name])
                if version is not None:
                    found[name] = version
        return found

    def _feeds(self) -> Iterator[FeedTable]:
        return map(self._work.feeds.open, self._work.progress.states.tables())

    def _may_begin(self, name: TableName) -> bool:
        if not self._allowance.runs_out(self._started):
            return True
        if name not in self._report.left:
            self._report.left.append(name)
        return False

    @contextmanager
    def _failure_noted(self, name: TableName) -> Iterator[None]:
        """Record the failure of a mirror, and continue with the other mirrors and the log. A mirror of another source
        or slot is skipped without a record."""
        try:
            yield
        except IdentityMismatch:
            pass
        except LakeError as error:
            if (name, str(error)) not in self._report.failed:
                self._report.failed.append((name, str(error)))
