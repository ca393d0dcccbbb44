"""Whether rows can be applied to a mirror if their Relation message shows a different structure than the mirror has. A
relation is accepted if its rows can be applied, otherwise it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.marks import Files
from pgcdc_assets.core.names import TableName
from pgcdc_assets.protocol.shape import RelationFacts, Shape, ShapeColumn
from pgcdc_assets.structure.rowshapes import Unreadable, added, table_of_rows, together
from tests.structure import marked
from tests.structure.marked import marks, remarked

INT, TEXT, NUMERIC = PgType(23, "int4"), PgType(25, "text"), PgType(1700, "numeric", 655366)
NAME = TableName("public", "t")
TABLE = Table(
    oid=1000,
    name=NAME,
    columns=(Column(1, "id", INT, True), Column(2, "b", TEXT), Column(4, "n", NUMERIC)),
    key=(1,),
    identity_key=(1,),
    marks=marks(relfilenode=50),
)


def shape(*columns: ShapeColumn, key: tuple[str, ...] = ("id",), oid: int = 1000, identity: str = "d",
          leaf: TableName | None = None) -> Shape:  # fmt: skip
    known = not columns or any(column.attnum is not None for column in columns)
    name = leaf or NAME
    return Shape(1, oid, name, columns, identity, key, name if known else None)  # type: ignore[arg-type]


ID, B, N = ShapeColumn("id", 1, INT, True), ShapeColumn("b", 2, TEXT, False), ShapeColumn("n", 4, NUMERIC, False)
NEW = ShapeColumn("c", 5, TEXT, False)


def facts(*columns: Column, relfilenode: int = 50) -> RelationFacts:
    return RelationFacts(remarked(replace(TABLE, columns=(*TABLE.columns, *columns)), relfilenode=relfilenode))


def reason(found: Table | Unreadable) -> str:
    assert isinstance(found, Unreadable)
    return found.reason


def test_an_unchanged_relation_is_accepted() -> None:
    assert table_of_rows(TABLE, shape(ID, B, N)) is TABLE


def test_a_new_nullable_column_is_accepted() -> None:
    after = table_of_rows(TABLE, shape(ID, B, N, NEW), facts(Column(5, "c", TEXT)))
    assert isinstance(after, Table)
    assert added(TABLE, after) == (Column(5, "c", TEXT),)
    assert table_of_rows(after, shape(ID, B, N, NEW)) is after


@pytest.mark.parametrize(
    ("columns", "told", "words"),
    [
        ((ID, B), None, "column 'n' was dropped or is no longer published"),
        ((ID, B, replace(N, attnum=7)), None, "column 'n' was dropped and created again"),
        ((ID, replace(B, attnum=4), replace(N, attnum=2)), None, "swapped their names"),
        ((ID, replace(B, name="b2"), N), None, "renamed to 'b2'"),
        ((ID, B, replace(N, type=PgType(1700, "numeric", 655368))), None, "type of column 'n' changed"),
        ((ID, B, N, NEW), facts(Column(5, "c", TEXT, missing="x")), "with a default"),
        ((ID, B, N, NEW), facts(Column(5, "c", TEXT), relfilenode=51), "rewritten"),
        ((ID, B, replace(NEW, attnum=3), N), facts(Column(3, "c", TEXT)), "published only now"),
        ((ID, B, N, replace(NEW, attnum=None)), facts(), "no longer shows"),
        ((ID, B, N, NEW), None, "no longer shows"),
    ],
)
def test_a_relation_with_columns_that_do_not_fit_the_mirror_is_refused_with_the_reason(
    columns: tuple[ShapeColumn, ...], told: RelationFacts | None, words: str
) -> None:
    assert words in reason(table_of_rows(TABLE, shape(*columns), told))


def test_a_relation_whose_key_differs_from_the_key_of_the_mirror_is_refused() -> None:
    flagged = (replace(ID, key=False), replace(B, key=True), N)
    assert "the key changed from (id) to (b)" in reason(table_of_rows(TABLE, shape(*flagged, key=("id",))))
    assert table_of_rows(TABLE, shape(ID, B, N, key=("b",))) is TABLE, "the catalog was read after the message was sent"
    full = shape(*(replace(column, key=True) for column in (ID, B, N)), key=("b",), identity="f")
    assert "the key changed from (id) to (b)" in reason(table_of_rows(TABLE, full))


def test_rows_of_a_table_without_a_key_are_accepted_only_with_replica_identity_full() -> None:
    table = replace(TABLE, key=(), replica_identity="f")
    assert table_of_rows(table, shape(ID, B, N, key=(), identity="f")) is table
    assert "FULL" in reason(table_of_rows(table, shape(ID, B, N, key=())))
    more = shape(ID, B, N, NEW, key=(), identity="f")
    assert "no key" in reason(table_of_rows(table, more, facts(Column(5, "c", TEXT)))), "the table must be copied"


def test_columns_of_a_relation_that_the_catalog_no_longer_has_are_found_by_name_and_type() -> None:
    forgotten = [replace(column, attnum=None) for column in (ID, B, N)]
    assert table_of_rows(TABLE, shape(*forgotten)) is TABLE
    other_type = [*forgotten[:2], replace(N, attnum=None, type=TEXT)]
    assert "dropped and created again" in reason(table_of_rows(TABLE, shape(*other_type)))
    swapped = [forgotten[0], forgotten[2], forgotten[1]]
    assert "swapped their names" in reason(table_of_rows(TABLE, shape(*swapped))), (
        "a message lists columns in the order of their attnums"
    )


def test_a_column_whose_name_the_catalog_no_longer_has_is_accepted_if_its_attnum_exists() -> None:
    lost = replace(shape(ID, replace(B, attnum=None), N), attnums=frozenset((1, 2, 4)))
    assert table_of_rows(TABLE, lost) is TABLE
    dropped = replace(lost, attnums=frozenset((1, 4, 5)))
    assert "'b' was dropped or renamed soon after" in reason(table_of_rows(TABLE, dropped)), (
        "another column may have had the name b"
    )
    swapped = replace(lost, columns=(ID, replace(N, attnum=None), replace(B, attnum=None)))
    assert "swapped their names" in reason(table_of_rows(TABLE, swapped))


def test_a_new_column_is_refused_if_another_column_was_added_and_dropped_since_the_copy() -> None:
    there = RelationFacts(remarked(replace(TABLE, columns=(*TABLE.columns, Column(6, "c", TEXT))), "1:7 2:7 4:7 6:9"))
    found = table_of_rows(TABLE, shape(ID, B, N, replace(NEW, attnum=6)), there)
    assert "was added after another was dropped" in reason(found)
    unpublished = RelationFacts(remarked(there.table or TABLE, "1:7 2:7 4:7 5:8 6:9"))
    assert isinstance(table_of_rows(TABLE, shape(ID, B, N, replace(NEW, attnum=6)), unpublished), Table)
    older = remarked(TABLE, "1:7 2:7 4:7 5:6")
    assert isinstance(table_of_rows(older, shape(ID, B, N, replace(NEW, attnum=6)), there), Table), (
        "the column was dropped before the copy"
    )


def test_rows_may_lack_a_newer_column_only_if_they_are_already_applied_to_the_mirror() -> None:
    after = replace(TABLE, columns=(*TABLE.columns, Column(5, "c", TEXT)))
    assert table_of_rows(after, shape(ID, B, N), past=True) is after
    assert "dropped" in reason(table_of_rows(after, shape(ID, B, N)))


def test_columns_of_a_leaf_whose_attnums_cannot_be_translated_are_compared_by_name() -> None:
    leaf = TableName("public", "t_1")
    root = replace(TABLE, partitioned=True, leaves=(marked.leaf(7, leaf, 70),))
    columns = (replace(B, attnum=1), replace(ID, attnum=2), replace(N, attnum=3))
    assert table_of_rows(root, shape(*columns, oid=7, leaf=leaf)) is root
    told = RelationFacts(replace(TABLE, columns=(Column(4, "c", TEXT),), marks=marks(relfilenode=70), root=NAME))
    after = table_of_rows(root, shape(*columns, replace(NEW, attnum=4), oid=7, leaf=leaf), told)
    assert "in another order" in reason(after)


def test_a_new_column_of_two_leaves_is_one_column_of_the_root() -> None:
    """The root's fifth column was dropped. One leaf had this column, the other leaf was created later."""
    old, new = TableName("public", "t_1"), TableName("public", "t_2")
    leaves = (marked.leaf(7, old, 70, numbering=((1, 0),)), marked.leaf(8, new, 70, numbering=((1, 0), (5, 1))))
    root = replace(TABLE, partitioned=True, leaves=leaves, attnums_given=5)
    for leaf, attnum in ((leaves[0], 6), (leaves[1], 5)):
        column, rows = Column(attnum, "c", TEXT), marks(f"1:7 2:7 4:7 {attnum}:9", relfilenode=70)
        told = RelationFacts(replace(TABLE, columns=(column,), root=NAME, marks=rows))
        found = table_of_rows(root, shape(ID, B, N, replace(NEW, attnum=attnum), oid=leaf.oid, leaf=leaf.name), told)
        assert isinstance(found, Table), reason(found)
        assert added(root, found) == (Column(6, "c", TEXT),)
        later = replace(NEW, attnum=attnum + 1)
        told = RelationFacts(replace(TABLE, columns=(replace(column, attnum=attnum + 1),), root=NAME,
                                     marks=marks(f"1:7 2:7 4:7 {attnum + 1}:9", relfilenode=70)))  # fmt: skip
        found = table_of_rows(root, shape(ID, B, N, later, oid=leaf.oid, leaf=leaf.name), told)
        assert "was added after another was dropped" in reason(found), "a column was added, then dropped"


