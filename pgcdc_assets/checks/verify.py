"""Checks that the mirrors equal the source: compares every row's values, at one LSN.

The source is read under a snapshot whose LSN is exact (a temporary slot's consistent point), the mirrors are brought to
exactly that LSN, and both sides are rendered as text independently of the codec that filled the mirrors. Memory is
bounded: 16 bytes per row are kept on disk, and sorted bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from pgcdc_assets.errors import CopyOutdated, LakeError, PgcdcError, SourceUnavailable, UnknownTable
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.published import read_published
from pgcdc_assets.source.slot.creation import OnWait
from pgcdc_assets.source.snapshot.export import Snapshot, exported_snapshot
from pgcdc_assets.source.snapshot.reading import read_whole
from pgcdc_assets.source.snapshot.shown import shown_tables

EXAMPLES = 10
"""Rows shown of each table: enough to see a pattern, few enough to read."""

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


@dataclass(frozen=True)
class TableReport:
    """The comparison of one table. It has a ``reason`` if it could not be made, or if a difference is expected."""

    table: TableName
    source_rows: int = 0
    mirror_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    examples: tuple[Example, ...] = ()
    reason: str | None = None
    compared: bool = True
    updates_seen: bool = True

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
        data: dict[str, Any] = {"name": str(self.table), "source_rows": self.source_rows}
        data |= {"mirror_rows": self.mirror_rows, "missing": self.missing, "extra": self.extra}
        data |= {"different": self.different, "reason": self.reason}
        shown = [{"kind": e.kind, "key": e.key, "columns": list(e.columns)} for e in self.examples]
        return data | {"examples": shown}


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of all tables at one LSN."""

    lsn: Lsn
    tables: tuple[TableReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every table is equal, or differs only as its unpublished updates and deletes can explain."""
        return all(table.equal or table.explained for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "lsn": str(self.lsn), "tables": [table.to_json() for table in self.tables]}


def verify(
    settings: Settings, catalog: Catalog, tables: Sequence[TableName] | None, reach: Callable[[Lsn], ComparisonPoint],
    *, conninfo: str | None = None, on_table: Callable[[TableReport], None] = lambda report: None,
    on_wait: OnWait | None = None,
) -> VerifyReport:  # fmt: skip
    """Compare source and mirrors at a fresh consistent point C of the source.

    ``tables`` None means all of the catalog; UnknownTable for one it lacks. ``reach(C)`` returns the consistent point
    whose ``replay_lsn`` is exactly C, or raises. ``conninfo`` is the source's, if the settings leave it to the embedded
    server; ``on_wait`` is called with who delays the snapshot. A sync and other writers may run meanwhile; the snapshot
    is held on the source for as long as this takes.
    """
    chosen = [_known(catalog, name) for name in tables] if tables is not None else [t.name for t in catalog.tables]
    source = conninfo or settings.source or ""
    reports = []
    by_replication = settings.replication_connections
    with exported_snapshot(source, chosen, on_wait=on_wait, replication_connections=by_replication) as snapshot:
        # The tables as they are published at C; the saved catalog may be older.
        shown, outdated = shown_tables(snapshot, chosen, catalog.publications)
        with snapshot.reading() as conn:
            via_root = read_published(conn, catalog.publications, unread=True).keys()
        point = reach(snapshot.consistent_point)
        if point.replay_lsn != snapshot.consistent_point:
            raise LakeError(f"the mirrors stand at {point.replay_lsn}", lsn=snapshot.consistent_point)
        states = TableStates(settings.layout).all()
        for name in chosen:
            table: Table | CopyOutdated = outdated.get(name) or shown[name]
            copied = states[name].table if name in states else None
            report = _reported(name, table, copied, point.tables.get(name), settings, source, snapshot, via_root)
            on_table(report)
            reports.append(report)
        return VerifyReport(snapshot.consistent_point, tuple(reports))


def _reported(
    name: TableName, table: Table | CopyOutdated, copied: Table | None, version: int | None, settings: Settings,
    source: str, snapshot: Snapshot, via_root: Container[int],
) -> TableReport:  # fmt: skip
    """The comparison of one table, or why it cannot be made: trouble with one table must not prevent the others'
    reports."""
    try:
        if isinstance(table, CopyOutdated):
            raise table
        if (refused := refusal(table)) is not None:
            return TableReport(name, compared=False, reason=f"is set aside: {refused}")
        if version is None:
            return TableReport(name, compared=False, reason="is not at this point: see `pgcdc status`")
        with readable(name):
            mirror = opened(settings.layout.mirror(name), version)
            schema = pa.schema(mirror.schema().to_arrow())
            held = DeltaLog(settings.layout.mirror(name)).at(version)
        comparison = Comparison.of(table, schema, via_root=table.oid in via_root, copied=copied)
        by_files = None if queryable(held) else held
        return compare_sides(SourceSide(source, snapshot.name, comparison), MirrorSide(mirror, comparison, by_files))
    except SourceUnavailable:
        raise
    except PgcdcError as error:
        return TableReport(name, compared=False, reason=str(error))


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
