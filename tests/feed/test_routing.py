"""The rules that decide which table gets the rows of a relation. The OIDs of the relation and of its root decide, never
their names. A leaf is a partition that stores rows, and its root is the published partitioned table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.plan import Place, Router
from pgcdc_assets.protocol.shape import Shape
from tests.structure.marked import leaf


def name(text: str) -> TableName:
    return TableName("public", text)


T, U = Table(1, name("t"), ()), Table(2, name("u"), ())
P = Table(3, name("p"), (), partitioned=True, leaves=(leaf(31, name("p_1"), 1), leaf(32, name("p_2"), 1)))
Q = Table(4, name("q"), (), partitioned=True, leaves=(leaf(41, name("q_1"), 1),))
ROUTER = Router.of([T, U, P, Q])


def shape(oid: int, called: str, **known: object) -> Shape:
    return replace(Shape(9, oid, name(called), (), "d", (), name(called)), **known)  # type: ignore[arg-type]


def strange_to(place: Place) -> dict[str, str]:
    return {table.name: reason for table, reason in place.strange_to.items()}


@pytest.mark.parametrize("called", ["t", "other", "u", "p_1"])
@pytest.mark.parametrize("now", ["t", "u", "other", None])
def test_rows_belong_to_the_table_with_the_oid_of_their_relation_under_any_name(called: str, now: str | None) -> None:
    place = ROUTER.place(shape(1, called, catalog_name=name(now) if now else None))
    assert place == Place(T.name)


@pytest.mark.parametrize("called", ["p_1", "p_2", "t", "other"])
def test_rows_of_a_leaf_go_to_its_root_with_the_name_that_the_leaf_had_at_the_copy(called: str) -> None:
    root = shape(31, called, root=name("anything"), root_oid=3)
    assert ROUTER.place(root) == Place(P.name, name("p_1"))


def test_a_row_of_a_detached_leaf_stops_the_replication_of_its_former_root() -> None:
    place = ROUTER.place(shape(31, "p_1"))
    assert place.table is None
    assert strange_to(place) == {"p": "its partition public.p_1 was detached, together with its rows"}
    assert "was dropped" in strange_to(ROUTER.place(shape(31, "p_1", catalog_name=None)))["p"]


def test_a_row_of_a_leaf_that_moved_to_another_root_stops_the_replication_of_both_roots() -> None:
    place = ROUTER.place(shape(31, "p_1", root=Q.name, root_oid=4))
    assert place.table is None
    assert strange_to(place).keys() == {"p", "q"}
    strange = ROUTER.place(shape(31, "p_1", root=name("p"), root_oid=77))
    assert (strange.table, list(strange_to(strange))) == (None, ["p"]), (
        "another root with the same name is a different root"
    )


def test_a_leaf_that_was_copied_with_two_roots_belongs_to_its_current_root() -> None:
    both = Router.of([P, replace(Q, leaves=(*Q.leaves, P.leaves[0]))])
    place = both.place(shape(31, "p_1", root=Q.name, root_oid=4))
    assert (place.table, place.leaf, list(strange_to(place))) == (Q.name, name("p_1"), ["p"])


def test_a_row_of_a_new_partition_stops_the_replication_of_its_root() -> None:
    place = ROUTER.place(shape(33, "p_3", root=P.name, root_oid=3))
    assert (place.table, strange_to(place)) == (None, {"p": "partition public.p_3 was added, possibly with rows"})


def test_rows_of_a_table_that_became_a_partition_go_to_the_table_or_its_root_not_both() -> None:
    place = ROUTER.place(shape(1, "t", root=P.name, root_oid=3))
    assert place.table == T.name
    assert strange_to(place).keys() == {"p"}
    joined = Router.of([T, replace(P, leaves=(leaf(1, T.name, 1),))])
    place = joined.place(shape(1, "t", root=P.name, root_oid=3))
    assert (place.table, strange_to(place)) == (P.name, {"t": "the table became a partition of public.p"})


def test_replication_of_a_table_stops_at_a_row_of_another_table_with_the_same_name() -> None:
    for place in (ROUTER.place(shape(99, "t")), ROUTER.place(shape(99, "t", catalog_name=None))):
        assert place.table is None
        assert "created again, or another table has its name" in strange_to(place)["t"]
    assert ROUTER.place(shape(99, "t", catalog_name=name("x"))) == Place(None), (
        "the other table no longer has the name t"
    )
    assert ROUTER.place(shape(99, "x", catalog_name=name("t"))) == Place(None), (
        "the other table got the name t only later"
    )


def test_a_relation_that_belongs_to_no_followed_table_affects_no_table() -> None:
    assert ROUTER.place(shape(99, "x")).concerned == set()
    assert ROUTER.place(shape(99, "x", root=name("y"), root_oid=98)).concerned == set()


def test_the_relations_of_a_table_are_the_table_and_its_leaves() -> None:
    assert ROUTER.relations(T.name) == {1}
    assert ROUTER.relations(P.name) == {3, 31, 32}
