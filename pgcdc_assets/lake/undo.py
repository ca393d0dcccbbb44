"""Writes the SQL that reverts changes on the source: the changes between two points, of all rows or of one row, or the
changes of one transaction.

The SQL is one DO block, so it reverts everything or nothing. The WHERE clause of each statement contains all values
that the row had at the later point. If the row has other values now, the statement finds no row, and the block fails.

PostgreSQL reads the names and values of a mirror, as this module writes them, as exactly the same names and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName, quoted
from pgcdc_assets.errors import LakeError, UsageError
from pgcdc_assets.feed.schema import COMMIT_LSN, OP, POSTIMAGE, RAW, TRUNCATE, XID, FeedColumn, feed_columns
from pgcdc_assets.lake.netchange import DELETE, INSERT, UPDATE, has_columns_of, net_change, structure_of
from pgcdc_assets.lake.tableat import TableAt, key_scalar, keyed
from pgcdc_assets.mirror.net.neteffect import key_numbers


def undo_range(earlier: TableAt, later: TableAt, key: Mapping[str, Any] | Any = None) -> str:
    """SQL that changes the table, or only the row with this key, from its state at ``later`` back to its state at
    ``earlier``. Raises LakeError if rows differ, and the table has other columns, or other names for them, now."""
    wanted = None if key is None else keyed(later.table, key)
    change = net_change(later.mirror, earlier.mirror, later.table)
    if not change.num_rows:
        return ""
    _refuse_other_columns(earlier, later)
    if wanted is not None:
        change = _with_key(change, wanted)
    return reversal(change, later.table)


def commit_of(at: TableAt, xid: int) -> Lsn:
    """The ``commit_lsn`` of the transaction with this xid. Raises LakeError unless the table's feed contains changes of
    exactly one such transaction. ``xid``: 32 bits, or 64 bits as pg_current_xact_id() returns it. Only the lower 32
    bits are compared, because the stream does not send the upper bits (the epoch)."""
    if type(xid) is not int:
        raise UsageError(f"the xid {xid!r} is not an integer")
    only = pc.field(XID) == xid & 0xFFFFFFFF
    found = {lsn for rows in at.feed.rows(at.feed.covered, only) for lsn in rows[COMMIT_LSN].to_pylist()}
    if len(found) != 1:
        what = "contains no transaction" if not found else "contains several transactions"
        raise LakeError(f"{what} with the xid {xid}", thing=f"change feed of {at.name}",
                        do="give the `commit_lsn` of the transaction instead")  # fmt: skip
    return Lsn(found.pop())


def undo_transaction(earlier: TableAt, later: TableAt, commit_lsn: Lsn) -> str:
    """SQL that changes the rows of one transaction back to their state at ``earlier``. ``earlier`` and ``later`` are
    the nearest points before and after the transaction. Raises LakeError if other transactions between these points
    changed the same rows, if the mirror has lost such rows with a partition, or if the table has other columns now."""
    feed, table = later.feed, later.table
    feed.require(earlier.point.replay_lsn)
    parts = list(feed.rows(LsnRange(earlier.point.replay_lsn, later.point.replay_lsn)))
    if not any(pc.any(pc.equal(part[COMMIT_LSN], int(commit_lsn))).as_py() for part in parts):
        raise LakeError(
            "contains no change of the transaction to undo", thing=f"change feed of {later.name}", lsn=commit_lsn
        )
    rows = pa.concat_tables(parts)
    mine = pc.equal(rows[COMMIT_LSN], int(commit_lsn))
    own, others = rows.filter(mine), rows.filter(pc.invert(mine))
    change = net_change(later.mirror, earlier.mirror, table)
    _refuse_other_columns(earlier, later)
    same = structure_of(earlier.mirror) == structure_of(later.mirror)
    columns = [column for column in feed_columns(table) if column.key]
    if columns and not pc.any(pc.equal(rows[OP], TRUNCATE)).as_py():
        keys = [_keys(side, columns) for side in (own, others)]
        # Rows may also differ without a transaction: the mirror loses the rows of a detached partition.
        change = change.filter(pa.array(_among(_images_keys(change, columns), keys[0], columns)))
        alone = not (_among(keys[0], keys[1], columns).any() or _lost(change, own, columns, same_structure=same))
    else:
        alone = same and not others.num_rows
    if not alone:
        raise LakeError(
            "other transactions changed the same rows as the one to undo, or partitions were removed, and no "
            "consistent point separates them: "
            f"the nearest points are {earlier.point.replay_lsn} and {later.point.replay_lsn}",
            thing=f"table {later.name}", lsn=commit_lsn, do="undo the range between these points instead",
        )  # fmt: skip
    return reversal(change, table)


def _refuse_other_columns(earlier: TableAt, later: TableAt) -> None:
    table = later.table
    if not all(has_columns_of(table, at.mirror) for at in (earlier, later)):
        raise LakeError("does not have the same columns now as at these points, so its rows cannot be written back",
                        thing=f"table {table.name}")  # fmt: skip


def _lost(change: pa.Table, own: pa.Table, columns: list[FeedColumn], *, same_structure: bool) -> bool:
    """Whether the later point lacks a row that the transaction wrote, although the feed has no later change of the row.
    ``own``: the transaction's changes, in order. ``same_structure``: whether both points have the same structure.
    Otherwise, a key that the transaction wrote and that does not differ between the points counts as lost: perhaps
    neither point has its row."""
    keys = _keys(own, columns)
    number = key_numbers(keys, columns)
    last = np.zeros(int(number.max()) + 1, dtype=np.int64)
    last[number] = np.arange(len(number))
    written = keys.take(last).filter(pc.is_in(own[OP].take(last), pa.array([INSERT, POSTIMAGE])))
    missing = change.filter(pc.equal(change["kind"], INSERT))
    if _among(_images_keys(missing, columns), written, columns).any():
        return True
    return not (same_structure or _among(written, _images_keys(change, columns), columns).all())


def _with_key(change: pa.Table, key: Mapping[str, Any]) -> pa.Table:
    kept = pa.array(np.ones(change.num_rows, dtype=bool))
    for name, value in key.items():
        values = _image_values(change, name)
        kept = pc.and_(kept, pc.fill_null(pc.equal(values, key_scalar(name, value, values.type)), False))
    return change.filter(kept)


def _image_values(change: pa.Table, name: str) -> pa.ChunkedArray:
    before, after = (pc.struct_field(change[side], name) for side in ("before", "after"))
    return pc.if_else(change["before"].is_valid(), before, after)


def _keys(rows: pa.Table, columns: list[FeedColumn]) -> pa.Table:
    return rows.select([*(column.name for column in columns), RAW])


def _images_keys(change: pa.Table, columns: list[FeedColumn]) -> pa.Table:
    """The keys of a net change, under the names of the feed."""
    named = {column.name: _image_values(change, column.source) for column in columns}
    return pa.table({**named, RAW: _image_values(change, RAW)})


def _among(rows: pa.Table, others: pa.Table, columns: list[FeedColumn]) -> Any:
    """For each row, whether ``others`` contains a row with the same key."""
    number = key_numbers(pa.concat_tables([rows, others.cast(rows.schema)]), columns)
    return np.isin(number[: rows.num_rows], number[rows.num_rows :])


_ORDER: Final = (DELETE, UPDATE, INSERT)
"""The order of the statements. Rows are deleted first and inserted last, because a row to insert may have the unique
value of a row to delete."""
_BLOCK: Final = """DO {tag}
#variable_conflict use_column
DECLARE
  _pgcdc_rows bigint;
