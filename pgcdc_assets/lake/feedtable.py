"""A table's change feed as a Delta table, written by delta-rs alone: which files hold which span.

A file holds the changes of one transform, so that deriving a span again replaces files. What the feed
covers without a hole is two app transactions of the commit that adds the files: its end (``changes_lsn``)
and its start. Feeds never have deletion vectors, so that removing a file removes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.feed import COMMIT_LSN, FeedFile, feed_schema
from pgcdc_assets.lake.feedwriter import feed_file, merged_file
from pgcdc_assets.lake.files import check_files

MERGED_BYTES: Final = 16 << 20
"""Of a file that compaction makes; what is larger than a quarter of it is left alone."""
FEWEST_MERGED: Final = 8
"""Fewer small files are not worth a commit."""
_PROPERTIES: dict[str, str | None] = {
    "delta.autoOptimize.autoCompact": "false",
    # One commit a turn; nothing that we need lives in commits alone.
    "delta.logRetentionDuration": "interval 1 days",
}


class FeedTable:
    """The feed of one table. Opened at construction; not there before its first commit."""

    def __init__(self, layout: Layout, identity: Identity, table: Table) -> None:
        self.path = layout.changes(table.name)
        self._table = table
        self._end_id = identity.app_id("changes", table.name.folder)
        self._start_id = identity.app_id("changes_since", table.name.folder)
        try:
            self._delta: DeltaTable | None = DeltaTable(self.path)
        except TableNotFoundError:
            self._delta = None

    @property
    def covered(self) -> LsnRange:
        """All that the log holds of the table in it is here. Its end is ``changes_lsn``."""
        if self._delta is None or not self._fits(self._delta):
            return LsnRange(ZERO, ZERO)
        start, end = (self._delta.transaction_version(app_id) or 0 for app_id in (self._start_id, self._end_id))
        return LsnRange(Lsn(start), Lsn(end))

    def files(self, span: LsnRange) -> list[FeedFile]:
        """The files that hold rows of the span; they may hold others too."""
        return [feed_file(self.path / name) for name, _, _ in self._bounds(span)]

    def replaced(self, span: LsnRange) -> tuple[LsnRange, tuple[str, ...]]:
        """The files that deriving ``span`` replaces, and the span widened to all that they hold."""
        while True:
            found = self._bounds(span)
            start = min((low for _, low, _ in found), default=span.start)
            end = max((high + 1 for _, _, high in found), default=span.end)
            wider = LsnRange(Lsn(min(start, span.start)), Lsn(max(end, span.end)))
            if wider == span:
                return span, tuple(name for name, _, _ in found)
            span = wider

    def commit(self, files: Sequence[FeedFile], span: LsnRange, replaced: Sequence[str] = ()) -> None:
        """Add the files that hold ``span`` and remove others, in one commit."""
        covered = self.covered
        delta, mode = self._prepared()
        if mode == "append" and span.start <= covered.end and span.end >= covered.start:
            span = LsnRange(min(covered.start, span.start), max(covered.end, span.end))
        check_files(self.path, [file.report for file in files], Schema.from_arrow(feed_schema(self._table)))
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.name, file.size, {}, now, True, file.stats) for file in files
        ]
        if mode == "append":
            actions += [RemoveAction(name, True, now) for name in replaced]
        passed(FaultPoint.FEED_COMMITTING)
        self._write(delta, actions, mode, span)
        passed(FaultPoint.FEED_COMMITTED)

    def forget(self, upto: Lsn) -> int:
        """Remove the files whose transactions all lie below ``upto``, from which on the feed then is; how many."""
        if self._delta is None:
            return 0
        old = [name for name, _, high in self._bounds(LsnRange(ZERO, upto)) if high < upto]
        if old:
            now, covered = int(time.time() * 1000), self.covered
            removals: list[AddAction | RemoveAction] = [RemoveAction(name, True, now) for name in old]
            span = LsnRange(max(covered.start, upto), max(covered.end, upto))
            self._write(self._delta, removals, "append", span)
        return len(old)

    def compact(self, upto: Lsn) -> int:
        """Merge neighbouring small files of transactions below ``upto``, all applied; how many files that saves.

        What an apply is still to take stays as it was derived.
        """
        if self._delta is None:
            return 0
        now, saved = int(time.time() * 1000), 0
        actions: list[AddAction | RemoveAction] = []
        for group in self._small_neighbours(upto):
            merged = merged_file([self.path / name for name in group], feed_schema(self._table))
            actions.append(AddAction(merged.name, merged.size, {}, now, False, merged.stats))
            actions += [RemoveAction(name, False, now) for name in group]
            saved += len(group) - 1
        if actions:
            self._write(self._delta, actions, "append", self.covered)
        return saved

    def _small_neighbours(self, upto: Lsn) -> Iterator[list[str]]:
        files = sorted(self._bounds(LsnRange(ZERO, upto)), key=lambda file: file[1])
        group: list[str] = []
        size = 0
        for name, _, high in files:
            weight = (self.path / name).stat().st_size
            if high >= upto or weight > MERGED_BYTES // 4:
                continue
            group.append(name)
            size += weight
            if size >= MERGED_BYTES:
                yield group
                group, size = [], 0
        if len(group) >= FEWEST_MERGED:
            yield group

    def _write(
        self, delta: DeltaTable, actions: list[AddAction | RemoveAction], mode: Literal["append", "overwrite"],
        covered: LsnRange,
    ) -> None:  # fmt: skip
        """One commit, with what the feed covers from then on."""
        positions = [Transaction(self._start_id, int(covered.start)), Transaction(self._end_id, int(covered.end))]
        try:
            delta.create_write_transaction(
                actions, mode, Schema.from_arrow(feed_schema(self._table)),
                commit_properties=CommitProperties(app_transactions=positions, max_commit_retries=0),
            )  # fmt: skip
        except CommitFailedError:
            raise LakeError("another writer committed at the same time", thing=str(self.path),
                            do="let one process write to the lake") from None  # fmt: skip
        delta.update_incremental()
        self._delta = delta

    def _prepared(self) -> tuple[DeltaTable, Literal["append", "overwrite"]]:
        """The table with the schema that is needed: made, widened, or to be begun anew.

        A feed whose columns do not fit is that of an earlier shape of the table, before its last copy.
        Its rows stay in the log.
        """
        wanted = feed_schema(self._table)
        if self._delta is None:
            return DeltaTable.create(self.path, wanted, configuration=_PROPERTIES), "append"
        if not self._fits(self._delta):
            return self._delta, "overwrite"
        have = {field.name for field in self._delta.schema().fields}
        new = [field for field in Schema.from_arrow(wanted).fields if field.name not in have]
        if new:
            self._delta.alter.add_columns(new)
            self._delta.update_incremental()
        return self._delta, "append"

    def _fits(self, delta: DeltaTable) -> bool:
        """Whether every column of the feed is one of the table's, with the same type."""
        wanted = {field.name: str(field.type) for field in Schema.from_arrow(feed_schema(self._table)).fields}
        return all(wanted.get(field.name) == str(field.type) for field in delta.schema().fields)

    def _bounds(self, span: LsnRange) -> list[tuple[str, int, int]]:
        """Name, lowest and highest ``commit_lsn`` of the files with rows of the span."""
        if self._delta is None or not self._fits(self._delta):
            return []
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        if not actions.num_rows:
            return []
        low, high = (actions[f"{bound}.{COMMIT_LSN}"] for bound in ("min", "max"))
        actions = actions.filter(pc.and_(pc.less(low, int(span.end)), pc.greater_equal(high, int(span.start))))
        columns = (actions[name].to_pylist() for name in ("path", f"min.{COMMIT_LSN}", f"max.{COMMIT_LSN}"))
        return list(zip(*columns, strict=True))
