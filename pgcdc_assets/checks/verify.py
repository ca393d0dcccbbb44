"""Checks that the mirrors equal the source: compares every row's values, each table at one LSN.

The source is read under a snapshot whose LSN is exact (a temporary slot's consistent point), the mirrors are brought to
exactly that LSN, and both sides are rendered as text independently of the codec that filled the mirrors. Memory is
bounded: 16 bytes per row are kept on disk, and sorted bucket by bucket.

No lock keeps a table as the snapshot shows it. A table that was truncated, rewritten or altered before it was read is
compared again under a new snapshot, at the new snapshot's LSN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from pgcdc_assets.checks.compared import Comparison, MirrorSide, Part, Side, SourceSide, readable
from pgcdc_assets.checks.digest import Differences, DigestStore, Seed, compare
from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.foreign import opened, queryable
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
from pgcdc_assets.source.snapshot.export import Snapshot, exported_snapshot
from pgcdc_assets.source.snapshot.reading import read_whole
from pgcdc_assets.source.snapshot.shown import shown_tables

EXAMPLES = 10
"""Rows shown of each table: enough to see a pattern, few enough to read."""

SNAPSHOTS = 5
"""The most snapshots under which one table is compared, if somebody truncates or alters it after each of them."""
AGAIN_SECONDS = 600.0
"""Seconds after which no further snapshot is taken for tables that could not be compared."""

_SHOWN_LENGTH = 80


class ComparisonPoint(Protocol):
    """The result of ``reach``: a consistent point."""

    @property
    def replay_lsn(self) -> Lsn: ...
    @property
    def tables(self) -> Mapping[TableName, int]: ...


@dataclass(frozen=True)
class Example:
    """One row that differs, named by its key (by all its values if the table has no key)."""

    kind: str
    """``different``, ``missing`` (in the mirror) or ``extra`` (in the mirror)."""
    key: dict[str, str | None]
    columns: tuple[str, ...] = ()
    """The columns that differ, if it is ``different``."""


class Verdict(StrEnum):
    """What the comparison of a table found."""

    EQUAL = "equal"
    UNKNOWN = "unknown"
    """Unpublished updates and deletes can be all of the difference; whether they are is not known."""
    DIFFERS = "differs"
    NOT_COMPARED = "not_compared"
    """Nothing is known about the table: it is set aside, waits for a copy, or was altered or locked each time."""
    FAILED = "failed"
    """One side could not be read, and another try would not help."""


@dataclass(frozen=True)
class TableReport:
    """The comparison of one table at ``lsn``. It has a ``reason`` if it could not be made, or if a difference is
    expected."""

    table: TableName
    source_rows: int = 0
    mirror_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    examples: tuple[Example, ...] = ()
    reason: str | None = None
    compared: bool = True
    failed: bool = False
    updates_seen: bool = True
    lsn: Lsn | None = None

    @property
    def verdict(self) -> Verdict:
        if not self.compared:
            return Verdict.FAILED if self.failed else Verdict.NOT_COMPARED
        if self.equal:
            return Verdict.EQUAL
        return Verdict.UNKNOWN if self.explained else Verdict.DIFFERS

    @property
    def equal(self) -> bool:
        return self.compared and not (self.missing or self.extra or self.different)

    @property
    def explained(self) -> bool:
        """Whether unpublished updates and deletes can be all of the difference, not whether they are.

        A delete leaves one row too many in the mirror, and an update one too many and one too few. So a mirror
        with fewer rows than the source has lost some.
        """
        return self.compared and not self.updates_seen and self.missing <= self.extra and not self.different

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": str(self.table), "verdict": self.verdict.value}
        data |= {"lsn": None if self.lsn is None else str(self.lsn), "source_rows": self.source_rows}
        data |= {"mirror_rows": self.mirror_rows, "missing": self.missing, "extra": self.extra}
        data |= {"different": self.different, "reason": self.reason}
        shown = [{"kind": e.kind, "key": e.key, "columns": list(e.columns)} for e in self.examples]
        return data | {"examples": shown}


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of all tables, each at its own LSN."""

    tables: tuple[TableReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every table is equal, or differs only as its unpublished updates and deletes can explain."""
        return all(table.equal or table.explained for table in self.tables)

    @property
    def exit_code(self) -> int:
        """0: ok; 1: a table differs, or could not be read; 3: none does, but some could not be compared."""
        if any(table.verdict in (Verdict.DIFFERS, Verdict.FAILED) for table in self.tables):
            return 1
        return 0 if self.ok else 3

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "tables": [table.to_json() for table in self.tables]}


TakeSnapshot = Callable[[Sequence[TableName]], AbstractContextManager[Snapshot]]


def verify(
    settings: Settings, catalog: Catalog, tables: Sequence[TableName] | None, reach: Callable[[Lsn], ComparisonPoint],
    *, conninfo: str | None = None, snapshot: TakeSnapshot | None = None,
    on_table: Callable[[TableReport], None] = lambda report: None,
) -> VerifyReport:  # fmt: skip
    """Compare source and mirrors at a fresh consistent point C of the source.

    ``tables`` None means all of the catalog; UnknownTable for one it lacks. ``reach(C)`` returns the consistent point
    whose ``replay_lsn`` is exactly C, or raises. ``conninfo`` is the source's, if the settings leave it to the embedded
    server; ``snapshot`` takes the snapshot. A sync and other writers may run meanwhile; a snapshot is open on the
    source for as long as the tables are read.

    Tables that were altered between a snapshot and their reading are compared again under a new snapshot, up to
    SNAPSHOTS times, and within AGAIN_SECONDS.
    """
    chosen = [_known(catalog, name) for name in tables] if tables is not None else [t.name for t in catalog.tables]
    comparing = _Comparing(settings, catalog, conninfo or settings.source or "", reach, snapshot, on_table)
    reports: dict[TableName, TableReport] = {}
    left, taken = chosen, 0
    deadline = time.monotonic() + AGAIN_SECONDS
    while taken == 0 or (left and taken < SNAPSHOTS and time.monotonic() < deadline):
        try:
            found, left = comparing.under_a_snapshot(left)
        except (CopyBlocked, LakeError):
            if taken == 0:
                raise
            # The earlier reports stand. Nothing is known about the tables that are left.
            break
        reports |= found
        taken += 1
    for name in left:
        under = f"under {taken} snapshots" if taken > 1 else "under one snapshot"
        reason = f"{reports[name].reason}, {under}; run `pgcdc verify` again"
        reports[name] = replace(reports[name], reason=reason)
        on_table(reports[name])
    return VerifyReport(tuple(reports[name] for name in chosen))


@dataclass(frozen=True)
class _Comparing:
    """Compares tables under one snapshot after the other."""

    settings: Settings
    catalog: Catalog
    source: str
    reach: Callable[[Lsn], ComparisonPoint]
    snapshot: TakeSnapshot | None
    on_table: Callable[[TableReport], None]

    def under_a_snapshot(self, chosen: Sequence[TableName]) -> tuple[dict[TableName, TableReport], list[TableName]]:
        """The reports of the tables, and the tables that another snapshot may help."""
        reports: dict[TableName, TableReport] = {}
        again: list[TableName] = []
        with (self.snapshot or self._exported)(chosen) as snapshot:
            # The tables as they are published at C; the saved catalog may be older.
            shown, outdated = shown_tables(snapshot, chosen, self.catalog.publications)
            with snapshot.reading() as conn:
                via_root = read_published(conn, self.catalog.publications, unread=True).keys()
            lsn = snapshot.consistent_point
            point = self.reach(lsn)
            if point.replay_lsn != lsn:
                raise LakeError(f"the mirrors stand at {point.replay_lsn}", lsn=lsn)
            states = TableStates(self.settings.layout).all()
            for name in chosen:
                table: Table | CopyOutdated = outdated.get(name) or shown[name]
                copied = states[name].table if name in states else None
                try:
                    report = self._compared(name, table, copied, point.tables.get(name), snapshot, via_root)
                except CopyOutdated as error:
                    report = TableReport(name, compared=False, reason=error.what)
                    if name in shown:
                        again.append(name)
                reports[name] = replace(report, lsn=lsn)
                if name not in again:
                    self.on_table(reports[name])
        return reports, again

    def _exported(self, tables: Sequence[TableName]) -> AbstractContextManager[Snapshot]:
        by_replication = self.settings.replication_connections
        return exported_snapshot(self.source, tables, replication_connections=by_replication)

    def _compared(
        self, name: TableName, table: Table | CopyOutdated, copied: Table | None, version: int | None,
        snapshot: Snapshot, via_root: Container[int],
    ) -> TableReport:  # fmt: skip
        """The comparison of one table, or why it cannot be made: trouble with one table must not prevent the others'
        reports. Raises CopyOutdated if the table is not as the snapshot shows it."""
        try:
            if isinstance(table, CopyOutdated):
                raise table
            if (refused := refusal(table)) is not None:
                return TableReport(name, compared=False, reason=f"is set aside: {refused}")
            if version is None:
                return TableReport(name, compared=False, reason="is not at this point: see `pgcdc status`")
            place = self.settings.layout.mirror(name)
            with readable(name):
                mirror = opened(place, version)
                schema = pa.schema(mirror.schema().to_arrow())
                held = DeltaLog(place).at(version)
            comparison = Comparison.of(table, schema, via_root=table.oid in via_root, copied=copied)
            source = SourceSide(self.source, snapshot.name, comparison)
            return compare_sides(source, MirrorSide(mirror, comparison, None if queryable(held) else held))
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


def compare_sides(source: SourceSide, mirror: MirrorSide) -> TableReport:
    """Read both sides at the same time and compare them; if they differ, fetch examples by a second reading."""
    seed = Seed()
    comparison = source.comparison
    rows_expected = max(mirror.mirror.count(), comparison.table.rows)
    with TemporaryDirectory(prefix="pgcdc-verify-") as folder, ThreadPoolExecutor(2) as pool:
        here, there = (DigestStore(Path(folder) / name, rows_expected) for name in ("source", "mirror"))
        jobs = [
            pool.submit(_digest, source, comparison.key, seed, here),
            pool.submit(_digest, mirror, comparison.key, seed, there),
        ]
        for job in jobs:
            job.result()
        found = compare(here, there, EXAMPLES)
        report = TableReport(
            comparison.table.name, here.rows, there.rows, found.missing, found.extra, found.different,
            tuple(_examples(source, mirror, seed, found)) if found.total else (),
            updates_seen=comparison.table.updates_seen,
        )  # fmt: skip
        return replace(report, reason=_of_inserts_only(report))


def _of_inserts_only(report: TableReport) -> str | None:
    if report.updates_seen:
        return None
    told = "published for inserts only"
    if report.equal:
        return f"{told}: updates and deletes are not seen"
    if report.explained:
        return f"{told}: rows that the source changed or deleted since; a damaged row could not be told from them"
    return f"{told}, but no update and no delete explains all that is missing"


def _digest(side: Side, key: list[int], seed: Seed, store: DigestStore) -> None:
    for part in side.parts(shown=False):
        for keys, rows in read_whole(partial(_digests, part, key, seed)):
            store.add(keys, rows)


def _digests(part: Part, key: list[int], seed: Seed) -> list[tuple[np.ndarray, np.ndarray]]:
    """Digests of the keys and of the rows: 16 bytes per row, few enough to be kept until the part ends."""
    found = []
    for batch in part():
        digests = [seed.of_texts(text) for text in batch.texts]
        keys = seed.of_rows([digests[place] for place in key], batch.rows)
        found.append((keys, seed.of_rows(digests, batch.rows)))
    return found


@dataclass(frozen=True)
class _Sample:
    """A row of interest: its texts by column, and its key as people read it, by place."""

    texts: list[str | None]
    shown: dict[int, str | None]


def _examples(source: SourceSide, mirror: MirrorSide, seed: Seed, found: Differences) -> list[Example]:
    comparison = source.comparison
    turns = zip_longest(*([(kind, key) for key in keys] for kind, keys in found.keys.items()))
    chosen = [pick for pick in chain.from_iterable(turns) if pick is not None][:EXAMPLES]
    wanted = np.array([key for _, key in chosen], np.uint64)
    here, there = (_sampled(side, comparison.key, seed, wanted) for side in (source, mirror))
    examples = []
    for kind, key in chosen:
        left, right = here.get(key), there.get(key)
        row = right if kind == "extra" else left
        if row is None:
            continue
        changed: tuple[str, ...] = ()
        if kind == "different" and left and right:
            pairs = zip(comparison.names, left.texts, right.texts, strict=True)
            changed = tuple(name for name, a, b in pairs if a != b)
        examples.append(Example(kind, {comparison.names[place]: row.shown[place] for place in comparison.key}, changed))
    return examples


def _sampled(side: Side, key: list[int], seed: Seed, wanted: np.ndarray) -> dict[int, _Sample]:
    """The first row of each wanted key digest."""
    samples: dict[int, _Sample] = {}
    for part in side.parts(shown=True):
        for digest, sample in read_whole(partial(_samples, part, key, seed, wanted)):
            samples.setdefault(digest, sample)
    return samples


def _samples(part: Part, key: list[int], seed: Seed, wanted: np.ndarray) -> list[tuple[int, _Sample]]:
    found: dict[int, _Sample] = {}
    for batch in part():
        keys = seed.of_rows([seed.of_texts(batch.texts[place]) for place in key], batch.rows)
        for at in np.flatnonzero(np.isin(keys, wanted)):
            row = int(at)
            texts = [text[row].as_py() for text in batch.texts]
            values = {place: array[row].as_py() for place, array in batch.shown.items()}
            shown = {place: _readable(values.get(place), texts[place]) for place in key}
            found.setdefault(int(keys[row]), _Sample(texts, shown))
    return list(found.items())


def _readable(value: object, text: str | None) -> str | None:
    """The value as people read it; ``text`` replaces one that did not fit the mirror's column, or was not read."""
    shown = text if value is None else "\\x" + value.hex() if isinstance(value, bytes) else str(value)
    return shown if shown is None or len(shown) <= _SHOWN_LENGTH else shown[: _SHOWN_LENGTH - 1] + "…"
