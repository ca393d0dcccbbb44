"""Which columns of a table a Relation message refers to, if the table's columns have changed since the table was
copied. A message names its columns, but the catalog that gives their attnums is read later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Column, Lineage, PgType, ReplicaIdentity, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.events import Route
from pgcdc_assets.protocol.shape import RelationFacts, Shape, ShapeColumn
from pgcdc_assets.structure.alignment import aligned
from pgcdc_assets.structure.rowshapes import Unreadable, alignment, table_of_rows
from tests.structure import marked
from tests.structure.marked import marks

INT, TEXT, VARCHAR = PgType(23, "int4"), PgType(25, "text"), PgType(1043, "varchar", 14)
NAME = TableName("public", "t")


def table(*columns: Column, copied: int, former: tuple[Column, ...] = (), since: int = 100) -> Table:
    rows = " ".join(f"{column.attnum}:7" for column in columns)
    lineage = Lineage(1, copied, since, former)
    return Table(1000, NAME, columns, key=(1,), identity_key=(1,), marks=marks(rows), lineage=lineage)


def message(*columns: ShapeColumn, live: tuple[int, ...]) -> Shape:
    return Shape(1, 1000, NAME, columns, "d", ("id",), NAME, attnums=frozenset(live), live=frozenset(live),
                 key_attnums=(1,))  # fmt: skip


def of(name: str, type_: PgType = INT, attnum: int | None = None) -> ShapeColumn:
    return ShapeColumn(name, attnum, type_, name == "id")


ID, A = Column(1, "id", INT), Column(2, "a", INT)
ID_COLUMN = of("id", attnum=1)

RENAMED = table(ID, Column(2, "b", INT), copied=2, former=(A,))
ADDED = table(ID, A, Column(3, "c", INT, missing="5"), copied=2)
MADE_ANEW = table(ID, Column(3, "a", INT), copied=2, former=(A,))
REPLACED = table(ID, Column(3, "c", INT), copied=2, former=(A,))
OTHER_TYPE = table(ID, Column(3, "a", TEXT), copied=2, former=(A,))
DROPPED = table(ID, copied=2, former=(A,))
SWAPPED = table(ID, Column(2, "b", INT), Column(3, "a", INT), copied=3, former=(A, Column(3, "b", INT)))


@pytest.mark.parametrize(
    ("known", "told", "columns"),
    [
        (RENAMED, message(ID_COLUMN, of("a", attnum=2), live=(1, 2)), (1, 2)),
        (RENAMED, message(ID_COLUMN, of("a"), live=(1, 2)), (1, 2)),
        (RENAMED, message(ID_COLUMN, of("b", attnum=2), live=(1, 2)), (1, 2)),
        (RENAMED, message(ID_COLUMN, of("for a while"), live=(1, 2)), (1, 2)),
        (RENAMED, message(ID_COLUMN, of("b", TEXT), live=(1, 2)), None),
        (ADDED, message(ID_COLUMN, of("a", attnum=2), live=(1, 2)), (1, 2)),
        (ADDED, message(ID_COLUMN, of("a", attnum=2), live=(1, 2, 3)), (1, 2)),
        (ADDED, message(ID_COLUMN, of("a", attnum=2), of("c", attnum=3), live=(1, 2, 3)), (1, 2, 3)),
        (ADDED, message(ID_COLUMN, of("a", attnum=2), of("for a while"), live=(1, 2, 3)), (1, 2, 3)),
        (ADDED, message(ID_COLUMN, live=(1, 2, 3)), None),
        (DROPPED, message(ID_COLUMN, of("a"), live=(1,)), (1, None)),
        (DROPPED, message(ID_COLUMN, of("a", attnum=2), live=(1, 2)), (1, None)),
        (DROPPED, message(ID_COLUMN, live=(1,)), (1,)),
        (MADE_ANEW, message(ID_COLUMN, of("a", attnum=2), live=(1, 2)), (1, None)),
        (MADE_ANEW, message(ID_COLUMN, of("a", attnum=3), live=(1, 3)), None),
        (REPLACED, message(ID_COLUMN, of("c", attnum=3), live=(1, 3)), None),
        (OTHER_TYPE, message(ID_COLUMN, of("a", TEXT, attnum=3), live=(1, 3)), (1, 3)),
        (OTHER_TYPE, message(ID_COLUMN, of("a"), live=(1, 3)), (1, None)),
        (SWAPPED, message(ID_COLUMN, of("a", attnum=3), of("b", attnum=2), live=(1, 2, 3)), (1, 2, 3)),
        (SWAPPED, message(ID_COLUMN, of("b", attnum=2), of("a", attnum=3), live=(1, 2, 3)), (1, 2, 3)),
    ],
    ids=["renamed later, catalog read before", "renamed later, catalog read after", "new name",
         "name between old and new name", "new name with another type",
         "column added later, catalog read before", "column added later, catalog read after", "added column",
         "added column under an earlier name", "without a column of the copy",
         "column dropped later, catalog read after", "column dropped later, catalog read before", "column dropped",
         "first of two columns of one name", "either of two columns of one name",
         "new column, or the dropped column under its name", "second of two columns, by its type",
         "first of two columns, by its type", "names swapped later, catalog read after", "names swapped"],
)  # fmt: skip
def test_a_message_is_used_only_if_its_columns_can_be_identified_in_exactly_one_way(
    known: Table, told: Shape, columns: tuple[int | None, ...] | None
) -> None:  # fmt: skip
    assert aligned(known, told) == columns


def test_a_column_added_and_dropped_between_catalog_checks_is_ignored() -> None:
    assert aligned(table(ID, A, copied=2), message(ID_COLUMN, of("a", attnum=2), of("x"), live=(1, 2))) == (1, 2, None)


def test_a_column_added_and_dropped_between_checks_is_ignored_even_if_its_attnum_is_recorded() -> None:
    told = message(ID_COLUMN, of("a", attnum=2), of("x", attnum=3), live=(1, 2, 3))
    known = replace(table(ID, A, copied=2), attnums_given=3)
    assert aligned(known, told) == (1, 2, None)
    assert table_of_rows(known, told, after=Lsn(1)) is known


def test_a_message_is_refused_if_a_dropped_column_may_have_had_the_name_of_a_newer_column() -> None:
    known = table(ID, A, Column(4, "c", INT), copied=2)
    assert aligned(known, message(ID_COLUMN, of("a", attnum=2), of("c", attnum=4), live=(1, 2, 4))) is None


def test_rows_written_before_a_column_was_added_get_the_default_of_this_column() -> None:
    told = message(ID_COLUMN, of("a", attnum=2), live=(1, 2))
    assert table_of_rows(ADDED, told, after=Lsn(99)) is ADDED
    route = Route.of(told, ADDED, None, alignment(ADDED, told, Lsn(99)))
    assert [column.missing for column in route.younger] == ["5"]


def test_rows_above_the_lsn_of_a_catalog_check_must_have_the_structure_that_the_check_showed() -> None:
    told = message(ID_COLUMN, of("a", attnum=3), live=(1, 3))
    assert isinstance(table_of_rows(MADE_ANEW, told, after=Lsn(99)), Unreadable)
    assert table_of_rows(MADE_ANEW, told, after=Lsn(100)) is MADE_ANEW
    assert isinstance(
        table_of_rows(ADDED, message(ID_COLUMN, of("a", attnum=2), live=(1, 2)), after=Lsn(100)), Unreadable
    )


def test_an_earlier_column_type_is_accepted_if_values_have_the_same_text_in_both_types() -> None:
    known = table(ID, Column(2, "a", TEXT), copied=2, former=(Column(2, "a", VARCHAR), A))
    assert table_of_rows(known, message(ID_COLUMN, of("a", VARCHAR, 2), live=(1, 2)), after=Lsn(1)) is known
    found = table_of_rows(known, message(ID_COLUMN, of("a", INT, 2), live=(1, 2)), after=Lsn(1))
    assert isinstance(found, Unreadable)
    assert found.reason == "the type of column 'a' changed from int4 to text"


def test_a_message_with_a_new_column_is_refused_if_other_columns_changed_since_the_copy() -> None:
    told = message(ID_COLUMN, of("b", attnum=2), of("c", attnum=3), live=(1, 2, 3))
    found = table_of_rows(RENAMED, told, after=Lsn(1))
    assert isinstance(found, Unreadable)
    assert found.reason == "column 'c' was added after other columns had changed"


@pytest.mark.parametrize("identity", ["d", "f"])
def test_a_message_whose_key_differs_from_the_key_of_the_mirror_is_refused(identity: ReplicaIdentity) -> None:
    """The mirror's key is compared with the key columns that the message flags. Under REPLICA IDENTITY FULL, the flags
    do not show the key, so the mirror's key is compared with the key in the catalog."""
    columns = (replace(ID_COLUMN, key=False), replace(of("b", attnum=2), key=True))
    told = replace(message(*columns, live=(1, 2)), key_attnums=(2,), key=("b",), replica_identity=identity)
    found = table_of_rows(RENAMED, told, after=Lsn(1))
    assert isinstance(found, Unreadable)
    assert "the key changed from (id) to (b)" in found.reason


