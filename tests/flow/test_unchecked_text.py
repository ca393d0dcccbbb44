"""A source with server_encoding = SQL_ASCII accepts any bytes as text. Bytes that are not UTF-8 affect only their
table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import Database, fresh_database
from tests.flow.rig import Rig

pytestmark = [pytest.mark.spark, pytest.mark.long]

T = TableName("public", "t")


@pytest.fixture
def unchecked(server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(server, "SQL_ASCII") as database:
        yield database


@pytest.mark.long
def test_text_that_is_not_utf8_sets_only_its_table_aside(
    unchecked: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=unchecked.conninfo, slot=f"s_{unchecked.name}")
    with unchecked.connect() as conn:
        conn.execute("SET client_encoding = UTF8")
        rig = Rig(settings, conn, lambda: spark, Silent())
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        conn.execute("CREATE TABLE u (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO t VALUES (1, 'café')")
        findings = setup(settings, unchecked.conninfo).findings
        assert [one.severity for one in findings if "SQL_ASCII" in one.what] == ["warning"]
        rig.setup()
        assert rig.sync().set_aside == []
        rig.assert_equal()

        conn.execute("INSERT INTO t SELECT g, 'café' || g FROM generate_series(2, 20) g")
        before = rig.flush()
        conn.execute(r"INSERT INTO t VALUES (30, E'caf\351')")
        after = rig.flush()
        conn.execute("INSERT INTO t VALUES (31, 'x')")
        conn.execute("INSERT INTO u VALUES (1, 'goes on')")
        conn.execute(r"COMMENT ON TABLE u IS E'caf\351'")
        conn.execute("COMMENT ON COLUMN u.v IS 'café'")
        report = rig.sync()
        ((name, reason),) = report.set_aside
        assert name == T
        assert "column 'v' has a value that is not text in UTF-8, in the row with id = 30" in reason
        row = TableStates(settings.layout).all()[T]
        assert before <= row.lsn < after, "the LSN is in the transaction of the bad text"
        rig.assert_equal("public.u")
        mirror = DeltaTable(path_of(settings.layout.mirror(TableName("public", "u"))))
        assert mirror.metadata().description is None, "a comment that is not valid text is left out"
        assert mirror.schema().fields[1].metadata["comment"] == "café"

        report = rig.engine().sync(Bounds(), copy_anew=[T])
        assert "column 'v' has a value that is not text in UTF-8, in the row with id = 30" in dict(report.set_aside)[T]
        assert Lsn(0) < TableStates(settings.layout).all()[T].lsn
        conn.execute("UPDATE t SET v = 'corrected' WHERE id = 30")
        conn.execute("INSERT INTO u VALUES (2, 'goes on')")
        assert rig.engine().sync(Bounds(), copy_anew=[T]).set_aside == []
        rig.assert_equal()
