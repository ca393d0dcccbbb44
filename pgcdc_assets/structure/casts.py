"""Lists the changes of a column's type after which all values keep the text that PostgreSQL writes for them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.protocol.text.types import arrow_type

_TEXTS: Final = frozenset({25, 1043})
"""text and varchar, which are written alike. bpchar is not: it is written with its blanks."""


def keeps_text(was: PgType, is_: PgType) -> bool:
    """Whether a value of the one type reads as the other one's, if PostgreSQL did not rewrite the table for it.

    Types that are binary coercible are not all written alike (int4 -1 is oid 4294967295), so only these are: a type
    under another typmod, whose bytes and so whose text stay; text and varchar; a domain and its base.
    """
    before, after = _stored(was), _stored(is_)
    alike = before.oid == after.oid or {before.oid, after.oid} <= _TEXTS
    return alike and holds(arrow_type(before), arrow_type(after))


def holds(was: pa.DataType, is_: pa.DataType) -> bool:
    """Whether each value of the mirror's column also fits the other type, and reads as the same value."""
    if was == is_:
        return True
    decimals = isinstance(was, pa.Decimal128Type) and isinstance(is_, pa.Decimal128Type)
    return decimals and bool(was.scale == is_.scale and was.precision <= is_.precision)


def _stored(of: PgType) -> PgType:
    while of.base is not None:
        of = of.base
    return of
