"""Tables created after setup: if setup created the publication, a sync adds the tables that the settings include."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.setup.publications import OwnPair
from tests.fix_postgres import Database
from tests.flow.rig import Rig, T, U, newest

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
def test_locked_new_table_is_published_later(rig: Rig, database: Database) -> None:
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
