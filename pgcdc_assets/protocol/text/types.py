"""The Arrow type for each PostgreSQL type, and casts from PostgreSQL's text form to these types. The text form is as
written by sessions with ``DateStyle=ISO, bytea_output=hex, extra_float_digits=1``.

A value that does not fit the Arrow type becomes NULL and is marked (:attr:`Cast.unfit`). Examples are NaN in a decimal,
infinity, BC and years past 9999 in dates, and arrays of two dimensions. A value is never changed to another value, and
whether it fits depends only on the value itself. A text that PostgreSQL cannot have written raises ProtocolError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, whole
from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.text.strings import elements, gathered, laid_out, not_plain

_BOOL, _BYTEA, _NUMERIC, _DATE, _TIMESTAMP, _TIMESTAMPTZ = 16, 17, 1700, 1082, 1114, 1184
_VECTORS: Final = (22, 30)
"""int2vector and oidvector. The catalog describes them as arrays, but their text form is ``1 2 3``, so they stay
text."""
_SCALARS: Final[dict[int, pa.DataType]] = {
    _BOOL: pa.bool_(),
    21: pa.int16(),
    23: pa.int32(),
    20: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    _BYTEA: pa.binary(),
    _DATE: pa.date32(),
    _TIMESTAMP: pa.timestamp("us"),
    _TIMESTAMPTZ: pa.timestamp("us", "UTC"),
}
"""Arrow types by the OIDs of built-in types, which are the same on every server. Values of all types that are not
listed here, and are not numeric or arrays, stay text."""

MAX_PRECISION: Final = 38
"""The most digits that Delta's (and Arrow's 128-bit) decimals can have."""

_CLOCK = r"\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?"
_ZONE = r"[+-]\d\d(?::\d\d){0,2}"
_OUTSIDE: Final = {
    oid: rf"^(?:-?infinity|\d{{5,}}-{rest}(?: BC)?|\d{{4}}-{rest} BC)$"
    for oid, rest in ((_DATE, r"\d\d-\d\d"), (_TIMESTAMP, _CLOCK), (_TIMESTAMPTZ, _CLOCK + _ZONE))
}
"""Patterns of dates and timestamps outside the years 0001 to 9999. Arrow cannot parse such a text."""
_NUMBER: Final = r"^(?:NaN|-?Infinity|-?(?:0|[1-9]\d*)(?:\.\d+)?)$"
"""The pattern of the text form of numeric, which never has an exponent or leading zeros."""
_ZONE_SECONDS = r"(?P<sign>[+-])\d\d:\d\d:(?P<seconds>[0-5]\d)$"
"""The pattern of UTC offsets with seconds, which occur in local mean times. Arrow cannot parse such a text."""
_SPAN: Final = {
    pa.int32(): (-719_162, 2_932_896),
    pa.int64(): (-62_135_596_800_000_000, 253_402_300_799_999_999),
}  # fmt: skip
"""The first and the last day, and the first and the last microsecond, of the years 0001 to 9999, counted from 1970."""


@dataclass(frozen=True)
class Cast:
    values: pa.Array
    unfit: Bools | None
    """Which rows have a text that does not fit the type. They are NULL in ``values``. May be None if all rows fit."""


def arrow_type(of: PgType) -> pa.DataType:
    """The Arrow type of a column of this PostgreSQL type, in change feeds and mirrors."""
    stored = of.stored
    if _is_array(stored):
        return pa.list_(pa.field("element", arrow_type(_element(stored))))
    if stored.oid == _NUMERIC:
        return _decimal(stored.typmod) or pa.string()
    return _SCALARS.get(stored.oid, pa.string())


def may_not_fit(type_: pa.DataType) -> bool:
    """Whether PostgreSQL may send values that do not fit a column of this Arrow type. The text of such a value is
    stored in ``_pgcdc_raw``."""
    kinds = pa.types
    return not (kinds.is_string(type_) or kinds.is_integer(type_) or kinds.is_floating(type_)
                or kinds.is_boolean(type_) or kinds.is_binary(type_))  # fmt: skip


def cast(text: pa.Array | pa.ChunkedArray, of: PgType) -> Cast:
    """Casts a column of text (any string type) to ``arrow_type(of)``. Raises ProtocolError for a text that PostgreSQL
    never writes for this type. The error does not contain the text."""
    column = whole(text)
    column = column if pa.types.is_string(column.type) else column.cast(pa.string())
    stored = of.stored
    try:
        return _cast_of(stored)(column, stored)
    except (pa.ArrowInvalid, ProtocolError):
        # Arrow's error is not raised, because it contains the value. The error about an element of an array is not
        # raised either, because it does not name the array's type.
        raise ProtocolError("a value is not valid for its type", thing=f"type {of.name}") from None


def _is_array(of: PgType) -> bool:
    return of.element is not None and of.oid not in _VECTORS


def _element(of: PgType) -> PgType:
    """The array's element type. An array such as ``numeric(10,2)[]`` has a typmod, which is the typmod of its elements.
    An array of a domain has none, and the domain's own typmod is used."""
    assert of.element is not None
    return of.element if of.typmod == -1 else replace(of.element, typmod=of.typmod)


