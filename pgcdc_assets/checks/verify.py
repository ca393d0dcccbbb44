"""Checks whether the mirrors equal the source. Compares the values of every row of a table at one LSN.

The source is read under a snapshot whose LSN is exact (a temporary slot's consistent point), and changes are applied to
the mirrors up to exactly that LSN. Both sides are then rendered as text, by other code than the code that filled the
mirrors. Memory is bounded, because only 16 bytes per row are kept, on disk, and they are sorted bucket by bucket.

No lock prevents other sessions from truncating or altering a table after the snapshot was taken. A table that was
truncated, rewritten or altered before it was read is compared again under a new snapshot, at the new snapshot's LSN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import pyarrow as pa

from pgcdc_assets.checks.compare import SourceDigests, compare_sides, source_digests
from pgcdc_assets.checks.report import TableReport, VerifyReport, keep_proofs
from pgcdc_assets.checks.sides import Comparison, MirrorSide, SourceSide, opened, queryable, readable
from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.errors import (
    CopyBlocked,
    CopyOutdated,
    LakeError,
    PgcdcError,
    SourceUnavailable,
    UnknownTable,
)
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.published import read_published
from pgcdc_assets.source.snapshot.export import Snapshot, exported_snapshot, shown_tables

SNAPSHOTS = 5
"""The greatest number of snapshots for one table, if it was truncated or altered after each snapshot."""
AGAIN_SECONDS = 600.0
"""After this time, no further snapshot is taken for tables that could not be compared."""


class ComparisonPoint(Protocol):
    """The consistent point that ``reach`` returns."""

    @property
    def replay_lsn(self) -> Lsn: ...
    @property
    def tables(self) -> Mapping[TableName, int]: ...


TakeSnapshot = Callable[[], AbstractContextManager[Snapshot]]


def verify(
    settings: Settings, catalog: Catalog, tables: Sequence[TableName] | None, reach: Callable[[Lsn], ComparisonPoint],
    *, conninfo: str | None = None, snapshot: TakeSnapshot | None = None,
    on_table: Callable[[TableReport], None] = lambda report: None,
) -> VerifyReport:  # fmt: skip
    """Compare source and mirrors at C, the consistent point of a new snapshot of the source. A sync, and writers to the
    source, may run at the same time. Raises UnknownTable for a table that is not in the catalog.

    ``tables``: None means all tables of the catalog. ``reach(C)`` returns the consistent point of the lake whose
    ``replay_lsn`` is exactly C, or raises an error. ``conninfo`` is needed if the settings do not name the source
    (embedded server). ``snapshot`` takes the snapshot, which stays open until all tables are read.

    A table that was altered after the snapshot and before it was read is compared again under a new snapshot. At most
    SNAPSHOTS snapshots are taken, and no new one after AGAIN_SECONDS."""
    chosen = [_known(catalog, name) for name in tables] if tables is not None else [t.name for t in catalog.tables]
    source = conninfo or settings.source or ""
    comparing = _Comparing(settings, catalog, source, reach, snapshot or partial(exported_snapshot, source), on_table)
    reports: dict[TableName, TableReport] = {}
    left, taken = chosen, 0
    deadline = time.monotonic() + AGAIN_SECONDS
    while taken == 0 or (left and taken < SNAPSHOTS and time.monotonic() < deadline):
        try:
            found, left = comparing.under_a_snapshot(left)
        except (CopyBlocked, LakeError):
            if taken == 0:
                raise
            # The earlier reports are valid. The remaining tables stay "not compared".
            break
        reports |= found
        taken += 1
    for name in left:
        under = f"in {taken} attempts" if taken > 1 else "in one attempt"
        reason = f"{reports[name].reason}, {under}; run `pgcdc verify` again"
        reports[name] = replace(reports[name], reason=reason)
        on_table(reports[name])
    keep_proofs(settings.layout, reports.values())
    return VerifyReport(tuple(reports[name] for name in chosen))


@dataclass(frozen=True)
class _Seen:
    """Schema and row count of a mirror, kept from an earlier comparison of this verify."""

    schema: pa.Schema
    rows: int


@dataclass(frozen=True)
class _Table:
    """A table as a snapshot shows it. ``copied``: the table as the lake recorded it for the mirror. ``via_root``:
    whether its partitions' rows are published under the name of the root."""

    table: Table
    copied: Table | None
    via_root: bool

    def against(self, schema: pa.Schema) -> Comparison:
        return Comparison.of(self.table, schema, via_root=self.via_root, copied=self.copied)


