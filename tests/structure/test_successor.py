"""Whether and how a mirror continues without a copy when the structure of its table has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Column, Leaf, Lineage, PgType, ReplicaIdentity, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.protocol.shape import Shape, ShapeColumn
from pgcdc_assets.structure.alignment import aligned
from pgcdc_assets.structure.successor import obstacle, successor, with_leaves
from tests.structure import marked
from tests.structure.marked import marks, remarked

INT, OID, BIGINT = PgType(23, "int4"), PgType(26, "oid"), PgType(20, "int8")
TEXT, VARCHAR, LONGER = PgType(25, "text"), PgType(1043, "varchar", 14), PgType(1043, "varchar", 24)
CHAR = PgType(1042, "bpchar", 14)
DOMAIN = PgType(70_000, "short", 14, "d", VARCHAR)


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", (precision << 16 | scale) + 4)


def table(*columns: Column) -> Table:
    rows = " ".join(f"{column.attnum}:7" for column in columns)
    return Table(1000, TableName("public", "t"), columns, key=(1,), marks=marks(rows, relfilenode=5))


ID, A = Column(1, "id", INT), Column(2, "a", VARCHAR)
T = table(ID, A)


def goes_on(now: Table, before: Table = T, since: int = 50) -> Table:
    assert obstacle(before, now) is None
    return successor(before, now, Lsn(since))


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
    ],
    ids=["added", "renamed", "dropped", "dropped and added", "longer", "text", "domain"],
)
def test_adding_renaming_dropping_or_lengthening_a_column_needs_no_copy(now: Table) -> None:
    found = goes_on(now)
    assert replace(found, lineage=None) == now
    assert found.lineage is not None
    assert (found.lineage.number, found.lineage.copied, found.lineage.since) == (1, 2, 50)
    assert found.lineage.former == tuple(column for column in T.columns if column not in now.columns)


@pytest.mark.parametrize("identity", ["d", "f"])
def test_a_table_whose_key_was_created_again_is_copied(identity: ReplicaIdentity) -> None:
    before = replace(remarked(T, key_constraint=7), replica_identity=identity)
    assert obstacle(before, remarked(before, key_constraint=8)) == "its key was dropped and created again"


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (remarked(T, relfilenode=6), "its rows were rewritten"),
        (replace(T, key=(2,)), "its key changed"),
        (replace(T, key=(2,), replica_identity="f"), "its key changed"),
        (replace(T, key=(2,), replica_identity="i"), "its key changed"),
        (replace(T, key=()), "its key changed"),
        (replace(T, key=(), replica_identity="f"), "its key changed"),
        (replace(T, updates_seen=False), "its key changed"),
        (
            replace(T, partitioned=True),
            "how it is partitioned or published has changed",
        ),
        (
            replace(T, root=TableName("public", "p")),
            "how it is partitioned or published has changed",
        ),
        (table(ID, A, Column(3, "c", INT, generated="s")), 'column "c" was added, and is generated'),
        (remarked(table(ID), "1:7 2:7"), 'column "a" is no longer published'),
        (table(ID, Column(2, "a", CHAR)), 'the type of column "a" changed'),
        (table(Column(1, "id", OID), A), 'the type of column "id" changed'),
        (table(Column(1, "id", BIGINT), A), 'the type of column "id" changed'),
    ],
)
def test_rewritten_rows_and_changed_keys_and_most_changed_types_require_a_copy(now: Table, reason: str) -> None:
    found = obstacle(T, now)
    assert found is not None
    assert reason in found


def test_an_existing_column_that_is_newly_published_requires_a_copy() -> None:
    before = replace(T, columns=(ID,))
    assert obstacle(before, T) == 'column "a" existed before, but is published only now'


@pytest.mark.parametrize(
    ("was", "now", "followed"),
    [(numeric(10, 2), numeric(12, 2), True), (numeric(12, 2), numeric(10, 2), False),
     (numeric(10, 2), numeric(12, 4), False), (numeric(10, 2), PgType(1700, "numeric"), False),
     (numeric(38, 2), numeric(40, 2), False)],
)  # fmt: skip
def test_a_decimal_that_only_gains_precision_needs_no_copy(was: PgType, now: PgType, *, followed: bool) -> None:
    found = obstacle(table(ID, Column(2, "a", was)), table(ID, Column(2, "a", now)))
    assert (found is None) is followed


def test_the_default_for_older_rows_is_kept_after_the_catalog_has_lost_it() -> None:
    """VACUUM FULL writes the default into the rows and deletes it from the catalog. But the log still has row messages
    from before the column existed."""
    once = goes_on(table(ID, A, Column(3, "c", INT, missing="5")))
    twice = goes_on(table(ID, A, Column(3, "c", INT), Column(4, "d", INT, missing="6")), before=once)
    assert [column.missing for column in twice.columns] == [None, None, "5", "6"]


def test_column_names_of_every_structure_since_the_copy_are_kept() -> None:
    once = goes_on(table(ID, Column(2, "b", VARCHAR)), since=50)
    twice = goes_on(table(ID, Column(2, "c", VARCHAR)), before=once, since=40)
    assert twice.lineage == Lineage(2, 2, 50, (A, Column(2, "b", VARCHAR)))
    assert Table.from_json(twice.to_json()) == twice


UNKEYED = replace(T, key=(), replica_identity="f")
INSERTS = replace(T, key=(), updates_seen=False)


@pytest.mark.parametrize("before", [UNKEYED, INSERTS], ids=["whole rows", "inserts only"])
def test_a_changed_table_without_a_key_is_copied(before: Table) -> None:
    more = table(ID, A, Column(3, "c", INT, True, missing="5"))
    now = replace(before, columns=more.columns, marks=more.marks)
    assert obstacle(before, now) == "it has no key"
    assert obstacle(before, T) == "its key changed"


def parted(table: Table, *leaves: Leaf) -> Table:
    return replace(remarked(table, relfilenode=0), partitioned=True, leaves=leaves)


SAME = ((1, 0),)


def leaf(
    oid: int, *, numbering: tuple[tuple[int, int], ...] | None = SAME, relfilenode: int = 5, attached: str = "1000:7",
    name: str = "",
) -> Leaf:  # fmt: skip
    title = TableName("public", name or f"t_{oid}")
    return marked.leaf(oid, title, relfilenode, attached, numbering)


P, MORE = parted(T, leaf(1), leaf(2)), table(ID, A, Column(3, "c", INT, True, missing="5"))


def test_columns_known_only_from_row_messages_do_not_count_as_copied() -> None:
    """Row messages of one partition have shown a new column. Rows of other partitions may still be from before the
    column existed, so ``copied``, the highest attnum that the copy contained, stays 2."""
    before = replace(P, columns=(*P.columns, Column(3, "c", INT)), attnums_given=2)
    found = goes_on(parted(MORE, leaf(1), leaf(2)), before)
    assert found.lineage is not None
    assert found.lineage.copied == 2


def test_a_new_column_of_a_root_whose_partitions_are_unchanged_needs_no_copy() -> None:
    found = goes_on(parted(MORE, leaf(1), leaf(2, name="renamed")), P)
    assert found.lineage == Lineage(1, 2, 50, restructured=1, columns_since=50)
    assert found.leaves == P.leaves, "the mirror keeps the name that the leaf had when it was copied"
    assert found.structure == "1@32"
    assert Table.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (P, parted(MORE, leaf(1)), "partitions were added or removed"),
        (P, parted(MORE, leaf(1), leaf(2), leaf(3)), "partitions were added or removed"),
        (P, parted(MORE, leaf(1), leaf(2, attached="1000:8")), "partitions were added or removed"),
        (parted(T), parted(MORE), "partitions were added or removed"),
        (P, parted(MORE, leaf(1), leaf(2, relfilenode=6)), "its rows were rewritten"),
        (
            P,
            parted(MORE, leaf(1), leaf(2, numbering=None)),
            "public.t_2 has its columns in another order",
        ),
        (parted(T, leaf(1), leaf(2, numbering=None)), parted(MORE, leaf(1), leaf(2)), "its partition public.t_2"),
        (P, parted(MORE, leaf(1), leaf(2, numbering=((1, 0), (2, 1)))), "its partition public.t_2"),
        (P, replace(P, key=(2,)), "its key changed"),
        (
            P,
            replace(P, via_root=True),
            "how it is partitioned or published has changed",
        ),
    ],
)
def test_a_changed_root_requires_a_copy_if_its_partitions_or_its_key_changed_too(
    before: Table, now: Table, reason: str
) -> None:
    found = obstacle(before, now)
    assert found is not None
    assert reason in found


def test_a_root_needs_no_copy_if_a_partition_was_created_after_a_column_was_dropped() -> None:
    """The root had three columns, of which the second was dropped. The leaf was created later, with the first and the
    third column. Then a fourth column is added."""
    left = replace(table(ID, Column(3, "b", INT)), key=(1,))
    before = parted(left, leaf(1), leaf(2, numbering=((1, 0), (2, 1))))
    more = table(ID, Column(3, "b", INT), Column(4, "c", INT, True, missing="5"))
    assert goes_on(parted(more, *before.leaves), before).leaves == before.leaves
    gone = parted(table(ID, Column(4, "c", INT)), leaf(1), leaf(2, numbering=((1, 0), (3, 1))))
    assert goes_on(gone, before).leaves == before.leaves, "the mirror keeps the leaf's first numbering"
    assert [before.leaves[1].at_root(attnum) for attnum in (1, 2, 3)] == [1, 3, 4]
    assert [before.leaves[1].of_root(attnum) for attnum in (1, 3, 4)] == [1, 2, 3]


def test_changes_of_columns_and_of_leaves_are_counted_separately() -> None:
    """Each change raises the ``number`` of the lineage (the structures of the table since its copy). Adding or removing
    leaves keeps ``restructured`` and ``columns_since``, which decide how rows are read. A change of columns keeps
    ``left``, the removed leaves."""
    once = with_leaves(P, parted(T, leaf(2), leaf(3)), Lsn(50))
    assert (once.structure, once.columns_since) == ("0", None)
    twice = goes_on(parted(MORE, leaf(2), leaf(3)), once, since=60)
    assert twice.lineage == Lineage(2, 2, 60, left=(1,), restructured=1, columns_since=60)
    thrice = with_leaves(twice, parted(MORE, leaf(3)), Lsn(70))
    assert thrice.lineage == Lineage(3, 2, 70, left=(1, 2), restructured=1, columns_since=60)
    assert thrice.structure == twice.structure == "1@3C"
    last = goes_on(parted(table(ID, Column(3, "c", INT)), leaf(3)), thrice, since=80)
    assert last.lineage == Lineage(4, 2, 80, (A,), (1, 2), 2, 80)


def test_a_column_dropped_before_the_copy_is_not_confused_with_a_new_column() -> None:
    """The table had a third column, which was dropped before the copy. Only ``attnums_given`` still shows this column,
    and no row message since the copy contains it."""
    before = replace(T, attnums_given=3)
    found = goes_on(replace(table(ID, A, Column(4, "c", VARCHAR, missing="x")), attnums_given=4), before)
    assert found.lineage is not None
    assert found.lineage.copied == 3
    told = (
        ShapeColumn("id", 1, INT, True),
        ShapeColumn("a", 2, VARCHAR, False),
        ShapeColumn("b", None, VARCHAR, False),
    )
    live = frozenset({1, 2, 4})
    shape = Shape(1, 1000, T.name, told, "d", ("id",), T.name, attnums=live, live=live, key_attnums=(1,))
    assert aligned(found, shape) == (1, 2, 4)
    assert aligned(goes_on(replace(found, attnums_given=0, lineage=None), T), shape) is None
