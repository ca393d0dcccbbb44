"""Renders a value as text on both sides: in PostgreSQL by SQL, and in the mirror by DataFusion and Arrow. Equal values
give equal texts.

This module shares no code with the code that fills the mirrors. Otherwise a fault there would stay hidden.

| in the mirror | on the source | the text |
|---|---|---|
| string | any type | as PostgreSQL writes it |
| boolean | bool | true, false |
| integer | int2, int4, int8 | decimal digits |
| float, double | float4, float8 | the IEEE bits, big-endian, in hexadecimal; every NaN is ``NaN`` |
| decimal | numeric | digits with all decimals of its scale |
| date | date | days since 1970-01-01 |
| timestamp, timestamp_ntz | timestamptz, timestamp | microseconds since 1970-01-01 |
| binary | bytea | hexadecimal |
| array | array | the elements' texts, escaped, with a comma after each element |
| text in ``_pgcdc_raw`` | a value that the mirror's type cannot hold | ``as written: `` and PostgreSQL's text |

With any other pair of types, the mirror has the wrong type. The text then says so, and every row differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Column, PgType
from pgcdc_assets.core.names import quoted

AS_WRITTEN = "as written: "

# Built-in types by their OIDs, which never change (pg_type.dat).
BOOL, BYTEA, INT8, INT2, INT4, FLOAT4, FLOAT8 = 16, 17, 20, 21, 23, 700, 701
DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC = 1082, 1114, 1184, 1700

_NULL_ELEMENT = "~N,"
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype="<u2")


@dataclass(frozen=True)
class Rendering:
    """How one column is rendered as comparable text on both sides."""

    name: str
    source: str
    """SQL expression for the comparable text in PostgreSQL. The text of NULL is NULL."""
    shown: str
    """SQL expression for the readable form in PostgreSQL."""
    mirror: str
    """SQL expression for DataFusion. ``text`` converts the values of this expression."""
    text: Callable[[pa.Array], pa.Array]
    """Converts the values of the ``mirror`` expression to large_string."""


@dataclass(frozen=True)
class _Form:
    """How values of one PostgreSQL type and one mirror type are rendered as the same text. ``value`` and ``fits`` take
    an SQL expression for a PostgreSQL value, and return SQL for its text and for whether it fits the mirror's type. If
    ``fits`` is None, every value fits."""

    value: Callable[[str], str]
    text: Callable[[pa.Array], pa.Array]
    fits: Callable[[str], str] | None = None
    cast: str | None = None
    """The Arrow type to which DataFusion casts the value first."""


def rendering(column: Column, kind: pa.DataType | None) -> Rendering:
    """The rendering of ``column``. ``kind``: the column's type in the mirror. None: the mirror lacks the column."""
    name = quoted(column.name)
    if kind is None:
        return Rendering(column.name, name, name, "CAST(NULL AS VARCHAR)", _large)
    if _is_text(kind):
        return Rendering(column.name, name, name, name, _large)
    form = _form_of(column.type, kind)
    if form is None:
        return Rendering(column.name, name, name, name, lambda values: _wrong(values, column.type, kind))
    source = form.value(name)
    if form.fits is not None:
        written = f"'{AS_WRITTEN}' || concat({name})"
        source = f"CASE WHEN {name} IS NULL THEN NULL WHEN {form.fits(name)} THEN {source} ELSE {written} END"
    mirror = f"arrow_cast({name}, '{form.cast}')" if form.cast else name
    return Rendering(column.name, source, name, mirror, form.text)


def with_raw(text: pa.Array, values: pa.Array, raw: pa.Array | None, name: str) -> pa.Array:
    """``text``, with the text in ``_pgcdc_raw`` in rows that have one for column ``name``. The column's value in such a
    row must be NULL. If it is not NULL, the text says so, and therefore differs from the source's text."""
    if raw is None or raw.null_count == len(raw):
        return text
    written = pc.map_lookup(raw, pa.scalar(name), "first").cast(pa.large_string())
    if written.null_count == len(written):
        return text
    mark = pc.if_else(pc.is_valid(values), "a value, and " + AS_WRITTEN, AS_WRITTEN).cast(pa.large_string())
    return pc.if_else(pc.is_valid(written), pc.binary_join_element_wise(mark, written, _empty()), text)


def _form_of(declared: PgType, kind: pa.DataType) -> _Form | None:
    """The form for a type in PostgreSQL and a type in the mirror; None if such a mirror column cannot represent the
    source's type."""
    base = declared.base or declared
    oid = base.oid
    if _is_list(kind) and base.element is not None:
        element = _form_of(base.element, kind.value_type)
        return element and _list_of(base.element, element)
    if _is_text(kind):
        return _Form(lambda e: f"concat({e})", _large)
    if pa.types.is_boolean(kind) and oid == BOOL:
        return _Form(lambda e: f"{e}::text", _large)
    if pa.types.is_integer(kind) and oid in (INT2, INT4, INT8):
        return _Form(lambda e: f"{e}::text", _large)
    if (pa.types.is_float32(kind), oid) == (True, FLOAT4) or (pa.types.is_float64(kind), oid) == (True, FLOAT8):
        send = "float4send" if oid == FLOAT4 else "float8send"
        return _Form(lambda e: f"CASE WHEN {e} = 'NaN' THEN 'NaN' ELSE encode({send}({e}), 'hex') END", _float_bits)
    if pa.types.is_decimal(kind) and oid == NUMERIC:
        return _Form(lambda e: f"{e}::text", _digits, lambda e: f"{e} <> 'NaN'", cast="Utf8")
    if _is_binary(kind) and oid == BYTEA:
        return _Form(lambda e: f"encode({e}, 'hex')", _hexadecimal)
    return _moment(oid, kind)


