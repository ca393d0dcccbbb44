"""Makes tables whose catalog marks are written as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pgcdc_assets.core.catalog import Leaf, Table
from pgcdc_assets.core.marks import Files, Marks, TableMarks
from pgcdc_assets.core.names import TableName


def parsed(text: str) -> Marks:
    """Marks of columns from a text such as ``1:7 2:7``, with the attnum and xmin of each column."""
    return tuple((int(number), int(xmin)) for number, xmin in (mark.split(":") for mark in text.split()))


def marks(
    columns: str = "", *, relfilenode: int = 0, traceless: bool = False, publications: str = "", key_constraint: int = 0
) -> TableMarks:
    return TableMarks(Files(relfilenode, 0, traceless), key_constraint, parsed(publications), (), parsed(columns))


def remarked(table: Table, columns: str | None = None, *, relfilenode: int | None = None, **others: Any) -> Table:
    """The table with different marks."""
    files = table.marks.files if relfilenode is None else replace(table.marks.files, relfilenode=relfilenode)
    rows = table.marks.columns if columns is None else parsed(columns)
    return replace(table, marks=replace(table.marks, files=files, columns=rows, **others))


def leaf(
    oid: int,
    name: TableName,
    relfilenode: int,
    attached: str = "",
    numbering: tuple[tuple[int, int], ...] | None = None,
) -> Leaf:
    return Leaf(oid, name, Files(relfilenode), parsed(attached), numbering)
