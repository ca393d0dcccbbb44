"""Sources whose encoding is not UTF8: texts are mirrored exactly, and an invalid byte affects only the table that has
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.checks.report import Verdict
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from tests.checks.mirrors import Point
from tests.fix_postgres import fresh_database
from tests.flow.rig import Rig, version
from tests.oracle import mirror_rows
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark

T, NAMED = TableName("public", "t"), TableName("public", "named")


@contextmanager
def _project(
    server: EmbeddedServer, encoding: str, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    monkeypatch.chdir(folder)
    with fresh_database(server, encoding) as database, database.connect(client_encoding="UTF8") as conn:
        yield Rig(Settings(source=database.conninfo, slot=f"s_{database.name}"), conn, lambda: spark, Silent())


def _texts(rig: Rig, name: TableName, column: str = "v") -> dict[int, str]:
    rows = mirror_rows(rig.lake, f"{name.schema}/{name.name}", ["id", column])
    return {int(row[0]): str(row[1]) for row in rows}


def _assert_verified(rig: Rig, *names: TableName) -> None:
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    report = verify(rig.settings, catalog, names, lambda lsn: Point(lsn, {name: version(rig, name) for name in names}))
    assert [(table.table, table.verdict) for table in report.tables] == [(name, Verdict.EQUAL) for name in names]


@pytest.mark.long
def test_invalid_byte_sets_only_its_table_aside_and_the_slot_still_advances(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _project(server, "WIN1252", spark, tmp_path, monkeypatch) as rig:
        for name in ("t", "u", "unkeyed", "named"):
            rig.conn.execute(f"CREATE TABLE {name} (n int, v text, id int PRIMARY KEY)".encode())
        rig.conn.execute("ALTER TABLE unkeyed DROP CONSTRAINT unkeyed_pkey")
        rig.conn.execute("ALTER TABLE unkeyed REPLICA IDENTITY FULL")
        rig.conn.execute("INSERT INTO t VALUES (0, 'café', 1)")
        rig.conn.execute("CREATE TYPE mood AS ENUM ('é')")
        rig.conn.execute("ALTER TABLE u ADD \"€\" mood DEFAULT 'é'".encode())
        rig.setup()
        rig.sync()
        rig.conn.execute("SET client_encoding = WIN1252")
        rig.conn.execute("INSERT INTO t SELECT g, 'x' || g, g FROM generate_series(2, 20) g")
        before = rig.flush()
        _bad(rig, "INSERT INTO t VALUES (0, E'b\\x81', 30)")
        after = rig.flush()
        _bad(rig, "INSERT INTO unkeyed VALUES (0, E'b\\x81', 30)")
        rig.conn.execute("INSERT INTO u VALUES (1, 'läuft für €', 1)".encode("cp1252"))
        for what in ("TABLE u", "COLUMN u.v"):
            _bad(rig, f"COMMENT ON {what} IS E'b\\x81'")
        _bad(rig, 'ALTER TABLE named RENAME v TO "b\x81"')
        _bad(rig, 'CREATE TABLE "b\x81" (id int PRIMARY KEY)')
        reasons = dict(rig.sync().set_aside)
        assert reasons[T].endswith("column 'v' has a value that is not text in WIN1252, in the row with id = 30")
        assert reasons[TableName("public", "unkeyed")].endswith("column 'v' has a value that is not text in WIN1252")
        assert "the name of column b\ufffd81 is not text" in reasons[NAMED]
        assert before <= TableStates(rig.settings.layout).all()[T].lsn < after
        assert _texts(rig, TableName("public", "u")) == {1: "läuft für €"}
        assert _texts(rig, TableName("public", "u"), "€") == {1: "é"}
        _assert_verified(rig, TableName("public", "u"))
        goal = rig.flush()
        rig.sync()
        assert rig.conn.execute(
            "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s",
            [str(goal), rig.settings.slot],
        ).fetchone() == (True,)

        # A copy also fails because of the byte. After the row is corrected, a copy succeeds.
        reasons = dict(rig.engine().sync(Bounds(), copy_anew=[T]).set_aside)
        assert "column 'v' has a value that is not text in WIN1252, in the row with id = 30" in reasons[T]
        rig.conn.execute("UPDATE t SET v = 'mended' WHERE id = 30")
        assert T not in dict(rig.engine().sync(Bounds(), copy_anew=[T]).set_aside)
        assert _texts(rig, T)[30] == "mended"
        assert _texts(rig, T)[1] == "café"
        warned = [one.thing for one in setup(rig.settings, str(rig.settings.source)).findings if "name" in one.what]
        assert 'public."b\ufffd81"' in warned


def _bad(rig: Rig, statement: str) -> None:
    """Runs a statement with the byte 0x81. This byte is no character of WIN1252, but a server with this encoding
    accepts it."""
    rig.conn.execute(statement.encode("latin-1"))
