"""Array texts are split into elements. The texts are written by a function that follows PostgreSQL's array_out."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.text.strings import elements, not_plain

List = list[str | None]


def written(items: List, delimiter: str = ",") -> str:
    """The text that array_out writes. It quotes empty texts, NULL in any case, and texts with braces, delimiter, quote,
    backslash or white space."""

    def one(item: str | None) -> str:
        if item is None:
            return "NULL"
        special = set('{}"\\ \t\n\r\v\f' + delimiter)
        if item == "" or item.upper() == "NULL" or special & set(item):
            return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return item

    return "{" + delimiter.join(map(one, items)) + "}"


def taken_apart(texts: list[str | None], delimiter: str = ",") -> list[List]:
    found = elements(pa.array(texts, pa.string()), delimiter)
    found.text.validate(full=True)
    values = found.text.to_pylist()
    assert len(found.offsets) == len(texts) + 1
    assert found.offsets[-1] == len(values)
    offsets = found.offsets.tolist()
    return [values[a:b] for a, b in pairwise(offsets)]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("{}", []),
        ("{1}", ["1"]),
        ("{1,NULL,-3}", ["1", None, "-3"]),
        ('{NULL,"NULL",null,NULLS}', [None, "NULL", "null", "NULLS"]),
        ('{""}', [""]),
        ('{"a,b","{}",c}', ["a,b", "{}", "c"]),
        (r'{"a\"b","\\","\\\\\"",c}', ['a"b', "\\", '\\\\"', "c"]),
        (r'{"\\","\\"}', ["\\", "\\"]),
        ('{"é ü",日本}', ["é ü", "日本"]),
        ('{"(1,\\"a b\\")"}', ['(1,"a b")']),
    ],
)
def test_array_text_is_split_into_elements(text: str, items: List) -> None:
    assert taken_apart([text]) == [items]
    assert taken_apart([None, text, "{}", text, None]) == [[], items, [], items, []]


def test_boxes_are_delimited_by_semicolons() -> None:
    assert taken_apart(["{(1,1),(0,0);(2,2),(1,1)}"], ";") == [["(1,1),(0,0)", "(2,2),(1,1)"]]


def test_sliced_column_is_split_into_elements() -> None:
    texts = pa.array(["{a", None, "{b,c}", "{}", "{d}", "x}"])
    found = elements(texts.slice(1, 4))
    assert (found.offsets.tolist(), found.text.to_pylist()) == ([0, 0, 2, 2, 3], ["b", "c", "d"])


def test_empty_and_null_columns_have_no_elements() -> None:
    found = elements(pa.array([], pa.string()))
    assert (found.offsets.tolist(), len(found.text)) == ([0], 0)
    assert taken_apart([None, None]) == [[], []]


def test_bounds_and_dimensions_are_not_plain_lists() -> None:
    texts = ["{1}", "[0:1]={1,2}", "{{1},{2}}", None, '{"{"}', "[1:1][2:2]={{1}}", "{}"]
    assert not_plain(pa.array(texts)).tolist() == [False, True, True, False, False, True, False]


@pytest.mark.parametrize(
    "text",
    ["", "{", "}", "a", "{,}", "{a,}", "{,a}", '{"a}', '{a"b"}', '{"a"b}', '{"a""b"}', "{a}}", "{{a}", "{a}{b}", "}{",
     '{"a\\"}', "{a\\b}", "{a\\,b}", "{a}b", "b{a}", '"{a}"', "{a", "a}", "\\{a}", '{"a"}"', '{a,"'],
)  # fmt: skip
@pytest.mark.parametrize("around", [[], ["{ok}"], ['{"quoted"}', None]])
def test_invalid_array_text_is_refused(text: str, around: list[str | None]) -> None:
    with pytest.raises(ProtocolError) as caught:
        taken_apart([*around, text, *around])
    assert caught.value.what == "a value is not the text form of an array"


ITEMS = st.lists(
    st.none()
    | st.sampled_from(["", "NULL", "null", '"', "\\", '\\"', "{", "}", ",", " ", "a,b", "\\\\", "é", "1"])
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
    | st.text('"\\{},; N', max_size=8),
    max_size=5,
)


@given(rows=st.lists(st.none() | ITEMS, max_size=8), delimiter=st.sampled_from([",", ";"]))
def test_lists_round_trip_through_array_text(rows: list[List | None], delimiter: str) -> None:
    texts = [None if row is None else written(row, delimiter) for row in rows]
    assert taken_apart(texts, delimiter) == [row or [] for row in rows]


@given(texts=st.lists(st.none() | st.text('{}",\\a N', max_size=10).map(lambda text: "{" + text), max_size=4))
def test_array_text_is_read_independently_of_its_neighbours(texts: list[str | None]) -> None:
    def read(texts: list[str | None]) -> list[List] | None:
        try:
            return taken_apart(texts)
        except ProtocolError:
            return None

    alone = [read([text]) for text in texts]
    together = read(texts)
    assert together == (None if None in alone else [item for rows in alone for item in rows or []])