BEGIN
{body}
END {tag};
"""
_CHECK: Final = """  GET DIAGNOSTICS _pgcdc_rows = ROW_COUNT;
  IF _pgcdc_rows <> 1 THEN RAISE EXCEPTION USING MESSAGE = {message}; END IF;"""
_COLUMNS: Final = """  IF EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attrelid = {table}::pg_catalog.regclass
             AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
             AND attname <> ALL (ARRAY[{names}]::pg_catalog.name[])) THEN
    RAISE EXCEPTION USING MESSAGE = {message};
  END IF;"""


def reversal(change: pa.Table, table: Table) -> str:
    """The SQL that carries out ``change``, which is the net change from the later point to the earlier point. Empty if
    ``change`` is empty."""
    if not change.num_rows:
        return ""
    writer = _Writer(table, {field.name: field.type for field in change.schema.field("before").type})
    rows = sorted(change.to_pylist(), key=lambda row: _ORDER.index(row["kind"]))
    parts = [
        f"  PERFORM pg_catalog.set_config({literal(name)}, {literal(value)}, true);" for name, value in SESSION.items()
    ]
    if any(row["kind"] == INSERT for row in rows):
        parts.append(writer.no_other_columns())
    for number, row in enumerate(rows, 1):
        statement = writer.statement(row["kind"], row["before"], row["after"])
        message = f"statement {number} of {len(rows)}: a row of {table.name} was changed again; nothing was undone"
        parts.append(f"  {statement};\n{_CHECK.format(message=literal(message))}")
    body = "\n".join(parts)
    number = 0
    while (tag := f"$undo{number or ''}$") in body:
        number += 1
    return _BLOCK.format(tag=tag, body=body)


@dataclass(frozen=True)
class _Writer:
    table: Table
    kinds: Mapping[str, pa.DataType]

    @cached_property
    def name(self) -> str:
        return table_identifier(self.table.name)

    @cached_property
    def columns(self) -> list[Column]:
        """The columns that a statement may set. PostgreSQL computes generated columns itself."""
        return [column for column in self.table.columns if not column.generated]

    def statement(self, kind: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
        if kind == UPDATE:
            old, new = dict(self._texts(before)), dict(self._texts(after))
            changed = [f"{quoted(name)} = {literal(text)}" for name, text in new.items() if text != old[name]]
            if not changed:
                raise LakeError(
                    "has a row that differs only in generated columns, which UPDATE cannot set",
                    thing=f"table {self.table.name}",
                )
            return " ".join(("UPDATE", self.name, "SET", ", ".join(changed), "WHERE", self._found(before)))
        if kind == INSERT:
            texts = dict(self._texts(after))
            names, values = ", ".join(map(quoted, texts)), ", ".join(map(literal, texts.values()))
            unless = f" WHERE NOT EXISTS ({self._rows(self._key(after))})" if self.table.key else ""
            return f"INSERT INTO {self.name} ({names}) OVERRIDING SYSTEM VALUE SELECT {values}{unless}"
        where = self._found(before)
        if not self.table.key:
            where = f"(tableoid, ctid) = ({self._rows(where, 'tableoid, ctid')} LIMIT 1)"
        return " ".join(("DELETE FROM", self.name, "WHERE", where))

    def _rows(self, where: str, columns: str = "") -> str:
        return " ".join((f"SELECT {columns}".rstrip(), "FROM", self.name, "WHERE", where))

    def no_other_columns(self) -> str:
        """SQL that fails if the table has columns that the mirror lacks, because they are not published. The values of
        these columns are not known, so a deleted row cannot be inserted again with all its values."""
        names = ", ".join(literal(column.name) for column in self.table.columns)
        message = (
            f"{self.table.name} has columns that its mirror lacks, so no row can be inserted again; nothing was undone"
        )
        return _COLUMNS.format(table=literal(self.name), names=names, message=literal(message))

    def _texts(self, image: Mapping[str, Any] | None) -> Iterator[tuple[str, str | None]]:
        for column in self.columns:
            yield column.name, self._text(column, image)[0]

    def _text(self, column: Column, image: Mapping[str, Any] | None) -> tuple[str | None, pa.DataType]:
        """A column's value as text, and the Arrow type that decides how it is compared."""
        assert image is not None
        raw = dict(image[RAW] or ())
        if column.name in raw:
            return raw[column.name], pa.string()
        return value_text(image[column.name], column.type), self.kinds[column.name]

    def _found(self, image: Mapping[str, Any] | None) -> str:
        return " AND ".join(self._equals(column, image) for column in self.columns)

    def _key(self, image: Mapping[str, Any] | None) -> str:
        return " AND ".join(self._equals(column, image) for column in self.table.key_columns)

    def _equals(self, column: Column, image: Mapping[str, Any] | None) -> str:
        # PostgreSQL cannot compare a composite value with a literal.
        indexed = column.attnum in self.table.key and column.type.stored.family != "c"
        return equals(column.name, *self._text(column, image), indexed=indexed)


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


def value_text(value: Any, of: PgType) -> str | None:
    """A mirror's value as text that the type's input function reads as the same value. If the mirror stores the type as
    text, the result is also exactly the text that the type's output function writes. The same holds for arrays of such
    a type."""
    of = of.stored
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
