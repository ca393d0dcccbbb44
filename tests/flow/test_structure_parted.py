"""Partitioned tables whose columns change: their mirrors follow by their own rows, if the leaves have their columns in
the same order as the root."""

from __future__ import annotations

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.names import TableName
from tests.flow.rig import Rig, following

pytestmark = pytest.mark.spark

_CHANGES = {
    "add": "ALTER TABLE {} ADD k int NOT NULL DEFAULT 7, ADD y numeric(5,1) DEFAULT 'NaN', ADD q text",
    "drop": "ALTER TABLE {} DROP x",
    "rename": "ALTER TABLE {} RENAME x TO y; ALTER TABLE {} RENAME n TO m",
    "swap": "ALTER TABLE {} RENAME x TO y; ALTER TABLE {} RENAME s TO x; ALTER TABLE {} RENAME y TO s",
    "made anew": "ALTER TABLE {} DROP n, ADD n int DEFAULT 4",
    "longer": "ALTER TABLE {} ALTER x TYPE text",
}
_TABLES = {f"p_{change.replace(' ', '_')}": change for change in _CHANGES}
_ALL = ("public.t", *(f"public.{name}" for name in _TABLES))
_WRITES = (
    "INSERT INTO {} (id, day, s) SELECT coalesce(max(id), 0) + 1, 1, 'new' FROM {}",
    "UPDATE {} SET s = s || '!' WHERE id % 7 = 0",
    "UPDATE {} SET day = day % 3 + 1 WHERE id % 5 = 0",
    "DELETE FROM {} WHERE id = (SELECT min(id) FROM {})",
    "UPDATE {} SET s = 'z' WHERE id = (SELECT max(id) FROM {})",
    "UPDATE {} SET id = -id WHERE id = (SELECT max(id) - 2 FROM {})",
)
"""Statements that work with every structure that has ``id``, ``day`` and ``s``. Rows move between partitions."""


def _make(name: str) -> list[str]:
    leaves = [f"CREATE TABLE {name}_{day} PARTITION OF {name} FOR VALUES IN ({day})" for day in (1, 2, 3)]
    return [
        f"CREATE TABLE {name} (id int, day int, s text, n int, x varchar(20), PRIMARY KEY (id, day))"
        " PARTITION BY LIST (day)",
        *leaves,
        f"INSERT INTO {name} SELECT g, g % 3 + 1, 's', g % 4, 'x' || g % 3"
        " FROM generate_series(1, 40) g",
    ]  # fmt: skip


@pytest.fixture
def via_root() -> bool:
    return False


@pytest.fixture
def rig(rig: Rig, via_root: bool) -> Rig:
    """A rig with one table for each of the changes."""
    for one in _TABLES:
        rig.commit(*_make(one))
    root = f" WITH (publish_via_partition_root = {via_root})"
    rig.commit(f"CREATE PUBLICATION {rig.settings.publication} FOR TABLE t, {', '.join(_TABLES)}{root}")
    rig.started(batch_seconds=0.1, range_seconds=1)
    rig.observer.copies.clear()
    return rig


def _on(rig: Rig, name: str, *statements: str) -> None:
    rig.commit(*(statement.replace("{}", name) for text in statements for statement in text.split("; ")))


def _each(rig: Rig, *statements: str) -> None:
    for name in _TABLES:
        _on(rig, name, *statements)


def _assert_followed(rig: Rig, changes: int | None, *copied: str) -> None:
    rig.assert_equal(*_ALL)
    whys = [f"{one.table}: {one.what}" for one in rig.observer.structures]
    assert sorted(copy.table.name for copy in rig.observer.copies) == sorted(copied), whys
    if changes is not None:
        assert [one.copied for one in rig.observer.structures] == [False] * changes, whys


@pytest.mark.long
@pytest.mark.parametrize("via_root", [False, True], ids=["leaves", "via root"])
def test_rows_before_within_and_after_a_schema_change_are_followed(rig: Rig, *, via_root: bool) -> None:
    before = Lake(rig.lake).at().lsn
    _each(rig, *_WRITES)
    for name, change in _TABLES.items():
        _on(rig, name, *_WRITES[:3], _CHANGES[change], *_WRITES[2:])
    _each(rig, *_WRITES)
    rig.sync()
    _assert_followed(rig, len(_TABLES))
    _each(rig, *_WRITES)
    for name in _TABLES:
        _on(rig, name, "ALTER TABLE {} ADD k2 int DEFAULT 3", _WRITES[1], "ALTER TABLE {} RENAME s TO s2")
        _on(rig, name, "UPDATE {} SET k2 = 5 WHERE id % 3 = 0", "ALTER TABLE {} RENAME s2 TO s")
    _each(rig, *_WRITES)
    rig.sync()
    _assert_followed(rig, 2 * len(_TABLES))
    assert "x" in Lake(rig.lake).at(before).arrow(TableName("public", "p_drop")).column_names


@pytest.mark.long
def test_rows_that_come_before_the_catalog_check_are_followed(rig: Rig) -> None:
    """The rows have a column that was recreated or swapped under another one's name. They are applied at once, or
    wait."""
    rig.settings = rig.settings.model_copy(update={"range_seconds": 5})
    with following(rig) as run:
        rig.commit("UPDATE t SET v = 'begun' WHERE id = 1")
        run.join(3)
        _on(rig, "p_made_anew", _CHANGES["made anew"])
        _on(rig, "p_made_anew", "UPDATE {} SET n = 70 + id WHERE id % 4 = 0",
            "INSERT INTO {} (id, day, n) VALUES (700, 1, 7)")  # fmt: skip
        _on(rig, "p_swap", "ALTER TABLE {} ALTER x TYPE text", _CHANGES["swap"])
        _on(rig, "p_swap", "UPDATE {} SET s = 'in s' WHERE id % 4 = 0",
            "INSERT INTO {} (id, day, x) VALUES (700, 1, 'in x')")  # fmt: skip
        run.join(8)
    rig.sync()
    rig.assert_equal(*_ALL)


