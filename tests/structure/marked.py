"""Makes tables with catalog marks, which a test writes as text. Marks are the parts of catalog rows (relfilenode, xmin)
that show whether a table, a column or a publication was changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pgcdc_assets.core.catalog import Leaf, Table
from pgcdc_assets.core.marks import Files, Marks, TableMarks
from pgcdc_assets.core.names import TableName


def parsed(text: str) -> Marks:
    """Marks from a text such as ``1:7 2:7``: for each column its attnum, and the xmin of its catalog row."""
    return tuple((int(number), int(xmin)) for number, xmin in (mark.split(":") for mark in text.split()))


def marks(
    columns: str = "", *, relfilenode: int = 0, traceless: bool = False, publications: str = "", key_constraint: int = 0
) -> TableMarks:
    return TableMarks(Files(relfilenode, 0, traceless), key_constraint, parsed(publications), (), parsed(columns))


def remarked(table: Table, columns: str | None = None, *, relfilenode: int | None = None, **others: Any) -> Table:
    """The table with these marks. Marks that are not given stay unchanged."""
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