def test_a_new_column_is_refused_if_a_leaf_was_rewritten() -> None:
    """The Relation message names the root, which has no rows of its own. Only its leaves can have been rewritten."""
    root = replace(TABLE, partitioned=True, marks=marks(), leaves=(marked.leaf(7, TableName("public", "t_1"), 70),))
    wider = replace(root, columns=(*TABLE.columns, Column(5, "c", TEXT)))
    assert isinstance(table_of_rows(root, shape(ID, B, N, NEW), RelationFacts(wider)), Table)
    rewritten = replace(wider, leaves=(replace(root.leaves[0], files=Files(71)),))
    assert "rewritten" in reason(table_of_rows(root, shape(ID, B, N, NEW), RelationFacts(rewritten)))


def test_a_swap_of_two_column_names_in_a_leaf_is_noticed_by_the_attnums_of_the_leaf() -> None:
    root = replace(TABLE, partitioned=True, leaves=(marked.leaf(7, TableName("public", "t_1"), 70),))
    swapped = (replace(B, attnum=3), replace(ID, attnum=1), N)
    assert "swapped their names" in reason(table_of_rows(root, shape(*swapped, oid=7, leaf=TableName("public", "t_1"))))


def test_columns_of_all_versions_of_a_table_are_combined() -> None:
    one = replace(TABLE, columns=(*TABLE.columns, Column(5, "c", TEXT)))
    two = replace(TABLE, columns=(*TABLE.columns, Column(5, "c", TEXT), Column(6, "d", TEXT)))
    assert [column.name for column in together([TABLE, one, two]).columns] == ["id", "b", "n", "c", "d"]
