"""How a mirror goes on when its table has another structure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Column, Lineage, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.successor import successor

INT, OID, BIGINT = PgType(23, "int4"), PgType(26, "oid"), PgType(20, "int8")
TEXT, VARCHAR, LONGER = PgType(25, "text"), PgType(1043, "varchar", 14), PgType(1043, "varchar", 24)
CHAR = PgType(1042, "bpchar", 14)
DOMAIN = PgType(70_000, "short", 14, "d", VARCHAR)


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", (precision << 16 | scale) + 4)


def table(*columns: Column) -> Table:
    marks = " ".join(f"{column.attnum}:7" for column in columns)
    return Table(1000, TableName("public", "t"), columns, key=(1,), relfilenode=5, column_rows=marks)


ID, A = Column(1, "id", INT), Column(2, "a", VARCHAR)
T = table(ID, A)


def goes_on(now: Table, before: Table = T, since: int = 50) -> Table:
    found = successor(before, now, Lsn(since))
    assert isinstance(found, Table), found
    return found


@pytest.mark.parametrize(
    "now",
    [
        table(ID, A, Column(3, "c", INT, True, missing="5")),
        table(ID, Column(2, "b", VARCHAR)),
        table(ID),
        table(ID, Column(3, "a", VARCHAR)),
        table(ID, Column(2, "a", LONGER)),
        table(ID, Column(2, "a", TEXT)),
        table(ID, Column(2, "a", DOMAIN)),
        replace(T, key=(2,)),
    ],
    ids=["added", "renamed", "dropped", "made anew", "longer", "text", "domain", "other key"],
)
def test_followed_by_its_own_rows(now: Table) -> None:
    found = goes_on(now)
    assert replace(found, lineage=None) == now
    assert found.lineage is not None
    assert (found.lineage.number, found.lineage.copied, found.lineage.since) == (1, 2, 50)
    assert found.lineage.former == tuple(column for column in T.columns if column not in now.columns)


@pytest.mark.parametrize(
    ("was", "now", "followed"),
    [
        (INT, BIGINT, True), (BIGINT, INT, False), (INT, TEXT, False), (numeric(10, 2), numeric(12, 4), True),
        (numeric(10, 2), numeric(10, 4), False), (numeric(10, 2), PgType(1700, "numeric"), False),
        (VARCHAR, CHAR, False), (INT, numeric(20, 0), False), (INT, OID, False),
    ],
)  # fmt: skip
def test_values_that_postgresql_cast(was: PgType, now: PgType, *, followed: bool) -> None:
    before, after = (table(ID, Column(2, "a", type_)) for type_ in (was, now))
    after = replace(after, relfilenode=6)
    found = successor(before, after, Lsn(50), cast=True)
    assert isinstance(found, Table) is followed
    assert isinstance(successor(before, after, Lsn(50)), str)
    more = replace(after, columns=(*after.columns, Column(3, "c", INT)), column_rows="1:7 2:7 3:7")
    assert isinstance(successor(before, more, Lsn(50), cast=True), str), "what came had a value of each row's own"


def test_columns_are_followed_before_a_key() -> None:
    """Rows may have come under the new columns and the old key."""
    columns = table(ID, A, Column(3, "c", BIGINT))
    found = goes_on(replace(columns, key=(3,)))
    assert replace(found, lineage=None) == columns
    assert goes_on(replace(columns, key=(3,)), found).key == (3,)
    assert isinstance(successor(T, replace(table(A, Column(3, "c", BIGINT)), key=(3,)), Lsn(50)), str), (
        "the old is gone"
    )


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (replace(T, relfilenode=6), "its rows were rewritten"),
        (replace(T, key=(3,)), "its key changed"),
        (replace(T, key=(2,), replica_identity="f"), "its key changed"),
        (replace(T, key=(2,), replica_identity="i"), "its key changed"),
        (replace(T, key=()), "its key changed"),
        (replace(T, key=(), replica_identity="f"), "it has no key by which rows could be told apart"),
        (replace(T, updates_seen=False), "its key changed"),
        (replace(T, partitioned=True), "rows of partitions cannot be told apart by it"),
        (table(ID, A, Column(3, "c", INT, generated="s")), 'column "c" came, and is generated'),
        (replace(table(ID), column_rows="1:7 2:7"), 'column "a" is not published any more'),
        (table(ID, Column(2, "a", CHAR)), 'the type of column "a" changed'),
        (table(Column(1, "id", OID), A), 'the type of column "id" changed'),
        (table(Column(1, "id", BIGINT), A), 'the type of column "id" changed'),
        (replace(T, column_rows=""), "since an earlier version copied it"),
    ],
)
def test_copied(now: Table, reason: str) -> None:
    found = successor(T, now, Lsn(50))
    assert isinstance(found, str)
    assert reason in found


def test_a_column_that_is_published_only_now_holds_what_nobody_knows() -> None:
    before = replace(T, columns=(ID,))
    assert successor(before, T, Lsn(1)) == 'column "a", which was there before, is published now'


@pytest.mark.parametrize(
    ("was", "now", "followed"),
    [(numeric(10, 2), numeric(12, 2), True), (numeric(12, 2), numeric(10, 2), False),
     (numeric(10, 2), numeric(12, 4), False), (numeric(10, 2), PgType(1700, "numeric"), False),
     (numeric(38, 2), numeric(40, 2), False)],
)  # fmt: skip
def test_decimals(was: PgType, now: PgType, *, followed: bool) -> None:
    found = successor(table(ID, Column(2, "a", was)), table(ID, Column(2, "a", now)), Lsn(1))
    assert isinstance(found, Table) is followed


def test_the_value_of_older_rows_outlives_what_postgresql_forgets() -> None:
    """VACUUM FULL writes it into the rows; rows from before the column are still in the log."""
    once = goes_on(table(ID, A, Column(3, "c", INT, missing="5")))
    twice = goes_on(table(ID, A, Column(3, "c", INT), Column(4, "d", INT, missing="6")), before=once)
    assert [column.missing for column in twice.columns] == [None, None, "5", "6"]


def test_the_names_of_every_structure_since_the_copy_are_kept() -> None:
    once = goes_on(table(ID, Column(2, "b", VARCHAR)), since=50)
    twice = goes_on(table(ID, Column(2, "c", VARCHAR)), before=once, since=40)
    assert twice.lineage == Lineage(2, 2, 50, (A, Column(2, "b", VARCHAR)))
    assert Table.from_json(twice.to_json()) == twice
