"""Tables that swap names are copied again. A mirror moves only to a name that no other mirror has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.points.points import ConsistentPoints
from tests.fix_postgres import Database
from tests.flow.rig import Rig, named_settings

pytestmark = pytest.mark.spark

A, B = TableName("public", "a"), TableName("public", "b")
TAGS = {"a": "one", "b": "two", "c": "three"}
_SWAP = ("ALTER TABLE a RENAME TO x", "ALTER TABLE b RENAME TO a", "ALTER TABLE x RENAME TO b")


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A project with three similar tables. Each row's ``v`` shows its table: rows with ``one`` belong to the table that
    was created as ``a``, and so on."""
    monkeypatch.chdir(tmp_path)
    settings = named_settings(database, range_seconds=1)
    with database.connect() as conn:
        for table, tag in TAGS.items():
            conn.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text, n int)".encode())
            conn.execute(f"INSERT INTO {table} SELECT g, '{tag}', 0 FROM generate_series(1, 20) g".encode())
        rig = Rig(settings, conn, lambda: spark, Silent())
        rig.setup()
        rig.sync()
        rig.commit(
            "UPDATE a SET n = 1 WHERE id < 9", "DELETE FROM b WHERE id = 4", "INSERT INTO c VALUES (21, 'three')"
        )
        rig.sync()
        rig.observer.copies.clear()
        yield rig


def _change(rig: Rig, one: str, two: str, number: int) -> None:
    rig.commit(
        f"UPDATE {one} SET n = {number} WHERE id % 3 = 0", f"INSERT INTO {one} VALUES ({100 + number}, 'one', 5)",
        f"UPDATE {two} SET n = -{number} WHERE id % 3 = 1", f"DELETE FROM {two} WHERE id = {4 + number}",
        f"INSERT INTO {two} VALUES ({200 + number}, 'two', 6)",
    )  # fmt: skip


def _hold(rig: Rig, *tables: str, copied: int = 0, swapped: Lsn = ZERO) -> None:
    """Checks that at every point each name has the rows of only one table, and that the newest point equals the source.
    Below ``swapped``, each table must have its first name. ``copied``: the expected number of copies."""
    lake = Lake(rig.lake)
    for point in ConsistentPoints(rig.settings.layout).all():
        at = lake.at(point.replay_lsn)
        for name in at.tables:
            of = set(at.arrow(name)["v"].to_pylist())
            assert len(of) == 1, (name, point)
            assert point.replay_lsn >= swapped or of == {TAGS.get(name.name)}, (name, point)
    rig.assert_equal(*(f"public.{name}" for name in tables or ("a", "b", "c")))
    assert len(rig.observer.copies) == copied, [copy.table for copy in rig.observer.copies]


_DEPLOY = ("ALTER TABLE a RENAME TO a_old", "ALTER TABLE b RENAME TO a")
"""The last statements of a migration that builds a new table and then replaces the old table by it."""


def test_table_that_takes_the_name_of_another_table_is_copied(rig: Rig) -> None:
    """No mirror has the old table's new name, so the old table's mirror moves there. The new table takes a name that
    had a mirror, so it is copied."""
    _change(rig, "a", "b", 1)
    swapped = rig.commit(*_DEPLOY, "UPDATE a SET n = 3", "DELETE FROM a_old WHERE id < 7")
    rig.sync()
    _hold(rig, "a", "a_old", "c", copied=1, swapped=swapped)
    assert rig.observer.copies[0].table == A


@pytest.mark.long
def test_feeds_of_swapped_tables_do_not_mix_rows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync derives both feeds and dies before it applies them. After the swap, each feed has the rows of the other
    table."""

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    _change(rig, "a", "b", 1)
    with monkeypatch.context() as broken:
        broken.setattr(DeltaTarget, "apply", dies)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
    swapped = rig.commit(*_SWAP)
    rig.sync()
    _change(rig, "b", "a", 2)
    rig.sync()
    _hold(rig, copied=2, swapped=swapped)


@pytest.mark.long
def test_table_is_not_healed_with_the_mirror_of_another_table(rig: Rig) -> None:
    rig.settings = rig.settings.model_copy(update={"schema_changes": "set_aside"})
    rig.commit("ALTER TABLE a ADD k int DEFAULT 4")
    rig.sync()
    swapped = rig.commit(*_SWAP)
    rig.sync()
    with pytest.raises(NotRepairable, match="has no copy"):
        rig.engine().sync(Bounds(), heal=[B])
    rig.engine().sync(Bounds(), copy_anew=[B])
    rig.sync()
    _hold(rig, copied=len(rig.observer.copies), swapped=swapped)
