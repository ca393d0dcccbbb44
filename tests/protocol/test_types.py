"""The casts from PostgreSQL's texts to Arrow types, with extreme values of each type.

A value *fits* if its Arrow type can represent it exactly. Other values become NULL, and their text is kept.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Column, PgType
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.text.strings import elements, not_plain
from pgcdc_assets.protocol.text.typed import row_hash, row_identities, typed
from pgcdc_assets.protocol.text.types import arrow_type, cast
from tests.protocol.examples import (
    BOOL,
    BOX,
    BPCHAR,
    BYTEA,
    COMPOSITE,
    DATE,
    ENUM,
    FLOAT4,
    FLOAT8,
    INT2,
    INT2VECTOR,
    INT4,
    INT8,
    INTERVAL,
    JSONB,
    MONEY,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    TIMETZ,
    UUID,
    array,
    domain,
    numeric,
)

UNFIT = object()
"""What :func:`read` returns for a text that does not fit its type."""
Read = list[Any]


def read(texts: Sequence[str | None], of: PgType) -> Read:
    """Casts the texts. Returns Python values, with UNFIT for each text that does not fit. Also checks the rules that
    every cast must follow."""
    found = cast(pa.array(texts, pa.string()), of)
    found.values.validate(full=True)
    assert found.values.type == arrow_type(of)
    assert len(found.values) == len(texts)
    values = found.values.to_pylist()
    unfit = [False] * len(texts) if found.unfit is None else found.unfit.tolist()
    for text, value, marked in zip(texts, values, unfit, strict=True):
        assert (value is None) == (text is None or marked), "NULL exactly where the text is NULL or does not fit"
        assert not (marked and text is None)
    return [UNFIT if marked else value for value, marked in zip(values, unfit, strict=True)]


@pytest.mark.parametrize(
    ("of", "type_"),
    [
        (BOOL, pa.bool_()), (INT2, pa.int16()), (INT4, pa.int32()), (INT8, pa.int64()),
        (FLOAT4, pa.float32()), (FLOAT8, pa.float64()), (BYTEA, pa.binary()),
        (numeric(38, 38), pa.decimal128(38, 38)), (numeric(1, 0), pa.decimal128(1, 0)),
        (numeric(39, 0), pa.string()), (NUMERIC, pa.string()), (MONEY, pa.string()),
        (numeric(3, -2), pa.decimal128(5, 0)), (numeric(38, -1), pa.string()),
        (numeric(2, 5), pa.decimal128(5, 5)), (numeric(1, 39), pa.string()),
        (DATE, pa.date32()), (TIMESTAMP, pa.timestamp("us")), (TIMESTAMPTZ, pa.timestamp("us", "UTC")),
        (TEXT, pa.string()), (BPCHAR, pa.string()), (UUID, pa.string()), (JSONB, pa.string()), (TIME, pa.string()),
        (TIMETZ, pa.string()), (INTERVAL, pa.string()), (ENUM, pa.string()), (COMPOSITE, pa.string()),
        (INT2VECTOR, pa.string()),
        (domain(INT4), pa.int32()), (domain(domain(numeric(5, 1))), pa.decimal128(5, 1)),
        (array(INT4), pa.list_(pa.int32())), (array(numeric(5, 1)), pa.list_(pa.decimal128(5, 1))),
        (array(NUMERIC), pa.list_(pa.string())), (array(domain(numeric(5, 1))), pa.list_(pa.decimal128(5, 1))),
        (domain(array(TIMESTAMPTZ)), pa.list_(pa.timestamp("us", "UTC"))), (array(COMPOSITE), pa.list_(pa.string())),
    ],
    ids=str,
)  # fmt: skip
def test_each_postgresql_type_is_cast_to_its_arrow_type(of: PgType, type_: pa.DataType) -> None:
    assert arrow_type(of) == type_


def test_elements_of_arrow_lists_have_the_name_that_parquet_uses() -> None:
    assert arrow_type(array(INT4)).value_field.name == "element"


@pytest.mark.parametrize(
    "of", [BOOL, INT8, FLOAT8, numeric(9, 2), DATE, TIMESTAMPTZ, BYTEA, TEXT, array(TEXT)], ids=str
)
def test_empty_column_and_column_of_nulls_are_cast(of: PgType) -> None:
    assert read([], of) == []
    assert read([None, None], of) == [None, None]


def test_column_of_every_arrow_string_type_is_cast() -> None:
    texts = ["9", "1", None, "-2", "9"]
    for type_ in (pa.string(), pa.large_string(), pa.string_view()):
        whole = pa.array(texts, type_)
        assert cast(whole.slice(1, 3), INT4).values.to_pylist() == [1, None, -2]
        chunks = pa.chunked_array([whole.slice(1, 1), whole.slice(2, 2)])
        assert cast(chunks, INT4).values.to_pylist() == [1, None, -2]
    assert cast(pa.chunked_array([], pa.string()), array(INT4)).values.to_pylist() == []


def test_values_of_types_that_are_stored_as_text_are_not_changed_by_the_cast() -> None:
    for of in (TEXT, BPCHAR, UUID, JSONB, TIME, TIMETZ, INTERVAL, MONEY, NUMERIC, ENUM, COMPOSITE, domain(TEXT)):
        texts = ["ab   ", "24:00:00", "", "$1,234.50", "NaN", '(1,"a b")', None, "é", "infinity"]
        assert read(texts, of) == texts


def test_boolean_texts_are_cast_to_true_and_false() -> None:
    assert read(["t", None, "f", "f"], BOOL) == [True, None, False, False]


@pytest.mark.parametrize(("of", "bits"), [(INT2, 16), (INT4, 32), (INT8, 64)])
def test_integer_texts_of_each_size_are_cast_exactly(of: PgType, bits: int) -> None:
    edges = [-(1 << bits - 1), -1, 0, (1 << bits - 1) - 1]
    assert read([*map(str, edges), None], of) == [*edges, None]


def test_float_texts_are_cast_to_floats_including_nan_and_infinity() -> None:
    texts = ["0.1", "1e+20", "-1.5e-07", "5e-324", "1.7976931348623157e+308", "Infinity", "-Infinity", None]
    assert read(texts, FLOAT8) == [0.1, 1e20, -1.5e-07, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, None]
    nan, negative = read(["NaN", "-0"], FLOAT8)
    assert math.isnan(nan)
    assert math.copysign(1, negative) == -1
    single = read(["3.4028235e+38", "1e-45", "0.1", "-0", "Infinity"], FLOAT4)
    assert single == [3.4028234663852886e38, 1.401298464324817e-45, 0.10000000149011612, 0, math.inf]
    assert math.copysign(1, single[3]) == -1


def test_numeric_text_is_cast_exactly_or_does_not_fit() -> None:
    of = numeric(10, 2)
    texts = ["1.50", "-0.01", "0.00", "99999999.99", "-99999999.99", None]
    assert read(texts, of) == [None if text is None else Decimal(text) for text in texts]
    assert read(["1.50", "NaN", "Infinity", "-Infinity", "100000000.00", "0.001", "9" * 300, "1.5000", None], of) == [
        Decimal("1.50"), UNFIT, UNFIT, UNFIT, UNFIT, UNFIT, UNFIT, Decimal("1.50"), None,
    ]  # fmt: skip
    assert read(["9" * 38, "-" + "9" * 38, "1" + "0" * 38, "9" * 39], numeric(38, 0)) == [
        Decimal("9" * 38), Decimal("-" + "9" * 38), UNFIT, UNFIT,
    ]  # fmt: skip
    assert read(["0." + "9" * 38, "1." + "0" * 38], numeric(38, 38)) == [Decimal("0." + "9" * 38), UNFIT]
    assert read(["99000", "NaN"], numeric(2, -3)) == [Decimal(99000), UNFIT]
    assert read(["0.00099"], numeric(2, 5)) == [Decimal("0.00099")]


@given(
    rows=st.lists(st.decimals(allow_nan=True, allow_infinity=True).map(str) | st.decimals(-200, 200, places=3).map(str)
                  | st.from_regex(r"-?(0|[1-9][0-9]{0,44})(\.[0-9]{1,44})?", fullmatch=True), max_size=5),
    precision=st.integers(1, 38),
    data=st.data(),
)  # fmt: skip
@example(rows=["9" * 39], precision=38, data=None)
@example(rows=["1.0000000000000000000000000000000000000000"], precision=2, data=None)
def test_random_numeric_is_cast_exactly_or_does_not_fit(
    rows: list[str], precision: int, data: st.DataObject | None
) -> None:
    scale = 0 if data is None else data.draw(st.integers(0, precision))
    texts = [_as_numeric_out(text) for text in rows]
    expected = [_exactly(text, precision, scale) for text in texts]
    assert read(texts, numeric(precision, scale)) == expected
    assert [read([text], numeric(precision, scale))[0] for text in texts] == expected


def _as_numeric_out(text: str) -> str:
    number = Decimal(text)
    if number.is_nan():
        return "NaN"
    return text.replace("sNaN", "NaN") if number.is_infinite() or "E" not in text else f"{number:f}"


def _exactly(text: str, precision: int, scale: int) -> Any:
    number = Decimal(text)
    if not number.is_finite():
        return UNFIT
    whole, _, fraction = text.lstrip("-").partition(".")
    fits = len(whole.lstrip("0")) <= precision - scale and len(fraction.rstrip("0")) <= scale
    return number if fits else UNFIT


def test_date_is_cast_exactly_or_does_not_fit() -> None:
    assert read(["2024-02-29", "0001-01-01", "9999-12-31", "1500-02-28", None], DATE) == [
        date(2024, 2, 29), date.min, date.max, date(1500, 2, 28), None,
    ]  # fmt: skip
    assert read(["2024-02-29", "infinity", "-infinity", "10000-01-01", "5874897-12-31", "0044-03-15 BC",
                 "4714-11-24 BC", None], DATE) == [date(2024, 2, 29), *[UNFIT] * 6, None]  # fmt: skip


def test_timestamp_is_cast_exactly_or_does_not_fit() -> None:
    assert read(["2024-02-29 23:59:59.999999", "0001-01-01 00:00:00", "1999-12-31 12:00:00.1", None], TIMESTAMP) == [
        datetime(2024, 2, 29, 23, 59, 59, 999999), datetime.min, datetime(1999, 12, 31, 12, 0, 0, 100000), None,
    ]  # fmt: skip
    assert read(["9999-12-31 23:59:59.999999", "infinity", "-infinity", "10000-01-01 00:00:00",
                 "294276-12-31 23:59:59.999999", "0001-12-31 23:59:59.5 BC", None], TIMESTAMP) == [
        datetime.max, *[UNFIT] * 5, None,
    ]  # fmt: skip


def test_timestamptz_is_cast_exactly_or_does_not_fit() -> None:
    noon = datetime(2024, 2, 29, 12, tzinfo=UTC)
    texts = ["2024-02-29 12:00:00+00", "2024-02-29 17:45:00+05:45", "2024-02-29 08:30:00-03:30", None]
    assert read(texts, TIMESTAMPTZ) == [noon, noon, noon, None]
    assert read([*texts, "2024-02-29 17:53:28.000001+05:53:28", "2024-02-29 11:59:30-00:00:30"], TIMESTAMPTZ) == [
        noon, noon, noon, None, noon + timedelta(microseconds=1), noon,
    ]  # fmt: skip
    outside = ["infinity", "-infinity", "10000-01-01 00:00:00+00", "0001-12-31 00:00:00+00 BC",
               "10000-01-01 00:00:00+05:53:28", "0001-12-31 00:00:00-05:53:28 BC"]  # fmt: skip
    assert read(outside, TIMESTAMPTZ) == [UNFIT] * 6


def test_timestamptz_fits_if_its_year_in_utc_is_between_1_and_9999() -> None:
    texts = ["0001-01-01 00:00:00+00", "0001-01-01 00:00:00+01", "0001-01-01 00:00:00-01"]
    assert read(texts, TIMESTAMPTZ) == [
        datetime.min.replace(tzinfo=UTC), UNFIT, datetime(1, 1, 1, 1, tzinfo=UTC)]  # fmt: skip
    assert read(["9999-12-31 23:59:59.999999+00", "9999-12-31 23:59:59.999999-00:00:01"], TIMESTAMPTZ) == [
        datetime.max.replace(tzinfo=UTC), UNFIT]  # fmt: skip


ZONES = st.builds(
    lambda sign, seconds: timezone(sign * timedelta(seconds=seconds)),
    st.sampled_from([1, -1]),
    st.sampled_from([0, 3600, 20700, 21208, 43200]) | st.integers(0, 57599),
)


@given(st.lists(st.none() | st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=ZONES), max_size=5))
def test_every_instant_is_cast_to_the_exact_microsecond(instants: list[datetime | None]) -> None:
    assert read([None if at is None else _as_timestamptz_out(at) for at in instants], TIMESTAMPTZ) == instants


def _as_timestamptz_out(at: datetime) -> str:
    """The text of timestamptz_out: no trailing zeros in the seconds, and no zero parts at the end of the offset."""
    text, sign, zone = at.isoformat(" ")[:-6], "+", at.utcoffset() or timedelta()
    text = at.replace(tzinfo=None).isoformat(" ")
    if "." in text:
        text = text.rstrip("0")
    seconds = round(zone.total_seconds())
    sign = "-" if seconds < 0 else "+"
    hours, minutes, seconds = abs(seconds) // 3600, abs(seconds) // 60 % 60, abs(seconds) % 60
    offset = f"{hours:02d}" + (f":{minutes:02d}" if minutes or seconds else "") + (f":{seconds:02d}" if seconds else "")
    return text + sign + offset


def test_bytea_text_is_cast_to_its_bytes() -> None:
    assert read([r"\x", r"\x00ff", None, r"\xDEADbeef"], BYTEA) == [b"", b"\0\xff", None, b"\xde\xad\xbe\xef"]


@given(st.lists(st.none() | st.binary(max_size=20), max_size=6))
def test_bytea_is_unchanged_after_a_round_trip_as_text(values: list[bytes | None]) -> None:
    assert read([None if value is None else rf"\x{value.hex()}" for value in values], BYTEA) == values


@given(st.lists(st.none() | st.floats(allow_nan=False), max_size=6))
def test_float8_is_unchanged_after_a_round_trip_as_text(values: list[float | None]) -> None:
    found = read([None if value is None else _as_float8_out(value) for value in values], FLOAT8)
    assert [None if x is None else struct.pack("d", x) for x in found] == [
        None if x is None else struct.pack("d", x) for x in values
    ]


def _as_float8_out(value: float) -> str:
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value).removesuffix(".0")


def test_array_text_is_cast_to_a_list() -> None:
    assert read(["{1,NULL,-3}", "{}", None], array(INT4)) == [[1, None, -3], [], None]
    assert read(["{t,f,NULL}"], array(BOOL)) == [[True, False, None]]
    assert read([r'{"\\x0001","\\x",NULL}'], array(BYTEA)) == [[b"\0\1", b"", None]]
    assert read(['{"2024-02-29 12:00:00+00",NULL}'], array(TIMESTAMPTZ)) == [
        [datetime(2024, 2, 29, 12, tzinfo=UTC), None]]  # fmt: skip
    assert read(["{1.50,NULL}"], array(numeric(10, 2))) == [[Decimal("1.50"), None]]
    assert read(["{NaN,Infinity,-0}"], array(FLOAT8))[0][1:] == [math.inf, 0]
    assert read(['{"a b",NULL,"NULL","",é}'], array(TEXT)) == [["a b", None, "NULL", "", "é"]]
    assert read(['{"(1,\\"a b\\")",NULL}'], array(COMPOSITE)) == [['(1,"a b")', None]]
    boxes = PgType(1020, "_box", element=BOX, delimiter=";")
    assert read(["{(1,1),(0,0);(2,2),(1,1)}"], boxes) == [["(1,1),(0,0)", "(2,2),(1,1)"]]
    assert read(['{"{1,2}","{}"}'], array(domain(array(INT4)))) == [[[1, 2], []]]


def test_arrays_with_bounds_or_several_dimensions_do_not_fit() -> None:
    texts = ["{1}", "[0:1]={1,2}", "{{1},{2}}", None, "[-3:-3]={7}", "{}", "[1:1][2:2]={{1}}"]
    assert read(texts, array(INT4)) == [[1], UNFIT, UNFIT, None, UNFIT, [], UNFIT]
    assert read(texts, array(TEXT)) == [["1"], UNFIT, UNFIT, None, UNFIT, [], UNFIT]


def test_an_array_with_one_element_that_does_not_fit_does_not_fit() -> None:
    texts = ["{}", "{1.50,NaN,2.50}", None, "{3.50}", "{NaN}", "{{1.50}}", "{4.50}"]
    values = [[], UNFIT, None, [Decimal("3.50")], UNFIT, UNFIT, [Decimal("4.50")]]
    assert read(texts, array(numeric(10, 2))) == values
    assert read(["{infinity}", "{2024-02-29}"], array(DATE)) == [UNFIT, [date(2024, 2, 29)]]


def test_null_lists_contain_no_elements() -> None:
    # A NULL list must have no elements, because Parquet's writer refuses a NULL list with elements.
    values = cast(pa.array(["{1.50,NaN}", "{3.50}", None, "[0:0]={1.00}"]), array(numeric(10, 2))).values
    assert values.offsets.to_pylist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (BOOL, ""), (BOOL, "true"), (BOOL, "x"), (BOOL, "1"),
        (INT4, ""), (INT4, "1.0"), (INT4, "2147483648"), (INT4, "0x10"), (INT4, " 1"), (INT4, "+1"),
        (FLOAT8, ""), (FLOAT8, "one"), (FLOAT8, "1e400"), (FLOAT4, "1e39"),
        (numeric(10, 2), ""), (numeric(10, 2), "1.2.3"), (numeric(10, 2), "12a"), (numeric(38, 0), "9" * 40 + "x"),
        (DATE, ""), (DATE, "2024-02-30"), (DATE, "29.02.2024"), (DATE, "Infinity BC"),
        (TIMESTAMP, "2024-02-29 24:00:00"), (TIMESTAMP, "2024-02-29 12:00:00+00"), (TIMESTAMP, "2024-02-29 12:00:00 +"),
        (TIMESTAMP, "2024-02-29 12:00:00.1234567"),
        (TIMESTAMPTZ, "2024-02-29 12:00:00"), (TIMESTAMPTZ, "2024-02-29 12:00:00+05:53:60"),
        (BYTEA, ""), (BYTEA, "ab"), (BYTEA, r"\x0"), (BYTEA, r"\xzz"), (BYTEA, r"\x00\x00"), (BYTEA, r"\001"),
        (array(INT4), ""), (array(INT4), "{a}"), (array(INT4), "{1"), (array(INT4), "1,2"), (array(BOOL), "{true}"),
    ],
)  # fmt: skip
def test_error_for_an_invalid_text_does_not_contain_the_text(of: PgType, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read([None, text], of)
    assert caught.value.thing == f"type {of.name}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert caught.value.what == "a value is not valid for its type"


EVERY = [BOOL, INT4, FLOAT4, FLOAT8, numeric(9, 2), numeric(38, 0), DATE, TIMESTAMP, TIMESTAMPTZ, BYTEA]
EDGES = ["t", "1", "-1", "NaN", "Infinity", "1.50", "9" * 38, "9" * 39, "1e5", "2024-02-29", "0044-03-15 BC",
         "infinity", "10000-01-01", "2024-02-29 12:00:00", "2024-02-29 12:00:00+00", "10000-01-01 00:00:00", r"\x00ff",
         "2024-02-29 12:00:00.5+05:53:28", "0001-01-01 00:00:00 BC", "0001-01-01 00:00:00+01", "", "-"]  # fmt: skip


@given(
    of=st.sampled_from([*EVERY, *map(array, EVERY)]),
    texts=st.lists(st.none() | st.sampled_from(EDGES) | st.text("0123456789-+:. tfBCxNae\\", max_size=30), max_size=4),
    listed=st.booleans(),
)
def test_result_of_a_cast_does_not_depend_on_other_values_of_the_column(
    of: PgType, texts: list[str | None], listed: bool
) -> None:
    def outcome(texts: Sequence[str | None]) -> list[str] | None:
        try:
            return [repr(value) for value in read(texts, of)]
        except ProtocolError:
            return None

    if listed:
        texts = [None if text is None else f'{{"{text.replace(chr(92), chr(92) * 2)}",NULL}}' for text in texts]
    alone = [outcome([text]) for text in texts]
    together = outcome(texts)
    assert together == (None if None in alone else [item for values in alone for item in values or []])


# Array texts are split into elements ----------------------------------------------------------------

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


def test_arrays_of_boxes_are_split_at_semicolons() -> None:
    assert taken_apart(["{(1,1),(0,0);(2,2),(1,1)}"], ";") == [["(1,1),(0,0)", "(2,2),(1,1)"]]


def test_sliced_column_is_split_into_elements() -> None:
    texts = pa.array(["{a", None, "{b,c}", "{}", "{d}", "x}"])
    found = elements(texts.slice(1, 4))
    assert (found.offsets.tolist(), found.text.to_pylist()) == ([0, 0, 2, 2, 3], ["b", "c", "d"])


def test_empty_and_null_columns_have_no_elements() -> None:
    found = elements(pa.array([], pa.string()))
    assert (found.offsets.tolist(), len(found.text)) == ([0], 0)
    assert taken_apart([None, None]) == [[], []]


def test_arrays_with_bounds_or_several_dimensions_are_not_plain_lists() -> None:
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
def test_lists_are_unchanged_after_a_round_trip_as_array_text(rows: list[List | None], delimiter: str) -> None:
    texts = [None if row is None else written(row, delimiter) for row in rows]
    assert taken_apart(texts, delimiter) == [row or [] for row in rows]


@given(texts=st.lists(st.none() | st.text('{}",\\a N', max_size=10).map(lambda text: "{" + text), max_size=4))
def test_elements_of_an_array_text_do_not_depend_on_other_rows(texts: list[str | None]) -> None:
    def read(texts: list[str | None]) -> list[List] | None:
        try:
            return taken_apart(texts)
        except ProtocolError:
            return None

    alone = [read([text]) for text in texts]
    together = read(texts)
    assert together == (None if None in alone else [item for rows in alone for item in rows or []])


# Typed rows -----------------------------------------------------------------------------------------

NUMERICS = Column(1, "amount", PgType(1700, "numeric", (10 << 16 | 2) + 4))
TEXTS = Column(2, "Note", PgType(25, "text"))
DATES = Column(3, "day", PgType(1082, "date"))

texts = st.none() | st.text(max_size=12)


def test_raw_text_is_not_kept_for_values_that_fit() -> None:
    done = typed([pa.array(["1.5", None]), pa.array(["", None])], [NUMERICS, TEXTS], 2)
    assert [str(value) for value in done.values[0].to_pylist()] == ["1.50", "None"]
    assert done.values[1].to_pylist() == ["", None]
    assert done.raw.null_count == 2


def test_values_that_do_not_fit_are_kept_as_text() -> None:
    text = [
        pa.array(["NaN", "1", "NaN", None]),
        pa.array(["a", "b", "c", "d"]),
        pa.array(["infinity", "2024-02-29", "0044-03-15 BC", "2024-01-01"]),
    ]
    done = typed(text, [NUMERICS, TEXTS, DATES], 4)
    done.raw.validate(full=True)
    assert [value and dict(value) for value in done.raw.to_pylist()] == [
        {"amount": "NaN", "day": "infinity"},
        None,
        {"amount": "NaN", "day": "0044-03-15 BC"},
        None,
    ]
    assert done.values[0].is_null().to_pylist() == [True, False, True, True]


def test_values_of_chunked_and_sliced_columns_stay_in_their_rows() -> None:
    chunked = pa.chunked_array([["1", "NaN"], ["3"]])
    done = typed([chunked, pa.array(["x", "a", "b", "c"]).slice(1)], [NUMERICS, TEXTS], 3)
    assert [value and dict(value) for value in done.raw.to_pylist()] == [None, {"amount": "NaN"}, None]


@given(st.lists(st.tuples(texts, texts), max_size=20), st.integers(0, 20))
def test_row_hash_depends_only_on_the_values_of_the_row(rows: list[tuple[str | None, str | None]], start: int) -> None:
    """The hash must not depend on the row's position, the other rows, the order of columns, or a column of NULLs."""
    left = pa.array([row[0] for row in rows], pa.string())
    right = pa.array([row[1] for row in rows], pa.string())
    whole = row_hash([left, right], ["a", "b"], len(rows))
    start = min(start, len(rows))
    part = row_hash(
        [pa.nulls(len(rows) - start, pa.string()), right.slice(start), left.slice(start)],
        ["added", "b", "a"], len(rows) - start,
    )  # fmt: skip
    assert part.equals(whole.slice(start))
    by_row = dict(zip(rows, whole.to_pylist(), strict=True))
    # The hash has 64 bits. A collision among twenty rows would be a fault of the hash function.
    assert len(set(by_row.values())) == len(by_row)


def test_similar_rows_have_different_row_hashes() -> None:
    rows = [("", None), (None, ""), ("a", "b"), ("b", "a"), ("ab", ""), ("\1", ""), ("\1\1", ""), ("a\1", "")]
    text = [pa.array([row[at] for row in rows], pa.string()) for at in (0, 1)]
    assert len(set(row_hash(text, ["x", "y"], len(rows)).to_pylist())) == len(rows)


def test_row_hash_of_known_values_never_changes() -> None:
    """Mirrors store the hash. With another hash function, rows that were copied before would not be found."""
    text = [pa.array(["1", None, "größe"]), pa.array(["2024-01-01", "x" * 100, None])]
    fixed = [4091292991121921067, -3614613800946456788, 7368843869587773030]
    assert row_hash(text, ["id", "day"], 3).to_pylist() == fixed


def test_generated_row_identities_are_unique() -> None:
    """Copied rows of a table without a key get these texts as ``_pgcdc_row``."""
    both = row_identities(1000).to_pylist() + row_identities(1000).to_pylist()
    assert len(set(both)) == 2000