def test_the_key_is_read_from_the_flags_of_the_message_and_not_from_a_later_catalog() -> None:
    """The catalog was read later than the message was sent, and already showed a different key."""
    told = replace(message(ID_COLUMN, of("b", attnum=2), live=(1, 2)), key_attnums=(2,), key=("b",))
    assert table_of_rows(RENAMED, told, after=Lsn(1)) == RENAMED
    assert table_of_rows(RENAMED, told, after=Lsn(1 << 40)) == RENAMED


def _parted(known: Table, numbering: tuple[tuple[int, int], ...] | None = ((1, 0),), since: int = 100) -> Table:
    assert known.lineage is not None
    lineage = replace(known.lineage, since=200, restructured=1, columns_since=since)
    leaf = marked.leaf(7, TableName("public", "t_1"), 70, numbering=numbering)
    return replace(known, partitioned=True, leaves=(leaf,), lineage=lineage)


def _of_leaf(*columns: ShapeColumn, live: tuple[int, ...]) -> Shape:
    return replace(message(*columns, live=live), relation_id=7, table=TableName("public", "t_1"), root=NAME)


def test_rows_of_a_leaf_are_read_with_the_columns_of_its_root() -> None:
    told = _of_leaf(ID_COLUMN, of("for a while"), live=(1, 2))
    known = _parted(RENAMED)
    assert table_of_rows(known, told, after=Lsn(99)) is known
    assert alignment(known, told, Lsn(99)) == (1, 2)
    route = Route.of(told, known, TableName("public", "t_1"), alignment(known, told, Lsn(99)))
    assert [(at, column.name) for at, column in route.places] == [(0, "id"), (1, "b")]
    odd = _parted(RENAMED, None)
    assert isinstance(table_of_rows(odd, told, after=Lsn(99)), Unreadable)
    assert alignment(odd, told, Lsn(99)) is None
    gone = replace(told, relation_id=8)
    assert isinstance(table_of_rows(known, gone, after=Lsn(99)), Unreadable), "the mirror does not have this leaf"