def _moment(oid: int, kind: pa.DataType) -> _Form | None:
    """The form of dates and timestamps. Their text is a number. Values from 0001-01-01 to 9999-12-31 fit."""
    if pa.types.is_date32(kind) and oid == DATE:
        return _Form(
            lambda e: f"({e} - '1970-01-01'::date)::text",
            lambda values: _large(values.cast(pa.int32())),
            lambda e: f"{e} BETWEEN '0001-01-01' AND '9999-12-31'",
        )
    expected = {TIMESTAMP: pa.timestamp("us"), TIMESTAMPTZ: pa.timestamp("us", "UTC")}.get(oid)
    if expected is None or kind != expected:
        return None
    return _Form(
        lambda e: f"(extract(epoch FROM {e}) * 1000000)::bigint::text",
        lambda values: _large(values.cast(pa.int64())),
        lambda e: f"{e} >= '0001-01-01' AND {e} < '10000-01-01'",
    )


def _list_of(element: PgType, form: _Form) -> _Form:
    """The form of an array. The array fits if it has one dimension, starts at index 1, and all its elements fit."""
    # unnest() would expand a composite element to columns, so composite elements are read by subscripts, which are
    # slow. Other elements use unnest().
    composite = (element.base or element).family == "c"

    def rows(array: str) -> tuple[str, str]:
        if composite:
            return f"generate_subscripts({array}, 1) AS i(o)", f"({array})[o]"
        return f"unnest({array}) WITH ORDINALITY AS u(x, o)", "x"

    def value(array: str) -> str:
        source, one = rows(array)
        escaped = f"replace(replace({form.value(one)}, '~', '~~'), ',', '~,') || ','"
        text = f"CASE WHEN {one} IS NULL THEN '{_NULL_ELEMENT}' ELSE {escaped} END"
        # The text of an empty array is '', and the text of a NULL array is NULL.
        joined = f"SELECT coalesce(string_agg({text}, '' ORDER BY o), '') FROM {source}"  # noqa: S608 (quoted)
        return f"CASE WHEN {array} IS NULL THEN NULL ELSE ({joined}) END"

    def fits(array: str) -> str:
        source, one = rows(array)
        plain = f"coalesce(array_ndims({array}), 1) = 1 AND coalesce(array_lower({array}, 1), 1) = 1"
        if form.fits is None:
            return plain
        return f"{plain} AND NOT EXISTS (SELECT FROM {source} WHERE NOT ({form.fits(one)}))"

    cast = f"List({form.cast})" if form.cast else None
    return _Form(value, lambda values: _joined(values, form.text), fits, cast)


def _joined(values: pa.Array, text: Callable[[pa.Array], pa.Array]) -> pa.Array:
    elements = text(values.flatten()).cast(pa.string())
    escaped = pc.replace_substring(pc.replace_substring(elements, "~", "~~"), ",", "~,")
    closed = pc.binary_join_element_wise(escaped, ",", "")
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pc.fill_null(closed, _NULL_ELEMENT))
    joined = pc.binary_join(lists, "").cast(pa.large_string())
    return pc.if_else(pc.is_valid(values), joined, pa.scalar(None, pa.large_string()))


def _float_bits(values: pa.Array) -> pa.Array:
    width = values.type.bit_width // 8
    numbers = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    digits = _HEX[numbers.astype(f">f{width}").view(np.uint8)]
    offsets = np.arange(len(values) + 1, dtype=np.int64) * (2 * width)
    text = _large_string(offsets, digits)
    text = pc.if_else(pc.is_nan(pc.fill_null(values, 0)), pa.scalar("NaN", pa.large_string()), text)
    return pc.if_else(pc.is_valid(values), text, pa.scalar(None, pa.large_string()))


def _digits(values: pa.Array) -> pa.Array:
    """The texts of decimals. Texts that DataFusion returns stay unchanged. Arrow decimals are written here with all
    digits of their scale, because Arrow itself writes small decimals with an exponent."""
    if not pa.types.is_decimal(values.type) or values.type.scale == 0:
        return _large(values)
    scale, buffers = values.type.scale, values.buffers()
    whole = pa.Array.from_buffers(pa.decimal128(values.type.precision, 0), len(values), buffers, offset=values.offset)
    unsigned = pc.replace_substring(whole.cast(pa.string()), "-", "")
    padded = pc.utf8_lpad(unsigned, scale + 1, "0")
    sign = pc.if_else(pc.less(whole, pa.scalar(0, whole.type)), "-", "")
    before, after = pc.utf8_slice_codeunits(padded, 0, -scale), pc.utf8_slice_codeunits(padded, -scale)
    return _large(pc.binary_join_element_wise(sign, before, ".", after, ""))


def _hexadecimal(values: pa.Array) -> pa.Array:
    plain = pc.fill_null(values.cast(pa.large_binary()), b"")
    _, offsets, data = plain.buffers()
    bounds = np.frombuffer(offsets, np.int64)[plain.offset : plain.offset + len(plain) + 1]
    content = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data else np.empty(0, np.uint8)
    text = _large_string((bounds - bounds[0]) * 2, _HEX[content])
    return pc.if_else(pc.is_valid(values), text, pa.scalar(None, pa.large_string()))


def _large_string(offsets: np.ndarray, digits: np.ndarray) -> pa.Array:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(digits))]
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)


def _large(values: pa.Array) -> pa.Array:
    return values.cast(pa.large_string())


def _empty() -> pa.Scalar:
    return pa.scalar("", pa.large_string())


def _wrong(values: pa.Array, declared: PgType, kind: pa.DataType) -> pa.Array:
    text = pa.repeat(pa.scalar(f"{kind} for {declared.name}", pa.large_string()), len(values))
    return pc.if_else(pc.is_valid(values), text, pa.scalar(None, pa.large_string()))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
