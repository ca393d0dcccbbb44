"""A source, log, feeds and mirrors that the tests of transform and apply share. No table is copied: mirrors start empty
at the slot's consistent point, so tables must be empty when :meth:`Pipeline.follow` is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.feed.plan import Followed
from pgcdc_assets.feed.schema import FeedPart
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.mirror.delta.apply import apply_tables
from pgcdc_assets.mirror.delta.compaction import COMPACTION, Compaction
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns
from pgcdc_assets.mirror.delta.reshape import reshape_mirror
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.protocol.text.typed import typed
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.successor import successor
from tests.deltatables import commit, live_files
from tests.fix_postgres import Database
from tests.flow.mirrors import no_spark
from tests.receiving import run_to
from tests.structure.marked import marks

SECONDS = 120.0


@dataclass
class Pipeline:
    """Publication ``p``, one slot, and the tables that :meth:`follow` found in the publication."""

    database: Database
    conn: psycopg.Connection[Any]
    spark: SparkSession
    layout: Layout
    compaction: Compaction = COMPACTION
    log: ChangeLog = field(init=False)
    tables: dict[str, Table] = field(default_factory=dict)
    replayed: dict[str, Lsn] = field(default_factory=dict)
    parts: dict[str, FeedPart] = field(default_factory=dict)
    set_aside: dict[str, tuple[Lsn, str]] = field(default_factory=dict)

    def run(self, *statements: str) -> None:
        """Runs each statement in its own transaction."""
        for statement in statements:
            self.conn.execute(statement.encode())

    def transaction(self, *statements: str) -> None:
        with self.conn.transaction():
            self.run(*statements)

    def follow(self, tables: str) -> None:
        """Publishes tables (a list in SQL syntax), and creates the slot, the log and the empty mirrors."""
        # The rows of source and mirror are compared as texts. With these settings, the source's texts have the form of
        # the mirror's texts. The defaults of the test server are unusual on purpose.
        self.run("SET DateStyle = ISO", "SET TimeZone = UTC", f"CREATE PUBLICATION p FOR TABLE {tables}")
        slot = f"s_{self.database.name}"
        start = self.lsn("(pg_create_logical_replication_slot(%s, 'pgoutput')).lsn", slot)
        self.log = ChangeLog(self.layout)
        self.log.create(identity(self.conn, slot), start, 1)
        for table in read_tables(self.conn, ["p"]):
            schema = mirror_columns(table)
            create_mirror(
                self.layout.mirror(table.name),
                schema,
                {IDENTITY: self.identity.app_id()},
                self.layout.mirror(table.name),
            )
            mirror = self.mirror(table.name.name)
            commit(mirror.path, [], "overwrite", {mirror.snapshot_app_id: start})
            self.tables[table.name.name] = table
            self.replayed[table.name.name] = start

    @property
    def identity(self) -> Identity:
        return self.log.identity

    def mirror(self, name: str) -> Mirror:
        return self.mirrors.open(TableName("public", name))

    @property
    def mirrors(self) -> Mirrors:
        return Mirrors(self.layout, self.identity)

    @property
    def feeds(self) -> Feeds:
        return Feeds(self.layout, self.identity)

    def receive(self) -> Lsn:
        """Receives everything that is committed at the time of the call. Returns the log's new position."""
        # Everything that was committed before this call is below this LSN.
        goal = self.lsn("pg_current_wal_insert_lsn()")
        receiver = ReceiverProcess(ReceiverSettings(
            self.database.conninfo, str(self.layout.root), ("p",), 32 << 20, 0.1, messages=("*",)
        ))  # fmt: skip
        run_to(receiver, goal)
        return self.log.position()

    def derive(self, upto: Lsn, *, again: bool = False) -> dict[TableName, FeedPart]:
        """Derives the feeds of one turn, up to the LSN ``upto``."""
        followed = [Followed(self.tables[n], self.replayed[n]) for n in self.tables if n not in self.set_aside]
        span = LogSpan(self.log, LsnRange(min(entry.after for entry in followed), upto))
        parts = transform(self.spark, span, self.feeds, followed, again=again)
        self.parts = {name.name: part for name, part in parts.items()}
        return parts

    def turn(self, upto: Lsn | None = None) -> dict[str, Applied]:
        """Receives, transforms and applies. Returns the results of the apply by table."""
        upto = upto or self.receive()
        parts = self.derive(upto)
        found = list(parts.values())
        done = apply_tables(self.spark, self.mirrors, found, upto, compaction=self.compaction)
        for name, part in parts.items():
            if part.ended is not None:
                self.set_aside[name.name] = part.ended.lsn, part.ended.reason
            else:
                self.tables[name.name] = part.table
                self.replayed[name.name] = upto
        for result in done:
            if result.set_aside is not None:
                self.set_aside[result.table.name.name] = result.set_aside
        return {result.table.name.name: result for result in done}

    def source(self, name: str, columns: str = "*") -> list[tuple[Any, ...]]:
        texts = ", ".join(f"{c}::text" for c in self._columns(name, columns))
        rows = self.conn.execute(f'SELECT {texts} FROM "{name}"'.encode()).fetchall()
        return sorted(rows, key=repr)

    def mirrored(self, name: str, columns: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        """The mirror's rows, sorted, with every value as text. The rows are read by delta-rs, which did not write
        them."""
        data = self.content(name)
        wanted = list(columns) or [column.name for column in self.tables[name].columns]
        texts = [data[column].cast(pa.string()).to_pylist() for column in wanted]
        return sorted(zip(*texts, strict=True), key=repr)

    def content(self, name: str) -> pa.Table:
        query = QueryBuilder().register("m", DeltaTable(path_of(self.mirror(name).path)))
        return pa.table(query.execute("SELECT * FROM m").read_all())

    def same(self, name: str) -> None:
        assert self.mirrored(name) == self.source(name), name

    def feed(self, name: str) -> list[dict[str, Any]]:
        path = self.layout.changes(TableName("public", name))
        order = "_pgcdc_commit_lsn, _pgcdc_ordinal"
        query = QueryBuilder().register("f", DeltaTable(path_of(path))).execute(f"SELECT * FROM f ORDER BY {order}")
        return list(pa.table(query.read_all()).to_pylist())

    def _columns(self, name: str, columns: str) -> list[str]:
        if columns != "*":
            return [columns]
        return ['"' + column.name.replace('"', '""') + '"' for column in self.tables[name].columns]

    def lsn(self, expression: str, *args: Any) -> Lsn:
        row = self.conn.execute(f"SELECT ({expression})::text".encode(), args).fetchone()
        assert row is not None
        return Lsn.parse(row[0])


OWNER = Identity("7000000000000000001", "shop", "pgcdc")
NAME = TableName("public", "t")
INT, TEXT = PgType(23, "int4"), PgType(25, "text")


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", (precision << 16 | scale) + 4)


def table(*columns: Column) -> Table:
    rows = " ".join(f"{column.attnum}:7" for column in columns)
    return Table(1000, NAME, columns, key=(1,), marks=marks(rows, relfilenode=5))


ID, A, N = Column(1, "id", INT), Column(2, "a", TEXT), Column(3, "n", numeric(10, 2))
T = table(ID, A, N)
ROWS: list[list[str | None]] = [["1", "2", "3", "4"], ["one", None, "three", "four"], ["1.50", "NaN", None, "4.00"]]


def made(root: Path, before: Table = T, *groups: Sequence[Sequence[str | None]]) -> Mirror:
    """A mirror of a table that was copied at LSN 10. The mirror has one file for each group of rows."""
    layout = Layout.of(root)
    create_mirror(layout.mirror(NAME), mirror_columns(before), {IDENTITY: OWNER.app_id()}, layout.root)
    mirror = Mirrors(layout, OWNER).open(NAME)
    reports = []
    for texts in groups or (ROWS,):
        count = len(texts[0])
        done = typed([pa.array(text, pa.string()) for text in texts], before.columns, count)
        own = [pa.array([10] * count, pa.int64()), pa.nulls(count, pa.timestamp("us", "UTC")), done.raw]
        with DataFile(mirror.path, mirror.physical(mirror_columns(before))) as file:
            file.write([*done.values, *own])
            reports.append(file.finish())
    commit(mirror.path, [report for report in reports if report], "append", {mirror.snapshot_app_id: 10})
    return mirror.again()


def rows(mirror: Mirror, version: int | None = None) -> list[dict[str, Any]]:
    """Rows in the order of the first column. Of the columns that pgcdc adds, only ``_pgcdc_raw`` is included."""
    delta = DeltaTable(path_of(mirror.path), version=version)
    found: list[dict[str, Any]] = pa.table(
        QueryBuilder().register("t", delta).execute("SELECT * FROM t ORDER BY 1").read_all()
    ).to_pylist()
    for row in found:
        del row["_pgcdc_commit_lsn"], row["_pgcdc_commit_ts"]
        row["_pgcdc_raw"] = dict(row["_pgcdc_raw"] or ())
    return found


PLAIN: list[list[str | None]] = [["1", "2", "3"], ["one", "two", None], ["1.50", "-2.25", None]]
"""Rows in which every value fits its type."""


def relabelled(mirror: Mirror, after: Table, before: Table = T) -> Table:
    """Changes the mirror's structure by metadata alone, without Spark. No file is rewritten. Returns the table with the
    new structure."""
    follows = successor(before, after, Lsn(50))
    assert isinstance(follows, Table), follows
    files = live_files(mirror.path)
    reshape_mirror(
        SparkOnDemand(no_spark), mirror.mirrors, before, follows, by_metadata=True
    )  # fmt: skip
    assert live_files(mirror.path) == files
    return follows
