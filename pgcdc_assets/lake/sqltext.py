"""Writes names and values of a mirror as SQL that PostgreSQL reads as exactly the same names and values."""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.core.names import TableName, quoted
from pgcdc_assets.errors import LakeError

SESSION: Final = {
    "TimeZone": "UTC", "DateStyle": "ISO", "IntervalStyle": "postgres", "extra_float_digits": "1",
    "bytea_output": "hex", "lc_monetary": "C", "quote_all_identifiers": "off", "array_nulls": "on",
    "xmloption": "content",
}  # fmt: skip
"""The PostgreSQL settings with which the texts in a mirror were written. With these settings, PostgreSQL reads the
texts as the same values."""
_QUOTED: Final = r'["\\{{}}{} \t\n\r\v\f]'
"""Pattern for the characters because of which array_out writes an array element in quotes. ``{}`` is the delimiter."""


def table_identifier(name: TableName) -> str:
    return f"{quoted(name.schema)}.{quoted(name.name)}"


def literal(text: str | None) -> str:
    """A string constant, for any setting of standard_conforming_strings."""
    if text is None:
        return "NULL"
    doubled = text.replace("'", "''")
    return "E'" + doubled.replace("\\", "\\\\") + "'" if "\\" in text else f"'{doubled}'"


def stored_type(of: PgType) -> PgType:
    """The base type of a domain."""
    while of.base is not None:
        of = of.base
    return of


def value_text(value: Any, of: PgType) -> str | None:
    """A mirror's value as text that the type's input function reads as the same value. If the mirror stores the type as
    text, the result is also exactly the text that the type's output function writes. The same holds for arrays of such
    a type."""
    of = stored_type(of)
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return repr(value)
        case Decimal():
            return f"{value:f}"
        case bytes():
            return "\\x" + value.hex()
        case datetime():
            return value.isoformat(" ")
        case date():
            return value.isoformat()
        case list() if of.element is not None:
            inner, delimiter = of.element, of.element.delimiter
            return "{" + delimiter.join(_element(value_text(item, inner), delimiter) for item in value) + "}"
    raise LakeError("its values cannot be written as SQL", thing=f"type {of.name}")


def _element(text: str | None, delimiter: str) -> str:
    """An element as array_out writes it."""
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and not re.search(_QUOTED.format(delimiter), text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def equals(column: str, text: str | None, kind: pa.DataType, *, indexed: bool = False) -> str:
    """An SQL condition that is true exactly if the column has this value. ``kind``: the column's type in the mirror, or
    string if the value is from ``_pgcdc_raw``. ``indexed``: write the condition so that PostgreSQL can use an index on
    the column.

    A value that the mirror stores as text is compared as text. Some types have no operator for equality, and for some
    types this operator treats different values as equal.
    """
    name = quoted(column)
    if text is None:
        return f"pg_catalog.num_nulls({name}) = 1"
    if pa.types.is_floating(kind) and float(text) == 0:
        kind, text = pa.string(), "-0" if text.startswith("-") else "0"
    plain = f"{name} = {literal(text)}"
    if not pa.types.is_string(kind.value_type if pa.types.is_list(kind) else kind):
        return plain
    same = f"pg_catalog.format('%s', {name}) = {literal(text)} COLLATE pg_catalog.\"C\""
    written = f"pg_catalog.num_nulls({name}) = 0 AND {same}"
    return f"{plain} AND {written}" if indexed else written