@pytest.mark.long
def test_partition_changes_between_column_changes_are_followed(rig: Rig) -> None:
    """The feed goes on if only leaves change. A leaf that is created after a column was dropped has its own attnums. A
    leaf that was a table before may have another column order."""
    staying = (_WRITES[1], *_WRITES[3:])
    _on(rig, "p_add", *_WRITES, _CHANGES["add"], *_WRITES)
    rig.sync()
    rig.commit("CREATE TABLE p_add_4 PARTITION OF p_add FOR VALUES IN (4)", "DROP TABLE p_add_1")
    rig.sync()
    rig.commit("INSERT INTO p_add VALUES (900, 4, 'new', 1, 'x')", "UPDATE p_add SET day = 4 WHERE id % 4 = 0")
    _on(rig, "p_add", "UPDATE {} SET k = 1 WHERE day = 4", "ALTER TABLE {} DROP n, ADD n int DEFAULT 8")
    rig.commit("UPDATE p_add SET n = 2 WHERE day = 2")
    rig.sync()
    _assert_followed(rig, None)
    rig.commit("CREATE TABLE p_add_5 PARTITION OF p_add FOR VALUES IN (5)")
    rig.sync()
    rig.commit("INSERT INTO p_add (id, day) VALUES (901, 5)", "UPDATE p_add SET day = 5 WHERE day = 3")
    rig.sync()
    _assert_followed(rig, None)
    rig.commit("UPDATE p_add SET n = 5 WHERE id = 901", "ALTER TABLE p_add RENAME n TO m", "UPDATE p_add SET m = 6")
    _on(rig, "p_add", *staying, "ALTER TABLE {} DROP k, ADD k text DEFAULT 'again'", *staying)
    rig.sync()
    _on(rig, "p_add", *staying, "ALTER TABLE {} ADD q2 int", "UPDATE {} SET q2 = id WHERE id % 2 = 0")
    rig.sync()
    _on(rig, "p_add", *staying, "ALTER TABLE {} RENAME q2 TO q3", "UPDATE {} SET q3 = 1 WHERE day = 5")
    rig.sync()
    _assert_followed(rig, None)
    rig.commit("CREATE TABLE p_add_6 (q3 int, id int NOT NULL, day int NOT NULL, s text, x varchar(20), y numeric(5,1),"
               " q text, m int, k text)", "ALTER TABLE p_add ATTACH PARTITION p_add_6 FOR VALUES IN (6)")  # fmt: skip
    rig.sync()
    rig.commit("INSERT INTO p_add (id, day, q3) VALUES (902, 6, 7)")
    rig.sync()
    _assert_followed(rig, None)
    rig.commit("UPDATE p_add SET q3 = 8 WHERE day = 6", "ALTER TABLE p_add RENAME q3 TO q4")
    rig.sync()
    _assert_followed(rig, None, "p_add")


_COPIED = {
    "p_add": ("ALTER TABLE p_add ADD c int DEFAULT 1", "CREATE TABLE p_add_4 PARTITION OF p_add FOR VALUES IN (4)",
              "INSERT INTO p_add VALUES (900, 4, 's', 1, 'x', 2)"),
    "p_drop": ("CREATE TABLE p_drop_4 (x varchar(20), n int, s text, id int NOT NULL, day int NOT NULL)",
               "ALTER TABLE p_drop ATTACH PARTITION p_drop_4 FOR VALUES IN (4)", "INSERT INTO p_drop VALUES (9, 4)",
               "ALTER TABLE p_drop DROP n"),
    "p_rename": ("ALTER TABLE p_rename DETACH PARTITION p_rename_3", "ALTER TABLE p_rename RENAME n TO m"),
    "p_swap": ("ALTER TABLE p_swap DETACH PARTITION p_swap_3", "ALTER TABLE p_swap ADD c int DEFAULT 1",
               "ALTER TABLE p_swap_3 ADD c int DEFAULT 2",
               "ALTER TABLE p_swap ATTACH PARTITION p_swap_3 FOR VALUES IN (3)"),
    "p_longer": ("ALTER TABLE p_longer ADD c int DEFAULT 1", "VACUUM FULL p_longer_2"),
    "p_made_anew": ("ALTER TABLE p_made_anew ALTER n TYPE bigint",),
}  # fmt: skip
"""Each statement runs by itself."""


@pytest.mark.long
def test_schema_change_that_rows_do_not_show_causes_a_copy(rig: Rig) -> None:
    for name, statements in _COPIED.items():
        _on(rig, name, *_WRITES)
        for statement in statements:
            rig.conn.execute(statement.encode())
            _on(rig, name, *_WRITES[:2])
    for _ in range(2):
        rig.sync()
    _assert_followed(rig, None, *_COPIED)


@pytest.mark.long
def test_earlier_rewrite_of_a_partition_causes_no_copy(rig: Rig) -> None:
    """A partition that was emptied, or rewritten by VACUUM FULL, at an earlier catalog check does not count as
    rewritten."""
    rig.conn.execute("VACUUM FULL p_add_1")
    rig.commit("TRUNCATE p_add_2", *(statement.replace("{}", "p_add") for statement in _WRITES))
    rig.sync()
    _on(rig, "p_add", *_WRITES, _CHANGES["add"], *_WRITES)
    rig.sync()
    _assert_followed(rig, 1)
