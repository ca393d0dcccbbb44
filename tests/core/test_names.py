from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.names import TableName, decoded, encoded, nearest
from pgcdc_assets.errors import UsageError

_NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(_NAMES, _NAMES)
def test_sql_round_trip(schema: str, name: str) -> None:
    assert TableName.parse(str(TableName(schema, name))) == TableName(schema, name)


@given(_NAMES)
def test_folder_round_trip(name: str) -> None:
    folder = encoded(name)
    assert decoded(folder) == name
    assert "/" not in folder
    assert folder not in (".", "..")
    assert not folder.startswith("_pgcdc")


@given(st.tuples(_NAMES, _NAMES), st.tuples(_NAMES, _NAMES))
def test_folders_of_different_tables_never_collide(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (TableName(*one).folder == TableName(*other).folder) == (one == other)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t", TableName("public", "t")),
        ("Shop.Orders", TableName("shop", "orders")),
        ('"Odd Schema"."Select"', TableName("Odd Schema", "Select")),
        ('"a.b"', TableName("public", "a.b")),
        ('"say ""hi"""', TableName("public", 'say "hi"')),
    ],
)
def test_identifiers_are_parsed_as_postgres_parses_them(text: str, name: TableName) -> None:
    assert TableName.parse(text) == name


@pytest.mark.parametrize("text", ["", ".", "a.", "a.b.c", '"open', "1a", 'a"b"', "a b"])
def test_text_that_is_not_a_table_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        TableName.parse(text)


def test_no_schema_gets_the_folder_that_the_lake_uses_itself() -> None:
    schema, name = TableName("_pgcdc", "..").folder.split("/")
    assert schema != "_pgcdc"
    assert (decoded(schema), decoded(name)) == ("_pgcdc", "..")
    assert name != ".."


@given(_NAMES, _NAMES)
def test_table_name_in_advice_is_quoted_for_the_shell(schema: str, name: str) -> None:
    table = TableName(schema, name)
    assert shlex.split(f"pgcdc snapshot {table.shell}") == ["pgcdc", "snapshot", str(table)]


def test_nearest_name_is_found_in_any_schema() -> None:
    tables = [TableName("shop", "orders"), TableName("public", "order_lines"), TableName("public", "customers")]
    assert nearest("orderz", tables) == TableName("shop", "orders")
    assert nearest("xyz", tables) is None


@pytest.mark.parametrize(
    ("name", "folder"),
    [(".", "~2E"), ("..", "~2E."), ("...", "..."), ("_delta_log", "~5Fdelta_log"), ("_pgcdc_x", "~5Fpgcdc_x"),
     ("_DELTA_LOG", "_DELTA_LOG"), ("a/b", "a~2Fb")],
)  # fmt: skip
def test_folder_name_with_a_special_meaning_is_escaped(name: str, folder: str) -> None:
    assert encoded(name) == folder


def test_name_is_quoted_only_where_necessary() -> None:
    assert str(TableName("shop", "orders")) == "shop.orders"
    assert str(TableName("Shop", 'a"b')) == '"Shop"."a""b"'
