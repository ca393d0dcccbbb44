"""Continuous DDL on all tables during copies, verify and setup: pgcdc hardly delays the application."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup, teardown
from pgcdc_assets.source.snapshot.export import exported_snapshot, shown_tables
from pgcdc_assets.source.snapshot.pieces import Piece, pieces
from pgcdc_assets.source.snapshot.reading import copy_blocks, read_whole
from tests.checks import mirrors
from tests.checks.lakes import Lake, Point
from tests.fix_postgres import Database
from tests.source.storm import BEARABLE_SECONDS, GIVEN_UP_SECONDS, STORMS, TABLES, Storm, make_tables

NAMES = [TableName("public", table) for table in TABLES]


class Ours:
    """Repeats everything that pgcdc does on a source. ``done``: how often each action completed. Actions on tables are
    counted once per table."""

    def __init__(self, database: Database, root: Path) -> None:
        self._lake = Lake(database.conninfo, root)
        self._settings = Settings(source=database.conninfo, lake=root, slot=f"s_{database.name}", publication="ours")
        self.done: Counter[str] = Counter()

    def until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            for act in (self._copies, self._verifies, self._sets_up):
                try:
                    act()
                except PgcdcError as error:
                    self.done[f"{act.__name__}: {type(error).__name__}"] += 1

    def _copies(self) -> None:
        conninfo = self._lake.conninfo
        with exported_snapshot(conninfo, lock_seconds=5) as snapshot, ThreadPoolExecutor(2) as readers:
            shown, outdated = shown_tables(snapshot, NAMES, ["p"])
            with snapshot.reading() as conn:
                cut = {name: pieces(conn, table, 1 << 19) for name, table in shown.items() if name not in outdated}

            def read(piece: Piece) -> None:
                list(copy_blocks(conninfo, snapshot.name, piece, 1 << 16))

            for future in [readers.submit(self._told, "copied", read, piece) for of in cut.values() for piece in of]:
                future.result()

    def _told(self, what: str, read: Callable[[Piece], None], piece: Piece) -> None:
        try:
            read_whole(lambda: read(piece))
            self.done[what] += 1
        except PgcdcError as error:
            self.done[f"{what}: {type(error).__name__}"] += 1

    def _verifies(self) -> None:
        versions = dict.fromkeys(NAMES, 0)
        report = verify(self._settings, self._lake.catalog(), NAMES, lambda lsn: Point(lsn, versions))
        self.done["compared"] += sum(table.compared for table in report.tables)

    def _sets_up(self) -> None:
        made = setup(self._settings, self._lake.conninfo, lock_seconds=5).created
        teardown(self._settings, self._lake.conninfo, made)
        self.done["set up"] += 1


@contextmanager
def stormy(database: Database, root: Path) -> Iterator[None]:
    """Makes tables, publishes them, and makes mirrors without rows, which verify compares."""
    lake = Lake(database.conninfo, root)
    with database.connect() as conn:
        make_tables(conn)
        conn.execute("CREATE PUBLICATION p FOR ALL TABLES")
    schema = mirrors.mirror_schema(id=pa.int32(), v=pa.string(), n=pa.int32())
    for table in TABLES:
        lake.write(table, schema, [])
    yield


@pytest.mark.long
@pytest.mark.parametrize("seconds", [4, 60])
def test_ddl_storm_hardly_delays_the_application(database: Database, tmp_path: Path, seconds: int) -> None:
    told: list[str] = []
    with stormy(database, tmp_path):
        for _ in range(STORMS):
            without, beside = Storm(database), Storm(database)
            with without.blowing():
                time.sleep(seconds)
            ours = Ours(database, tmp_path)
            with beside.blowing():
                ours.until(time.monotonic() + seconds)
            assert beside.held == [], "a lock was waited for with another one in hand"
            assert beside.longest < GIVEN_UP_SECONDS
            told.append(
                f"longest of {beside.queries} queries {beside.longest:.2f} s beside us and {beside.altered} changes,"
                f" of {without.queries} without us {without.longest:.2f} s; {dict(ours.done)}"
            )
            print(told[-1])
            if beside.longest < without.longest + BEARABLE_SECONDS:
                break
        else:
            raise AssertionError(told)
    assert any(what.startswith("copied") for what in ours.done)
