"""A lake in which a test writes the mirror and the change feed of one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from pgcdc_assets import Lake
from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, commit_change, commit_rewritten
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.mapping import stated
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import OPS, feed_name, feed_schema
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors, create_mirror, structured
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns
from pgcdc_assets.mirror.delta.rowgroups import live_rows
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.protocol.text.typed import typed
from pgcdc_assets.structure.record import TableState
from pgcdc_assets.structure.successor import successor

OWNER = Identity("7000000000000000001", "shop", "pgcdc")
NAME = TableName("public", "t")
INT, TEXT, TIME = PgType(23, "int4"), PgType(25, "text"), PgType(1184, "timestamptz")
PRICE = PgType(1700, "numeric", (10 << 16 | 2) + 4)
TAGS = PgType(1009, "_text", element=TEXT)
T = Table(
    1000, NAME,
    (Column(1, "id", INT), Column(2, "v", TEXT), Column(3, "n", PRICE), Column(4, "at", TIME), Column(5, "tags", TAGS)),
    key=(1,),
)  # fmt: skip
COPIED = Lsn(100)
INSERT, OLD, UPDATE, DELETE, TRUNCATE = OPS
Row = Mapping[str, str | None]


def renamed(table: Table, **names: str) -> Table:
    """The table after its columns were renamed, as a catalog check records it. ``names``: new names, by old name."""
    columns = tuple(replace(column, name=names.get(column.name, column.name)) for column in table.columns)
    return successor(table, replace(table, columns=columns), COPIED)


class OneTable:
    """The values of rows are texts, as PostgreSQL writes them. Columns that a row does not name are NULL."""

    def __init__(self, root: Path | Location, rows: Sequence[Row] = (), table: Table = T) -> None:
        self.layout, self.table, self.lake = Layout.of(root), table, Lake(root)
        create_mirror(self._mirror.path, mirror_columns(table), {IDENTITY: OWNER.app_id()}, self.layout.root)
        report = self._written(rows, [COPIED] * len(rows))
        commit_change(self._mirror.existing, FileChange(report, {}), {self._mirror.snapshot_app_id: COPIED}, {})
        TableStates(self.layout).set(table, TableState.CATCHING_UP, COPIED)
        self.publish(COPIED)

    def turn(self, end: int, *changes: tuple[Any, ...], lsn: int | None = None, publish: bool = True) -> None:
        """Applies one transaction, which commits just below ``end``. Each change is an operation of the feed and a row.
        A row may have the entry ``_pgcdc_unchanged``: the attnums of columns whose values were not sent. Only the feed
        gets this entry."""
        at = Lsn(end - 1 if lsn is None else lsn)
        self._derive(at, end, changes)
        before = {row["id"]: row for row in self.rows()}
        after = dict(before)
        for op, row in changes:
            if op == TRUNCATE:
                after.clear()
            elif op in (DELETE, OLD):
                after.pop(row["id"])
            else:
                after[row["id"]] = {name: value for name, value in row.items() if not name.startswith("_")}
        gone = {key for key, row in before.items() if after.get(key) != row}
        came = [row for key, row in after.items() if before.get(key) != row]
        generation = self._mirror.generation_app_id
        assert generation is not None
        change = FileChange(self._written(came, [at] * len(came)), self._places(gone))
        commit_change(self._mirror.existing, change, {generation: end}, {})
        if publish:
            self.publish(end)

    def rows(self) -> list[dict[str, str | None]]:
        """The newest rows, as texts."""
        return [
            {name: text for name, text in row.items() if text is not None}
            for found in live_rows(self._mirror.existing) for row in self._texts(found)
        ]  # fmt: skip

    def compact(self) -> None:
        """Writes all rows of the mirror to one new file."""
        mirror = self._mirror.existing
        with DataFile(mirror.folder, self._mirror.physical(mirror_columns(self.table))) as file:
            for rows in live_rows(mirror):
                file.write([column.combine_chunks() for column in rows.columns])
            report = file.finish()
        assert report is not None
        commit_rewritten(mirror, mirror.files, [report])

    def derive_again(self, table: Table, end: int, *changes: tuple[Any, ...]) -> None:
        """Derives one transaction, which commits just below ``end``, for another structure of the table, as a repair
        does. The mirror stays as it is."""
        self.alter(table)
        self.table = table
        self._derive(Lsn(end - 1), end, changes)

    def widen(self, table: Table) -> None:
        """Adds columns to the mirror as an apply does if rows have new columns: the mirror records no structure."""
        delta = self._mirror.existing
        more = [field for field in mirror_columns(table) if field.name not in delta.columns.names]
        commit_columns(delta, stated(delta.metadata).with_more(pa.schema(more)))
        self.alter(table)
        self.table = table

    def alter(self, table: Table) -> None:
        """Records that the source's table has another structure. The mirror stays as it is."""
        TableStates(self.layout).set(table, TableState.CATCHING_UP, COPIED)

    def detach(self, *keys: str) -> None:
        """Deletes rows from the mirror, as if their partition had been detached: the same commit records the structure.
        The feed gets no change."""
        mirror = self._mirror.existing
        commit_change(mirror, FileChange([], self._places(set(keys))), {}, {}, structured(self.table, COPIED))

    def publish(self, lsn: int) -> None:
        mirror = self._mirror
        assert mirror.replay_lsn is not None
        ConsistentPoints(self.layout).publish(Lsn(lsn), {NAME: mirror.version}, {NAME: mirror.replay_lsn})

    @property
    def feeds(self) -> Feeds:
        return Feeds(self.layout, OWNER)

    @property
    def _mirror(self) -> Mirror:
        return Mirrors(self.layout, OWNER).open(NAME)

    def _derive(self, at: Lsn, end: int, changes: Sequence[tuple[str, dict[str, Any]]]) -> None:
        writer = FeedWriter(self.layout.changes(NAME), None, 1)
        schema, columns = feed_schema(self.table), self.table.columns
        done = typed(self._columns([row for _, row in changes]), columns, len(changes))
        values = {
            "_pgcdc_op": [op for op, _ in changes],
            "_pgcdc_commit_lsn": [at] * len(changes),
            "_pgcdc_ordinal": [2 * place + (op != OLD) for place, (op, _) in enumerate(changes)],
            "_pgcdc_commit_ts": [at * 1_000_000] * len(changes),
            "_pgcdc_xid": [at] * len(changes),
            "_pgcdc_origin": [None] * len(changes),
            "_pgcdc_unchanged": [row.get("_pgcdc_unchanged") for _, row in changes],
        }
        arrays: dict[str, Any] = {name: pa.array(found, schema.field(name).type) for name, found in values.items()}
        arrays["_pgcdc_raw"] = done.raw
        arrays |= {feed_name(column.name): array for column, array in zip(columns, done.values, strict=True)}
        writer.write(pa.table([arrays[name] for name in schema.names], schema=schema))
        feed = self.feeds.open(self.table)
        start = feed.covered.end if feed.covered.end >= COPIED else COPIED
        feed.commit([writer.close()], LsnRange(start, Lsn(end)))

    def _columns(self, rows: Sequence[Row]) -> list[pa.Array]:
        return [pa.array([row.get(column.name) for row in rows], pa.string()) for column in self.table.columns]

    def _written(self, rows: Sequence[Row], lsns: Sequence[int]) -> list[FileReport]:
        done = typed(self._columns(rows), self.table.columns, len(rows))
        own = [pa.array(lsns, pa.int64()), pa.nulls(len(rows), pa.timestamp("us", "UTC")), done.raw]
        with DataFile(self._mirror.path, self._mirror.physical(mirror_columns(self.table))) as file:
            file.write([*done.values, *own])
            report = file.finish()
        return [] if report is None else [report]

    def _places(self, keys: set[str | None]) -> dict[str, BitMap64]:
        gone: dict[str, BitMap64] = {}
        target = self._mirror.target(self.table, self._mirror.existing.files)
        for group in target.groups():
            ids = group.read(["id"])["id"].to_pylist()
            at = [group.start + place for place, key in enumerate(ids) if group.alive[place] and str(key) in keys]
            if at:
                gone[group.path] = gone.get(group.path, BitMap64()) | BitMap64(at)
        return gone

    def _texts(self, rows: pa.Table) -> list[dict[str, str | None]]:
        return [
            {column.name: self._text(row, column.name) for column in self.table.columns} for row in rows.to_pylist()
        ]

    @staticmethod
    def _text(row: Mapping[str, Any], name: str) -> str | None:
        raw = dict(row["_pgcdc_raw"] or ())
        value = row[name]
        if isinstance(value, list):
            return "{" + ",".join(value) + "}"
        return raw.get(name) if value is None else str(value)