def _decimal(typmod: int) -> pa.Decimal128Type | None:
    """The decimal type that can represent every numeric(precision, scale) of this typmod; None if there is no such
    type. Since PostgreSQL 15, the scale may be negative (99000 is a numeric(2,-3)), or greater than the precision."""
    if typmod < 4:
        return None
    precision, scale = typmod - 4 >> 16 & 0xFFFF, (typmod - 4 & 0x7FF ^ 1024) - 1024
    precision, scale = (precision - scale, 0) if scale < 0 else (max(precision, scale), scale)
    return pa.decimal128(precision, scale) if precision <= MAX_PRECISION else None


def _cast_of(of: PgType) -> Callable[[pa.StringArray, PgType], Cast]:
    if _is_array(of):
        return _cast_array
    target = arrow_type(of)
    if pa.types.is_string(target):
        return lambda text, of: Cast(text, None)
    if pa.types.is_integer(target):
        return _cast_integer
    if pa.types.is_floating(target):
        return _cast_float
    return _CASTS[of.oid]


def _cast_bool(text: pa.StringArray, of: PgType) -> Cast:
    octets, offsets = laid_out(text)
    valid = np.asarray(text.is_valid())
    true = octets == ord("t")
    _require(bool((np.diff(offsets) == valid).all() and (true | (octets == ord("f"))).all()))
    values = np.zeros(len(text), np.bool_)
    values[valid] = true
    return Cast(pa.array(values, mask=~valid), None)


def _cast_integer(text: pa.StringArray, of: PgType) -> Cast:
    octets, _ = laid_out(text)
    # Letters are rejected, because Arrow would read 0x10 as a number.
    _require(len(octets) == 0 or int(octets.max()) <= ord("9"))
    return Cast(text.cast(arrow_type(of)), None)


def _cast_float(text: pa.StringArray, of: PgType) -> Cast:
    values = text.cast(arrow_type(of))
    infinite = pc.is_inf(values).fill_null(False)
    if infinite.true_count:
        # Arrow also converts a number outside of the type's range to infinity. PostgreSQL never writes such a number,
        # so only a text that says Infinity is accepted.
        _require(pc.all(pc.match_substring_regex(text.filter(infinite), "^-?Infinity$")).as_py())
    return Cast(values, None)


def _cast_numeric(text: pa.StringArray, of: PgType) -> Cast:
    target = _decimal(of.typmod)
    assert target is not None
    _, offsets = laid_out(text)
    # Arrow 26 returns wrong values for numbers of 39 digits. So the texts are cast directly only if none is so long.
    if int(np.diff(offsets).max(initial=0)) + target.scale <= MAX_PRECISION:
        try:
            return Cast(text.cast(target), None)
        except pa.ArrowInvalid:
            pass  # Some value does not fit, or is not a number. Check each value below.
    unfit = _matching(text, _NUMBER) & ~_matching(text, _fitting(target))
    kept = _without(text, unfit)
    # Cut off zeros beyond the scale: they do not change the value, but Arrow would count them as digits.
    short = pc.replace_substring_regex(kept, rf"^([^.]*\.\d{{{target.scale}}})0+$", r"\1")
    return Cast(short.cast(target), unfit)


def _fitting(target: pa.Decimal128Type) -> str:
    whole = target.precision - target.scale
    digits = rf"(?:0|[1-9]\d{{0,{whole - 1}}})" if whole else "0"
    return rf"^-?{digits}(?:\.\d{{0,{target.scale}}}0*)?$"


def _cast_time(text: pa.StringArray, of: PgType) -> Cast:
    return _within_years(*_cast_or_outside(text, of))


