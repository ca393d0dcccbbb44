"""Unexpected rows of the source's catalog: the reader returns a catalog that can be saved, or raises an error of
pgcdc."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.errors import PgcdcError, SourceFailed
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.source.catalog import pgclass, pgtypes, published, tables
from pgcdc_assets.source.catalog.pgclass import _COMMENTS
from pgcdc_assets.source.catalog.tables import read_catalog, relation_facts
from pgcdc_assets.structure.differences import changes

WHO = Identity("7", "db", "slot")
FEW = settings(max_examples=150, deadline=None)
MANY = settings(max_examples=5000, deadline=None)
Row = tuple[Any, ...]
LISTS: dict[str, list[Row]] = {
    "FROM pg_catalog.pg_publication_tables t": [
        (100, "p", True, True, True, True, False, ["id", "v"], "(id > 0)"),
        (301, "p", True, True, True, True, False, ["id", "d"], None),
        (302, "q", True, False, False, True, False, ["id", "d"], None),
    ],
    "WITH RECURSIVE pub AS": [],
    pgclass._RELATIONS: [
        (100, "public", "t", "r", "d", 1000, 1001, 5, 50, None, False, 3, None),
        (300, "public", "root", "p", "d", 0, 0, 0, 0, None, False, 2, None),
        (301, "public", "leaf1", "r", "f", 3010, 0, 1, 9, 300, False, 2, None),
        (302, "other", "leaf2", "f", "n", 0, 0, 1, 9, 300, True, 3, "columnar"),
    ],
    pgclass._COLUMNS: [
        (100, 1, "id", 23, -1, True, "", None, [1, 700]),
        (100, 3, "v", 16400, 9, False, "", "a", [3, 701]),
        (300, 1, "id", 23, -1, True, "", None, [1, 702]),
        (300, 2, "d", 16402, -1, False, "s", None, [2, 702]),
        (301, 1, "id", 23, -1, True, "", None, [1, 703]),
        (301, 2, "d", 16402, -1, False, "s", None, [2, 703]),
        (302, 2, "id", 23, -1, True, "", None, [2, 704]),
        (302, 3, "d", 16402, -1, False, "s", "{x}", [3, 704]),
    ],
    pgtypes._TYPES: [
        (23, "int4", "b", ",", 0, -1, 0, [0], [], None), (16400, "dom", "d", ",", 16401, -1, 0, [16401], [], None),
        (16401, "dom0", "d", ",", 1043, 9, 0, [1043, 16404], [], None),
        (1043, "varchar", "b", ",", 0, -1, 0, [0], [], None),
        (16402, "_mood", "b", ",", 0, -1, 16403, [16403], [], None),
        (16403, "mood", "e", ",", 0, -1, 0, [0], ["16404 910 sad", "16405 911 so so"], None),
        (16404, "comp", "c", ",", 0, -1, 0, [23, 16403], [], "1:23 2:16403"),
    ],
    pgclass._INDEXES: [(100, True, False, True, ["id"], 501), (300, True, True, True, ["id", "d"], 502)],
    pgclass._LEAVES: [(300, 301), (300, 302)],
    "FROM pg_catalog.pg_publication p WHERE p.pubname": [
        ("p", None, None, [1, 5]), ("q", None, None, [2, 5]), ("p", 100, None, [3, 5]), ("q", None, "public", [4, 5]),
    ],
    published._OURS: [("p",)],
    published._PLACES: [(100, 800), (301, 801)],
    tables._ATTACHED: [(301, [[300, 900]]), (302, [[300, 901]])],
    _COMMENTS: [(100, 0, "A table."), (100, 3, "A column.")],
    tables._DESCRIBING: [(100,), (300,), (301,), (302,)],
    "concat_ws": [("7:1 8:2",)],
}  # fmt: skip
"""The rows that the source returns, by a part of the query's text."""


@dataclass
class Source:
    """Used instead of a connection to the source. A query returns the rows in ``lists`` whose key is a part of the
    query's text."""

    lists: dict[str, list[Row]]
    info: Any = field(default_factory=lambda: SimpleNamespace(
        server_version=180000, transaction_status=TransactionStatus.INTRANS,
        parameter_status=lambda name: "UTF8",
    ))  # fmt: skip

    def execute(self, query: str | bytes, params: Any = None) -> Answer:
        text = query.decode() if isinstance(query, bytes) else query
        if text.startswith("SET "):
            return Answer([])
        rows = next(rows for part, rows in self.lists.items() if part in text)
        if isinstance(params, list) and text != pgtypes._TYPES:
            # These queries select by OID, which is the first column of the result.
            rows = [row for row in rows if row[0] in params[0]]
        return Answer(rows)

    @contextmanager
    def transaction(self, force_rollback: bool = False) -> Iterator[None]:
        yield