def test_added_or_removed_leaves_do_not_change_how_columns_are_read() -> None:
    """Rows above the LSN at which a catalog check showed the current columns are read by column name. This stays so if
    a later check shows that partitions were added or removed."""
    known = _parted(MADE_ANEW)
    told = _of_leaf(ID_COLUMN, of("a", attnum=3), live=(1, 3))
    assert isinstance(table_of_rows(known, told, after=Lsn(99)), Unreadable)
    assert table_of_rows(known, told, after=Lsn(100)) is known
    assert alignment(known, told, Lsn(100)) is None
    unchanged = _parted(MADE_ANEW, since=0)
    assert table_of_rows(unchanged, told, after=Lsn(1)) is unchanged, "only the leaves have changed"


def test_rows_of_a_leaf_that_was_created_after_a_column_was_dropped_are_read() -> None:
    """The root's second column was dropped before the leaf was created. So the root's third column is the leaf's second
    column."""
    columns = (ID, Column(3, "x", INT), Column(4, "c", INT, missing="5"))
    known = _parted(table(*columns, copied=3, former=(Column(3, "b", INT),)), ((1, 0), (2, 1)))
    for name, attnum in (("b", None), ("x", 2), ("for a while", None)):
        told = _of_leaf(ID_COLUMN, of(name, attnum=attnum), live=(1, 2, 3))
        assert table_of_rows(known, told, after=Lsn(99)) is known
        assert alignment(known, told, Lsn(99)) == (1, 3)
    told = _of_leaf(ID_COLUMN, of("x", attnum=2), of("c", attnum=3), live=(1, 2, 3))
    assert alignment(known, told, Lsn(99)) == (1, 3, 4)
    route = Route.of(told, known, None, alignment(known, replace(told, columns=told.columns[:2]), Lsn(99)))
    assert [column.name for column in route.younger] == ["c"]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ((ID_COLUMN, of("b", attnum=3)), "column 'b' was dropped and created again"),
        ((ID_COLUMN, of("c", attnum=2)), "column 'b' was renamed to 'c'"),
    ],
)
def test_rows_of_a_leaf_are_refused_if_a_column_was_renamed_or_created_again(
    told: tuple[ShapeColumn, ...], reason: str
) -> None:
    """No catalog check has shown the change yet. If a column that was dropped and created again were found by its name,
    the new column's values would be written to the old column."""
    lineage = Lineage(1, 3, 1, left=(8,))
    known = replace(_parted(table(ID, Column(3, "b", INT), copied=3), ((1, 0), (2, 1))), lineage=lineage)
    same = _of_leaf(ID_COLUMN, of("b", attnum=2), live=(1, 2))
    assert table_of_rows(known, same, after=Lsn(1)) is known
    found = table_of_rows(known, _of_leaf(*told, live=tuple(c.attnum or 0 for c in told)), after=Lsn(1))
    assert isinstance(found, Unreadable)
    assert found.reason == reason


def test_a_new_column_of_a_leaf_gets_the_attnum_that_this_column_has_in_the_root() -> None:
    columns = (ID, Column(3, "b", INT))
    known = _parted(table(*columns, copied=3), ((1, 0), (2, 1), (3, 2)), since=0)
    new = Column(3, "c", INT)
    told = _of_leaf(ID_COLUMN, of("b", attnum=2), of("c", attnum=3), live=(1, 2, 3))
    facts = RelationFacts(replace(known, oid=7, columns=(ID, Column(2, "b", INT), new), marks=marks(relfilenode=70),
                                  lineage=None, leaves=()))  # fmt: skip
    after = table_of_rows(known, told, facts, after=Lsn(300))
    assert isinstance(after, Table)
    assert after.columns[-1] == replace(new, attnum=5), "the root had dropped a fourth column before"
