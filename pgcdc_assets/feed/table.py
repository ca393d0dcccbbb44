"""A table's change feed as a Delta table, and what it has in common with the feed of messages.

If a part of the log is derived again, whole files of the feed are replaced, because feeds have no deletion vectors. The
end of the range that a table's feed covers is ``changes_lsn``.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Final

from deltalake import Schema

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.formats import reading
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import replace_files, settle
from pgcdc_assets.delta.datafile import FileReport, neighbours
from pgcdc_assets.delta.definition import commit_columns, create_table
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion, OpenLogs
from pgcdc_assets.delta.sweep import remove_table, sweep
from pgcdc_assets.errors import CommitLost
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.file import feed_file, merged_file
from pgcdc_assets.feed.schema import COMMIT_LSN, FeedFile, feed_schema
from pgcdc_assets.store import storage

MERGED_BYTES: Final = 16 << 20
"""The approximate size of a file that compaction writes. Files larger than a quarter of this size are not merged."""
FEWEST_MERGED: Final = 8
"""Compaction merges at least this many small files at a time. Fewer files are left for a later compaction, because more
small files may soon be added next to them."""
FEED_PROPERTIES: Final = {
    "delta.autoOptimize.autoCompact": "false",
    # Each transform makes one Delta commit. Old commit files can be deleted soon, because the newest version contains
    # all that we need.
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
STRUCTURE: Final = "pgcdc.structure"
"""Table property with the structure (:attr:`Table.structure`) for which the rows were derived. Rows of an older
structure cannot be used, because they lack new columns, and because one of their names may now belong to a different
column."""


class DeltaFeed:
    """A feed as a Delta table. Each Delta commit also records, in two app transactions, the range that the feed covers
    without a gap: its start and its end. The Delta table does not exist before the first commit."""

    order: ClassVar[str]
    """The column with the LSN that decides whether a row is below a boundary."""

    def __init__(self, path: Location, root: Location, log: DeltaLog, start_id: str, end_id: str) -> None:
        self.path = path
        self._root = root
        self._log = log
        self._start_id, self._end_id = start_id, end_id
        self._delta = log.newest()

    @property
    def covered(self) -> LsnRange:
        """The range for which the feed contains all rows of the log."""
        if self._delta is None or not self._fits(self._delta):
            return LsnRange(ZERO, ZERO)
        start, end = (self._delta.positions.get(app_id, 0) for app_id in (self._start_id, self._end_id))
        return LsnRange(Lsn(start), Lsn(end))

    def settle(self) -> None:
        """Makes all Delta commits of the feed durable. Called before a mirror or a consistent point depends on them."""
        settle([self.path])

    def sweep(self, grace: timedelta) -> int:
        """Deletes files that only old versions need, and returns how many. A version is old if a newer version replaced
        it more than ``grace`` ago."""
        return sweep(self.path, grace)

    def forget(self, upto: Lsn) -> int:
        """Removes the files whose rows are all below ``upto``, the feed's new start. Returns the number of files. A
        feed that covers nothing still covers nothing."""
        old = [file for file, _, high in self._bounds(LsnRange(ZERO, upto)) if high < upto]
        if old:
            covered = self.covered
            if covered.end:
                covered = LsnRange(max(covered.start, upto), max(covered.end, upto))
            self._write(old, [], covered)
            self.settle()
        return len(old)

    def _fits(self, delta: DeltaVersion) -> bool:
        """Whether the rows of this version can be used. The feed of a table refuses rows of another structure."""
        return True

    def _replaced(self, span: LsnRange) -> tuple[LsnRange, list[Added]]:
        """Returns the files that must be replaced if the span is derived again, and the span that must then be derived:
        it includes all rows of these files."""
        while True:
            found = self._bounds(span)
            low = min([span.start, *(Lsn(low) for _, low, _ in found)])
            high = max([span.end, *(Lsn(high + 1) for _, _, high in found)])
            if (low, high) == (span.start, span.end):
                return span, [file for file, _, _ in found]
            span = LsnRange(low, high)

    def _compacted(self, upto: Lsn, merged: Callable[[list[Added]], list[FileReport]]) -> int:
        """Merges small files with consecutive rows below ``upto``. ``merged`` writes the rows of a group of files to
        new files. Returns by how many files the feed became smaller."""
        bounds = sorted(self._bounds(LsnRange(ZERO, upto)), key=lambda bounds: bounds[1])
        passed = (file for file, _, high in bounds if high < upto)
        groups = neighbours(
            passed, lambda file: file.size, largest=MERGED_BYTES // 4, full=MERGED_BYTES, fewest=FEWEST_MERGED
        )
        gone: list[Added] = []
        made: list[FileReport] = []
        for group in groups:
            made += merged(group)
            gone += group
        if gone:
            self._write(gone, made, self.covered, changes=False)
            self.settle()
        return len(gone) - len(made)

    def _bounds(self, span: LsnRange) -> list[tuple[Added, int, int]]:
        """Returns the files that may have rows of the span, each with the lowest and highest LSN of its rows."""
        if self._delta is None or not self._fits(self._delta):
            return []
        found = [(file, *bounds_of(file, self.order)) for file in self._delta.files]
        return [(file, low, high) for file, low, high in found if low < span.end and high >= span.start]

    def _write(
        self, gone: Sequence[Added], files: Sequence[FileReport], covered: LsnRange, *, changes: bool = True
    ) -> None:
        """Makes one Delta commit. If another program has made a commit in between, tries once more. Raises CommitLost
        if that commit removed some of these files or changed the covered range."""
        positions = {self._start_id: int(covered.start), self._end_id: int(covered.end)}
        delta = self._delta
        assert delta is not None
        try:
            replace_files(delta, gone, files, positions, changes=changes)
        except CommitLost:
            now = self._log.newest()
            if now is None or any(file not in now.files for file in gone):
                raise
            if any(delta.positions.get(app_id) != now.positions.get(app_id) for app_id in positions):
                raise
            replace_files(now, gone, files, positions, changes=changes)
        self._delta = self._log.newest()


class FeedTable(DeltaFeed):
    """The feed of one table."""

    order = COMMIT_LSN

    def __init__(self, layout: Layout, identity: Identity, table: Table, logs: OpenLogs) -> None:
        path, folder = layout.changes(table.name), table.name.folder
        super().__init__(
            path,
            layout.root,
            logs.of(path),
            identity.app_id("changes_since", folder),
            identity.app_id("changes", folder),
        )
        self._table = table

    def files(self, span: LsnRange) -> list[FeedFile]:
        """Returns the files that may have rows of the span. These files may also contain other rows."""
        return [feed_file(self.path / file.path, file.size) for file, _, _ in self._bounds(span)]

    def replaced(self, span: LsnRange, log_start: Lsn = ZERO) -> tuple[LsnRange, tuple[str, ...]]:
        """Returns the names of the files that must be replaced if the span is derived again, and the span that must
        then be derived. ``log_start``: :attr:`ChangeLog.start`.

        A file may have rows below the LSN from which the log is known to contain all changes of the table. Such rows
        are not derived again, so the replacement removes them (see :meth:`commit`)."""
        wider, files = self._replaced(span)
        covered = self.covered
        known = covered.start if covered.start <= span.start <= covered.end else span.start
        start = max(wider.start, known, min(log_start, span.start))
        return LsnRange(start, wider.end), tuple(file.path for file in files)

    def commit(
        self, files: Sequence[FeedFile], span: LsnRange, replaced: Sequence[str] = (),
        unchanged_from: Lsn | None = None, replay_lsn: Lsn = ZERO,
    ) -> None:  # fmt: skip
        """Adds ``files``, the changes of ``span``, and removes the ``replaced`` files, in one Delta commit.
        ``unchanged_from``: no transaction between this LSN and the span changed the mirror, so the covered range may
        begin there. This is not done for a feed that was emptied, because it may lack changes that had no effect on the
        mirror. ``replay_lsn``: the mirror's LSN. If the span ends below it, the span is added to the covered range only
        if it adjoins this range, because readers assume that the feed covers everything up to the mirror's LSN. If this
        commit also empties the feed, the covered range becomes empty, at the end of the range that the feed covered:
        readers need to know that the table has not changed since."""
        covered = self._covered_after(span, replaced, unchanged_from, replay_lsn)
        delta = self._prepared()
        gone = [file for file in delta.files if file.path in replaced]
        passed(FaultPoint.FEED_COMMITTING)
        self._write(gone, [file.report for file in files], covered)
        passed(FaultPoint.FEED_COMMITTED)

    def _covered_after(
        self, span: LsnRange, replaced: Sequence[str], unchanged_from: Lsn | None, replay_lsn: Lsn
    ) -> LsnRange:
        """Returns the range that the feed covers after :meth:`commit` with these arguments."""
        covered = self.covered
        if not covered.end and self._delta is not None and span.end < replay_lsn:
            end = Lsn(self._delta.positions.get(self._end_id, 0))
            covered = LsnRange(end, end)
        loses_rows = any(low < span.start for file, low, _ in self._bounds(span) if file.path in replaced)
        if not loses_rows and unchanged_from is not None and (self._delta is None or covered.end):
            # Below its end, the feed may lack changes, even if they had no effect on the mirror.
            span = LsnRange(min(span.start, max(unchanged_from, covered.end)), span.end)
        if span.start <= covered.end and span.end >= covered.start:
            # If the replaced files have rows below the span, the feed no longer contains these rows.
            start = span.start if loses_rows else min(covered.start, span.start)
            return LsnRange(start, max(covered.end, span.end))
        return span if span.end >= replay_lsn else covered

    def end_at(self, position: Lsn) -> None:
        """Removes the changes at or above ``position``, so that they are derived again, for example with new columns.
        No mirror may have applied these changes."""
        covered, files = self.covered, self._bounds(LsnRange(position, Lsn(sys.maxsize)))
        if covered.end <= position and not files:
            return
        end = max(covered.start, min([position, *(Lsn(low) for _, low, _ in files)]))
        self._write([file for file, _, _ in files], [], LsnRange(covered.start, Lsn(end)))
        self.settle()

    def compact(self, upto: Lsn) -> int:
        """Merges small files with consecutive transactions below ``upto``. Returns by how many files the feed became
        smaller. All transactions below ``upto`` must be applied to the mirror, because changes that are not applied yet
        must stay in the files in which they were derived."""
        schema = feed_schema(self._table)
        return self._compacted(upto, lambda group: [merged_file(self.path, group, schema).report])

    def _prepared(self) -> DeltaVersion:
        """Creates the Delta table, or adds missing columns. If the feed belongs to an earlier structure of the source
        table, empties the feed instead: its rows can be derived again from the log."""
        wanted = Schema.from_arrow(feed_schema(self._table))
        structure = {STRUCTURE: self._table.structure}
        if self._delta is None:
            create_table(self.path, wanted, {**FEED_PROPERTIES, **structure}, {}, self._root)
        elif not self._fits(self._delta):
            covers_nothing = {self._start_id: 0, self._end_id: 0}
            commit_columns(self._delta, wanted, structure, gone=self._delta.files, positions=covers_nothing)
            settle([self.path])
        else:
            have = {field.name for field in self._delta.schema.fields}
            new = [field for field in wanted.fields if field.name not in have]
            if new:
                commit_columns(self._delta, Schema([*self._delta.schema.fields, *new]))
                settle([self.path])
        self._delta = self._log.newest()
        assert self._delta is not None
        return self._delta

    def _fits(self, delta: DeltaVersion) -> bool:
        if not derived_for(delta, self._table):
            return False
        wanted = {field.name: str(field.type) for field in Schema.from_arrow(feed_schema(self._table)).fields}
        return all(wanted.get(field.name) == str(field.type) for field in delta.schema.fields)


@dataclass(frozen=True)
class Feeds:
    """The change feeds of a lake during one run of the sync. Their Delta logs stay in memory, so opening a feed again
    reads only new Delta commits."""

    layout: Layout
    identity: Identity
    _logs: OpenLogs = field(default_factory=OpenLogs)

    def open(self, table: Table) -> FeedTable:
        return FeedTable(self.layout, self.identity, table, self._logs)

    def restart_if_unreadable(self, table: Table) -> None:
        """Moves a table's feed away if it cannot be read. Called for a table that was copied again, because such a
        table does not need its old feed."""
        with contained() as failed:
            self.open(table)
        if failed.reason is not None:
            place = self.layout.changes(table.name)
            self._logs.forget(place)
            moved_away(self.layout, place)

    def remove(self, name: TableName) -> tuple[int, int]:
        """Deletes the feed of a table that is no longer followed. Returns the number of files and their bytes."""
        place = self.layout.changes(name)
        self._logs.forget(place)
        return remove_table(place)


def moved_away(layout: Layout, folder: Location) -> None:
    """Moves an unreadable folder into the staging folder, where the next maintenance deletes it."""
    storage.move_folder(folder, layout.staging / uuid.uuid4().hex)


def derived_for(delta: DeltaVersion, table: Table) -> bool:
    """Whether the rows of this version of a feed were derived for the present structure of ``table``."""
    return delta.configuration.get(STRUCTURE, "0") == table.structure


def bounds_of(file: Added, order: str = COMMIT_LSN) -> tuple[int, int]:
    """Returns the lowest and the highest value of the column ``order`` in a file of a feed."""
    with reading(f"statistics of {file.path}"):
        stats = json.loads(file.action["stats"])
        return int(stats["minValues"][order]), int(stats["maxValues"][order])
