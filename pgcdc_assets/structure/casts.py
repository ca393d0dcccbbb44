"""Decides after which changes of a column's type all values keep the text that PostgreSQL writes for them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.protocol.text.types import arrow_type

_TEXTS: Final = frozenset({25, 1043})
"""The types text and varchar: a value has the same text in both. In bpchar, the text includes the padding blanks."""


def keeps_text(was: PgType, is_: PgType) -> bool:
    """Whether values of type ``was`` keep their text under type ``is_``, if PostgreSQL did not rewrite the table for
    the change. Binary coercible types may differ in their text (int4 -1 is oid 4294967295). So this is true only for a
    new typmod, which keeps bytes and text, and between text and varchar, or a domain and its base type."""
    before, after = _stored(was), _stored(is_)
    alike = before.oid == after.oid or {before.oid, after.oid} <= _TEXTS
    return alike and holds(arrow_type(before), arrow_type(after))


def holds(was: pa.DataType, is_: pa.DataType) -> bool:
    """Whether each value of a mirror's column of type ``was`` fits type ``is_``, and reads as the same value there."""
    if was == is_:
        return True
    decimals = isinstance(was, pa.Decimal128Type) and isinstance(is_, pa.Decimal128Type)
    return decimals and bool(was.scale == is_.scale and was.precision <= is_.precision)


def _stored(of: PgType) -> PgType:
    while of.base is not None:
        of = of.base
    return of