class Answer(list[Row]):
    def fetchall(self) -> list[Row]:
        return list(self)

    def fetchone(self) -> Row | None:
        return next(iter(self), None)


TEXTS = st.sampled_from(["", "x", "id", "p", ' "; --', "..", "a/../b", "\udc80", "\ufffe", "é" * 63, "1:2", "\0", "{"])
OIDS = [0, 23, 100, 300, 301, 302, 16400, 16401, 16402, 16403, 99999, 0xFFFF_FFFF]
NUMBERS = st.sampled_from([-1, -32768, 1, 2, 3, 1600, *OIDS])


def other(value: Any) -> st.SearchStrategy[Any]:
    if isinstance(value, bool):
        return st.sampled_from([not value, None])
    if isinstance(value, int):
        return st.none() | NUMBERS
    if isinstance(value, list):
        inside: st.SearchStrategy[Any] = other(value[0]) if value else st.none() | TEXTS | NUMBERS
        return st.none() | st.lists(inside, max_size=3) | st.builds(lambda one: [one] * 20_000, inside)
    return st.none() | TEXTS | NUMBERS.map(str)


@st.composite
def altered(draw: st.DrawFn) -> dict[str, list[Row]]:
    """The rows that the source returns, with one to three changes: a different value, or a missing or repeated row."""
    lists = dict(LISTS)
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from([part for part, rows in lists.items() if rows and part != "concat_ws"]))
        rows = list(lists[part])
        at = draw(st.integers(0, len(rows) - 1))
        row = list(rows[at])
        column = draw(st.integers(0, len(row) - 1))
        row[column] = draw(other(next((row[column] for row in LISTS[part] if row[column] is not None), None)))
        rows[at : at + 1] = draw(st.sampled_from([[tuple(row)], [tuple(row)], [tuple(row), rows[at]], []]))
        lists[part] = rows
    return lists


def connection(lists: dict[str, list[Row]]) -> psycopg.Connection[Any]:
    return cast(psycopg.Connection[Any], Source(lists))


def read_all(lists: dict[str, list[Row]]) -> None:
    conn = connection(lists)
    catalog = read_catalog(conn, WHO, ["p", "q"])
    assert Catalog.from_json(json.loads(json.dumps(catalog.to_json()))) == catalog
    for table in catalog.tables:
        assert f"{table.name} {table.name.folder}"
        for was in sound().tables:
            changes(was, table)
    seen = tables.CatalogSnapshot.read(conn, ["p", "q"], [], sound().tables)
    seen.is_current(conn)
    facts = relation_facts(conn, {100: [23, 16400], 301: [23, 16402], 99: [99999]}, ["p", "q"])
    for one in facts.values():
        assert RelationFacts.from_json(json.loads(json.dumps(one.to_json()))) == one


def sound() -> Catalog:
    return read_catalog(connection(LISTS), WHO, ["p", "q"])


def test_catalog_with_a_domain_that_is_based_on_itself_is_refused() -> None:
    types = [(*row[:4], 16400, *row[5:]) if row[0] == 16401 else row for row in LISTS[pgtypes._TYPES]]
    with pytest.raises(SourceFailed, match="system catalog of the source: is damaged"):
        read_all({**LISTS, pgtypes._TYPES: types})


def test_undamaged_catalog_rows_are_read_as_two_tables() -> None:
    assert [str(table.name) for table in sound().tables] == ["public.root", "public.t"]
    read_all(LISTS)


def check(lists: dict[str, list[Row]]) -> None:
    refused: PgcdcError | None = None
    try:
        read_all(lists)
    except PgcdcError as error:
        refused = error
    assert refused is None or (refused.thing and "\n" not in str(refused))


@FEW
@given(altered())
def test_unexpected_catalog_rows_give_a_catalog_or_an_error_of_pgcdc(lists: dict[str, list[Row]]) -> None:
    check(lists)


@pytest.mark.long
@MANY
@given(altered())
def test_many_unexpected_catalog_rows_give_a_catalog_or_an_error_of_pgcdc(lists: dict[str, list[Row]]) -> None:
    check(lists)
