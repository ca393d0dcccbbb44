"""Projects for tests, each with its own source database. The test process runs whole syncs of these projects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent, SyncReport
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.store.local import path_of
from tests.deltatables import by_delta_rs
from tests.fix_postgres import Database, inside
from tests.oracle import assert_equal
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for

T = TableName("public", "t")
U = TableName("public", "u")
Content = dict[tuple[Lsn, str], list[tuple[Any, ...]]]
"""The rows of each table at each consistent point. A key is the point's LSN and the table's name."""


@dataclass
class Rig:
    """A project directory, its engine, and a connection to the source."""

    settings: Settings
    conn: psycopg.Connection[Any]
    session: Callable[[], SparkSession]
    observer: Silent

    @property
    def lake(self) -> Path:
        return path_of(self.settings.layout.root)

    def engine(self, command: str = "test") -> Engine:
        assert self.settings.source is not None
        return Engine(self.settings, self.settings.source, self.observer, self.session, command)

    def started(self, **settings: Any) -> Rig:
        """Changes these settings, then runs setup and the first sync."""
        self.settings = self.settings.model_copy(update=settings)
        self.setup()
        self.sync()
        return self

    def setup(self) -> None:
        assert self.settings.source is not None
        save_catalog(setup(self.settings, self.settings.source).catalog, CATALOG_FILE)

    def sync(self, **bounds: Any) -> SyncReport:
        return self.engine().sync(Bounds(**bounds))

    def flush(self) -> Lsn:
        return Lsn.parse(str(self.conn.execute("SELECT pg_current_wal_flush_lsn()").fetchall()[0][0]))

    def commit(self, *statements: str) -> Lsn:
        """Runs the statements in one transaction. Returns an LSN in its commit record. A point above this LSN
        contains the transaction (see `inside`)."""
        with self.conn.transaction():
            for statement in statements:
                self.conn.execute(statement.encode())
            return inside(self.conn)

    def streaming(self) -> bool:
        query = "SELECT active_pid IS NOT NULL FROM pg_replication_slots WHERE slot_name = %s"
        return self.conn.execute(query, (self.settings.slot,)).fetchone() == (True,)

    def assert_equal(self, *tables: str) -> None:
        assert_equal(self.conn, self.settings.layout.root.text, *(tables or ("public.t", "public.u")))


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    with rig_of(database, spark, Settings(source=database.conninfo, slot=f"s_{database.name}"[:60])) as rig:
        yield rig


@contextmanager
def rig_of(database: Database, spark: SparkSession, settings: Settings) -> Iterator[Rig]:
    """A project whose source has the tables ``t`` and ``u``, with 50 rows each."""
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text, big text)")
        conn.execute("CREATE TABLE u (a int, b int, v numeric(10,2), PRIMARY KEY (a, b))")
        conn.execute("ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
        conn.execute("INSERT INTO t SELECT g, 'v' || g, repeat(md5(g::text), 200) FROM generate_series(1, 50) g")
        conn.execute("INSERT INTO u SELECT g, g % 3, g / 4.0 FROM generate_series(1, 50) g")
        yield Rig(settings, conn, lambda: spark, Silent())


@contextmanager
def following(rig: Rig, **bounds: Any) -> Iterator[threading.Thread]:
    """Runs a sync in follow mode in a thread during the block. Then stops the sync, and checks that the sync ended
    without an error."""
    stop = threading.Event()
    reports: list[SyncReport] = []
    run = Bounds(follow=True, stop=stop, **bounds)
    thread = threading.Thread(target=lambda: reports.append(rig.engine("follow").sync(run)))
    thread.start()
    try:
        wait_for(lambda: lock.holder(rig.settings.layout) is not None, what="the run")
        yield thread
    finally:
        stop.set()
        thread.join(120)
    assert len(reports) == 1


def newest(rig: Rig) -> Point:
    point = ConsistentPoints(rig.settings.layout).newest()
    assert point is not None
    return point


def version(rig: Rig, name: TableName) -> int:
    return DeltaTable(path_of(rig.settings.layout.mirror(name))).version()


def children_running(module: str) -> list[int]:
    found = []
    for child in psutil.Process().children(recursive=True):
        # The command line of a child process cannot be read if it has ended during this loop, or is a zombie.
        with suppress(psutil.NoSuchProcess):
            if module in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def promised(rig: Rig) -> Content:
    """Reads every table at every point with delta-rs, and checks that :class:`Lake` reads the same rows."""
    lake, found = Lake(rig.lake), Content()
    for point in ConsistentPoints(rig.settings.layout).all():
        at = lake.at(point.replay_lsn)
        assert at.lsn == point.replay_lsn
        for name in at.tables:
            found[point.replay_lsn, str(name)] = sorted_rows(by_delta_rs(at, name))
            assert sorted_rows(at.arrow(name)) == found[point.replay_lsn, str(name)]
    return found


def sorted_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


def turns(rig: Rig, count: int, first: int = 1000) -> None:
    """Changes rows of t and u ``count`` times. After each time, a whole sync runs, which applies the new changes and
    ends an LSN range."""
    for number in range(first, first + count):
        rig.conn.execute("INSERT INTO t VALUES (%s, 'new', 'big')", [number])
        rig.conn.execute("UPDATE u SET v = %s WHERE a = %s", [number, number % 50 + 1])
        rig.conn.execute("DELETE FROM u WHERE a = %s", [50 - number % 10])
        rig.sync()