@dataclass(frozen=True)
class _Comparing:
    settings: Settings
    catalog: Catalog
    source: str
    reach: Callable[[Lsn], ComparisonPoint]
    snapshot: TakeSnapshot
    on_table: Callable[[TableReport], None]
    seen: dict[TableName, _Seen] = field(default_factory=dict)
    """The mirrors that this verify has opened, for :meth:`_read_early`."""

    def under_a_snapshot(self, chosen: Sequence[TableName]) -> tuple[dict[TableName, TableReport], list[TableName]]:
        """Compare the tables under one snapshot. Returns their reports, and the tables that could not be compared but
        may be comparable under a new snapshot."""
        reports: dict[TableName, TableReport] = {}
        again: list[TableName] = []
        with ExitStack() as stack:
            snapshot = stack.enter_context(self.snapshot())
            lsn = snapshot.consistent_point
            tables, outdated = self._shown(snapshot, chosen)
            early = self._read_early(snapshot, tables, outdated, stack)
            versions: Mapping[TableName, int] = {}
            if not chosen or len(outdated) < len(chosen):
                point = self.reach(lsn)
                if point.replay_lsn != lsn:
                    raise LakeError(
                        f"the mirrors are at {point.replay_lsn}, so they cannot be compared with the source's snapshot",
                        lsn=lsn,
                    )
                versions = point.tables
            for name in chosen:
                try:
                    if name in outdated:
                        raise outdated[name]
                    report = self._compared(name, tables[name], versions.get(name), snapshot, early.get(name))
                except (CopyOutdated, CopyBlocked) as error:
                    report = TableReport(name, compared=False, reason=error.what)
                    if name in tables:
                        again.append(name)
                reports[name] = replace(report, lsn=lsn)
                if name not in again:
                    self.on_table(reports[name])
        return reports, again

    def _shown(
        self, snapshot: Snapshot, chosen: Sequence[TableName]
    ) -> tuple[dict[TableName, _Table], dict[TableName, CopyOutdated | CopyBlocked]]:
        """The tables as they are published at the snapshot's LSN, because the saved catalog may be older. Also the
        tables that cannot be read under the snapshot, with the reason."""
        shown, outdated = shown_tables(snapshot, chosen, self.catalog.publications)
        with snapshot.reading() as conn:
            via_root: Container[int] = read_published(conn, self.catalog.publications, unread=True).keys()
        states = TableStates(self.settings.layout).all()
        copied = {name: states[name].table for name in shown if name in states}
        return {name: _Table(table, copied.get(name), table.oid in via_root) for name, table in shown.items()}, outdated

    def _read_early(
        self, snapshot: Snapshot, tables: Mapping[TableName, _Table],
        outdated: dict[TableName, CopyOutdated | CopyBlocked],
        stack: ExitStack,
    ) -> dict[TableName, SourceDigests]:  # fmt: skip
        """Read the source's rows of tables that could not be compared under an earlier snapshot. They are read before
        changes are applied to the mirrors up to the snapshot's LSN, because a table that is truncated often may not
        stay unchanged for that long. How the source is read depends on the mirror's columns, which are known from the
        earlier comparison."""
        read: dict[TableName, SourceDigests] = {}
        for name, table in tables.items():
            if name not in self.seen or name in outdated:
                continue
            seen = self.seen[name]
            source = SourceSide(self.source, snapshot.name, table.against(seen.schema))
            try:
                read[name] = stack.enter_context(source_digests(source, max(seen.rows, table.table.rows)))
            except CopyOutdated as error:
                outdated[name] = error
            except SourceUnavailable:
                raise
            except PgcdcError:
                # The table is read again by _compared, which reports the failure.
                continue
        return read

    def _compared(
        self, name: TableName, table: _Table, version: int | None, snapshot: Snapshot, early: SourceDigests | None
    ) -> TableReport:
        """Compares one table. If this fails, the report contains the reason, so that other tables are still reported.
        Raises CopyOutdated if the table was changed so that the snapshot no longer shows its rows."""
        try:
            if (refused := refusal(table.table)) is not None:
                return TableReport(name, compared=False, reason=f"cannot be mirrored: {refused}")
            if version is None:
                return TableReport(name, compared=False, reason="has no mirror at this LSN: `pgcdc status` says why")
            place = self.settings.layout.mirror(name)
            with readable(name):
                mirror = opened(place, version)
                schema = pa.schema(mirror.schema().to_arrow())
                held = DeltaLog(place).at(version)
                before = self.seen.get(name)
                self.seen[name] = _Seen(schema, mirror.count())
            comparison = table.against(schema)
            source = SourceSide(self.source, snapshot.name, comparison)
            sides = MirrorSide(mirror, comparison, None if queryable(held) else held)
            fits = before is not None and before.schema == schema
            return compare_sides(source, sides, early if fits else None)
        except (SourceUnavailable, CopyOutdated):
            raise
        except CopyBlocked as error:
            return TableReport(name, compared=False, reason=str(error))
        except PgcdcError as error:
            return TableReport(name, compared=False, failed=True, reason=str(error))


def _known(catalog: Catalog, name: TableName) -> TableName:
    if catalog.table(name) is None:
        raise UnknownTable("is not mirrored", thing=str(name))
    return name
