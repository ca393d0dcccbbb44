"""Tables created after setup: if setup created the publication, a sync adds the tables that the settings include."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from pgcdc_assets.checks.facts import read_tables
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RightLacking
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.publications import OwnPair
from pgcdc_assets.structure.record import TableState
from tests.fix_postgres import Database
from tests.flow.rig import Rig, T, U, following, newest, rig_of
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

NEW, KEYLESS = TableName("public", "new"), TableName("public", "keyless")


@pytest.fixture
def rig(rig: Rig) -> Rig:
    return rig.started(batch_seconds=0.1, range_seconds=1, tables=("public.*", "-public.secret"))


def test_new_table_is_published_and_copied(rig: Rig) -> None:
    """A table without a usable replica identity is published for inserts only, so that no UPDATE of it fails. Excluded
    tables stay unpublished."""
    rig.commit(
        "CREATE TABLE new (id int PRIMARY KEY, v text)", "INSERT INTO new VALUES (1, 'before')",
        "CREATE TABLE keyless (v text)", "CREATE TABLE secret (id int PRIMARY KEY)", "CREATE SCHEMA other",
        "CREATE TABLE other.t (id int PRIMARY KEY)",
    )  # fmt: skip
    rig.sync()
    rig.commit("INSERT INTO new VALUES (2, 'after')", "INSERT INTO keyless VALUES ('x')", "UPDATE keyless SET v = 'y'")
    rig.sync()
    rig.assert_equal("public.new", "public.t", "public.u")
    assert set(newest(rig).tables) == {T, U, NEW, KEYLESS}
    rig.commit("DELETE FROM keyless")


@pytest.mark.long
def test_locked_new_table_is_published_after_its_lock_was_released(rig: Rig, database: Database) -> None:
    rig.commit("CREATE TABLE new (id int PRIMARY KEY)")
    with database.connect() as other, database.connect() as conn:
        pair = OwnPair.of(conn, rig.settings)
        with other.transaction():
            other.execute("LOCK TABLE new IN SHARE UPDATE EXCLUSIVE MODE")
            assert pair.add_new(tuple) == []
        assert pair.add_new(tuple) == [NEW]
        assert pair.add_new(tuple) == []


@pytest.mark.long
def test_table_removed_from_the_publication_is_not_added_again(rig: Rig) -> None:
    rig.commit(f"ALTER PUBLICATION {rig.settings.publication} DROP TABLE u")
    for number in range(2):
        rig.commit(f"UPDATE t SET v = '{number}' WHERE id = 1", f"UPDATE u SET v = {number} WHERE a = 1")
        rig.sync()
        assert set(newest(rig).tables) == {T}


# A missing right on one table affects only this table -----------------------------------------------


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """A role with few rights: it may read only the tables that existed when it got its rights."""
    name = f"few_{database.name}"
    yield name
    with database.connect() as conn:
        conn.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


@pytest.fixture
def few(
    database: Database, role: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    """A project whose role uses a publication of another owner. The publication is FOR ALL TABLES, so new tables are
    published."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        source=f"{database.conninfo} user={role}", slot=f"s_{database.name}", publication="everything",
        batch_seconds=0.1, range_seconds=0.5,
    )  # fmt: skip
    with rig_of(database, spark, settings) as rig:
        rig.conn.execute("CREATE TABLE parted (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
        rig.conn.execute("CREATE TABLE first PARTITION OF parted FOR VALUES FROM (0) TO (100)")
        rig.conn.execute("INSERT INTO parted VALUES (1, 'one')")
        rig.conn.execute(f"CREATE ROLE {role} LOGIN REPLICATION".encode())
        rig.conn.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}".encode())
        rig.conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        rig.setup()
        rig.sync()
        yield rig


def _waiting(rig: Rig) -> dict[str, str]:
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    found = read_tables(rig.settings.layout, catalog)
    return {str(table.name): table.reason or "" for table in found if table.state is TableState.WAITING}


@pytest.mark.long
def test_new_table_waits_for_its_grant_and_is_then_copied(few: Rig, role: str) -> None:
    """A sync that is not in follow mode copies the other tables, and ends with an error that contains the GRANT. A sync
    in follow mode waits for the GRANT."""
    few.conn.execute("CREATE TABLE old (id int PRIMARY KEY)")
    few.conn.execute("CREATE TABLE other (id int PRIMARY KEY)")
    few.conn.execute(f"GRANT SELECT ON other TO {role}".encode())
    few.conn.execute("INSERT INTO t VALUES (99, 'goes on', '')")
    with pytest.raises(RightLacking, match=f"GRANT SELECT ON TABLE public.old TO {role}"):
        few.sync()
    assert _lists(few, "other")
    few.assert_equal("public.t", "public.u", "public.other")
    grant = f"GRANT SELECT ON TABLE public.new TO {role}"
    with following(few):
        few.conn.execute("CREATE TABLE new (id int PRIMARY KEY)")
        few.conn.execute("INSERT INTO new VALUES (1)")
        _wait_for_the_grant(few, "new", grant)
        assert "public.old" in _waiting(few)
    few.assert_equal("public.t", "public.new")


def _wait_for_the_grant(rig: Rig, table: str, grant: str) -> None:
    """Checks that the table waits while the other tables continue, and that points list the table after the GRANT."""
    wait_for(lambda: grant in _waiting(rig).get(f"public.{table}", ""), what="the GRANT in the status")
    rig.conn.execute("INSERT INTO t VALUES (100, 'goes on', '')")
    at = rig.flush()
    wait_for(lambda: _published(rig) >= at, what="a point of the others")
    rig.conn.execute(grant.encode())
    wait_for(lambda: _lists(rig, table), what="a point with the table")


def _published(rig: Rig) -> int:
    point = ConsistentPoints(rig.settings.layout).newest()
    return 0 if point is None else point.replay_lsn


def _lists(rig: Rig, table: str) -> bool:
    point = ConsistentPoints(rig.settings.layout).newest()
    return point is not None and TableName("public", table) in point.tables
