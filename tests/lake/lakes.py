"""A lake with all that makes a mirror hard to read, written without PostgreSQL and Spark: deletion vectors, a renamed
column, a widened type, rows without a new column, NaN, values at both ends of the calendar, names that need quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from pyroaring import BitMap64

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, commit_change, commit_files
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.definition import commit_columns, create_table
from pgcdc_assets.delta.mapping import Columns, physical, stated
from pgcdc_assets.mirror.delta.mirror import IDENTITY, PROPERTIES
from pgcdc_assets.points.points import ConsistentPoints
from tests.delta.rows import OWNER
from tests.deltatables import opened

ORDERS, ODD = TableName("public", "orders"), TableName("Odd Schema", 'Order "Lines"')
_RAW: Final = pa.field("_pgcdc_raw", pa.map_(pa.string(), pa.string()))
BEFORE: Final = pa.schema([
    ("id", pa.int64()), ("name", pa.string()), ("amount", pa.decimal128(10, 2)), ("at", pa.timestamp("us", "UTC")),
    ("x", pa.float64()), _RAW,
])  # fmt: skip
AFTER: Final = pa.schema([
    ("id", pa.int64()), ("full name", pa.string()), ("amount", pa.decimal128(20, 2)), ("at", pa.timestamp("us", "UTC")),
    ("x", pa.float64()), ("tags", pa.list_(pa.int32())), _RAW,
])  # fmt: skip
FIRST = datetime.fromisoformat("0001-01-01 00:00:00+00:00")
LAST = datetime.fromisoformat("9999-12-31 23:59:59.999999+00:00")
LARGE: Final = Decimal("123456789012345678.25")
A, B = Lsn(0x100), Lsn(0x200)
"""The LSNs of the two points. Between them, column ``name`` is renamed to ``full name``, ``amount`` gets ten more
digits, and ``tags`` is added."""


def _row(number: int, at: datetime = FIRST, x: float | None = 1.5, amount: str = "1.50") -> dict[str, Any]:
    return {"id": number, "name": f"name {number}", "amount": Decimal(amount), "at": at, "x": x, "_pgcdc_raw": None}


ROWS_A: Final = [
    _row(1), _row(2, x=float("nan")), _row(3, LAST, None), _row(4, amount="-2.25") | {"name": None}, _row(5),
]  # fmt: skip
ROWS_B: Final = [
    *({"full name" if name == "name" else name: value for name, value in row.items()} | {"tags": None}
      for row in ROWS_A if row["id"] not in (1, 5)),
    {"id": 6, "full name": None, "amount": LARGE, "at": LAST, "x": float("inf"), "tags": [1, None],
     "_pgcdc_raw": [("at", "infinity")]},
]  # fmt: skip


def made(root: Location) -> Layout:
    """Makes the lake. At A, ``orders`` has five rows in two row groups. At B, rows 1 and 5 are deleted and row 6 is
    new."""
    layout, points = Layout.of(root), ConsistentPoints(Layout.of(root))
    orders, odd = layout.mirror(ORDERS), layout.mirror(ODD)
    for folder, schema in ((orders, BEFORE), (odd, pa.schema([("id", pa.int64()), ("select", pa.string()), _RAW]))):
        properties = {**PROPERTIES, IDENTITY: OWNER.app_id()}
        create_table(folder, Columns.of(schema, mapped=False), properties, {}, layout.root)
    first = written(orders, BEFORE, ROWS_A[:2], ROWS_A[2:])
    commit_files(opened(orders), [first], "append", _copied(ORDERS))
    line = written(odd, opened(odd).columns, [{"id": 1, "select": "only", "_pgcdc_raw": None}])
    commit_files(opened(odd), [line], "append", _copied(ODD))
    _publish(points, layout, A, {ORDERS: A, ODD: A})
    commit_change(opened(orders), FileChange([], {first.path: BitMap64([0, 4])}), {}, {})
    held = {"full name": "name", **{name: name for name in ("id", "amount", "at", "x", "_pgcdc_raw")}}
    commit_columns(opened(orders), stated(opened(orders).metadata).followed_by(AFTER, held, mapped=True))
    second = written(orders, AFTER, ROWS_B[-1:])
    commit_change(opened(orders), FileChange([second], {}), {OWNER.app_id(f"{A:X}"): B}, {})
    _publish(points, layout, B, {ORDERS: B, ODD: A})
    return layout


def written_tables(root: Location, tables: Mapping[TableName, pa.Table], deleted: Sequence[int] = ()) -> Layout:
    """A lake with one point. A deletion vector deletes the rows with the numbers ``deleted`` from the first table."""
    layout = Layout.of(root)
    for number, (name, rows) in enumerate(tables.items()):
        folder, schema = layout.mirror(name), rows.schema.append(_RAW)
        create_table(folder, Columns.of(schema, mapped=False), {**PROPERTIES, IDENTITY: OWNER.app_id()}, {}, root)
        report = written(folder, schema, rows.to_pylist())
        commit_files(opened(folder), [report], "append", _copied(name))
        if deleted and not number:
            commit_change(opened(folder), FileChange([], {report.path: BitMap64(deleted)}), {}, {})
    _publish(ConsistentPoints(layout), layout, A, dict.fromkeys(tables, A))
    return layout


def written(folder: Location, schema: pa.Schema, *groups: list[dict[str, Any]]) -> FileReport:
    """A data file with these row groups."""
    with DataFile(folder, physical(schema, opened(folder).schema)) as file:
        for group in groups:
            file.write(pa.Table.from_pylist(group, schema).columns)
        report = file.finish()
    assert report is not None
    return report


def _copied(name: TableName) -> dict[str, int]:
    return {OWNER.app_id("snapshot", name.folder): A}


def _publish(points: ConsistentPoints, layout: Layout, lsn: Lsn, positions: Mapping[TableName, Lsn]) -> None:
    points.publish(lsn, {name: opened(layout.mirror(name)).number for name in positions}, positions)