def _cast_or_outside(text: pa.StringArray, of: PgType) -> tuple[pa.Array, Bools | None]:
    target = arrow_type(of)
    try:
        return text.cast(target), None
    except pa.ArrowInvalid:
        unfit = _matching(text, _OUTSIDE[of.oid])
    kept = _without(text, unfit)
    if of.oid == _TIMESTAMPTZ:
        return _cast_odd_zones(kept), unfit
    return kept.cast(target), unfit


def _cast_odd_zones(text: pa.StringArray) -> pa.Array:
    """Casts timestamptz texts, some of which have a UTC offset with seconds. Cuts off these seconds, casts the texts,
    and corrects the result by the seconds."""
    odd = _matching(text, _ZONE_SECONDS)
    to_minutes = pc.replace_substring_regex(text, r"^(.*[+-]\d\d:\d\d):[0-5]\d$", r"\1")
    values = to_minutes.cast(_SCALARS[_TIMESTAMPTZ])
    part = pc.extract_regex(text.filter(pa.array(odd)), _ZONE_SECONDS)
    shift = np.zeros(len(text), "m8[us]")
    seconds = np.asarray(pc.struct_field(part, "seconds").cast(pa.int64()))
    east = np.asarray(pc.equal(pc.struct_field(part, "sign"), "+"))
    shift[odd] = np.where(east, seconds, -seconds) * np.timedelta64(1_000_000, "us")
    return pc.subtract(values, pa.array(shift))


def _within_years(values: pa.Array, unfit: Bools | None) -> Cast:
    """Replaces values outside of the years 0001 to 9999 (in UTC) with NULL, and marks them as unfit. Because of its UTC
    offset, a value can be outside even if the year in its text is inside."""
    numbers = values.view(pa.int32() if pa.types.is_date(values.type) else pa.int64())
    first, last = _SPAN[numbers.type]
    seen = pc.min_max(numbers).as_py()
    if seen["min"] is None or (seen["min"] >= first and seen["max"] <= last):
        return Cast(values, unfit)
    outside = np.asarray(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)).fill_null(False))
    return Cast(_without(values, outside), outside if unfit is None else unfit | outside)


def _cast_bytea(text: pa.StringArray, of: PgType) -> Cast:
    octets, offsets = laid_out(text)
    valid = np.asarray(text.is_valid())
    _require(not (offsets & 1).any())
    pairs = octets.reshape(-1, 2)
    high, low = _NIBBLES[pairs[:, 0]], _NIBBLES[pairs[:, 1]]
    # Each value begins with ``\x``, which is also a pair of bytes. All other pairs must be hexadecimal.
    starts, ends = offsets[:-1] >> 1, offsets[1:] >> 1
    marks = starts[valid]
    _require(np.array_equal(np.flatnonzero((high | low) > 15), marks))
    _require(bool((pairs[marks] == np.frombuffer(rb"\x", np.uint8)).all()))
    return Cast(gathered(high << 4 | low, starts + valid, ends, valid), None)


def _cast_array(text: pa.StringArray, of: PgType) -> Cast:
    unfit = not_plain(text)
    plain = _without(text, unfit)
    found = elements(plain, of.delimiter)
    inner = cast(found.text, _element(of))
    if inner.unfit is not None and inner.unfit.any():
        # If one element does not fit, the whole array does not fit. Such arrays become NULL, and the column is cast
        # again.
        rows = np.searchsorted(found.offsets, np.flatnonzero(inner.unfit), side="right") - 1
        unfit[rows] = True
        return Cast(_cast_array(_without(text, unfit), of).values, unfit)
    missing = pa.array(np.asarray(plain.is_null()))
    lists = pa.ListArray.from_arrays(pa.array(found.offsets), inner.values, type=arrow_type(of), mask=missing)
    return Cast(lists, unfit if unfit.any() else None)


def _matching(text: pa.StringArray, pattern: str) -> Bools:
    return np.asarray(pc.match_substring_regex(text, pattern).fill_null(False))


def _without(values: pa.Array, rows: Bools) -> pa.Array:
    return pc.if_else(pa.array(~rows), values, pa.scalar(None, values.type)) if rows.any() else values


def _require(sound: bool) -> None:
    if not sound:
        raise ProtocolError("a value is not valid for its type")


_NIBBLES: Final = np.full(256, 0xFF, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdefABCDEF", np.uint8)] = [*range(16), *range(10, 16)]

_CASTS: Final = {
    _BOOL: _cast_bool,
    _BYTEA: _cast_bytea,
    _NUMERIC: _cast_numeric,
    _DATE: _cast_time,
    _TIMESTAMP: _cast_time,
    _TIMESTAMPTZ: _cast_time,
}
