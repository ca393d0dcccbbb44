"""A table with a column of every type, and its mirror. Both are written by hand, without the project's codec."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from pgcdc_assets.checks.report import TableReport, VerifyReport
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import connect
from tests.checks import mirrors

OWN = [
    pa.field("_pgcdc_commit_lsn", pa.int64()),
    pa.field("_pgcdc_commit_ts", pa.timestamp("us", "UTC")),
    pa.field("_pgcdc_raw", pa.map_(pa.string(), pa.string())),
]


@dataclass(frozen=True)
class Value:
    """An SQL literal, its value in the mirror, and its text in ``_pgcdc_raw`` if the mirror's type cannot hold it."""

    sql: str
    mirror: Any = None
    raw: str | None = None


@dataclass(frozen=True)
class Kind:
    """One column: its SQL type, its type in the mirror, its values, and one more value of the mirror's type that
    differs from these values."""

    declared: str
    type: pa.DataType
    values: tuple[Value, ...]
    other: Any


def _utc(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=dt.UTC)  # type: ignore[arg-type, misc]


_V = Value
_INFINITIES = (_V("'infinity'", raw="infinity"), _V("'-infinity'", raw="-infinity"))
_LONG = "Ω" * 300_000

KINDS: Mapping[str, Kind] = {
    "b": Kind("bool", pa.bool_(), (_V("true", True), _V("false", False)), None),
    "i2": Kind("int2", pa.int16(), (_V("-32768", -32768), _V("32767", 32767)), 5),
    "i4": Kind("int4", pa.int32(), (_V("-2147483648", -(2**31)), _V("0", 0)), 5),
    "i8": Kind("int8", pa.int64(), (_V("-9223372036854775808", -(2**63)), _V("9223372036854775807", 2**63 - 1)), 5),
    "f4": Kind(
        "float4",
        pa.float32(),
        (
            _V("'NaN'", float("nan")),
            _V("'-Infinity'", float("-inf")),
            _V("'-0'", -0.0),
            _V("'1e-45'", 1e-45),
            _V("'3.4028235e38'", 3.4028234663852886e38),
            _V("'0.1'", 0.1),
        ),
        0.10000001,
    ),
    "f8": Kind(
        "float8",
        pa.float64(),
        (
            _V("'NaN'", float("nan")),
            _V("'Infinity'", float("inf")),
            _V("'-0'", -0.0),
            _V("'5e-324'", 5e-324),
            _V("'1.7976931348623157e308'", 1.7976931348623157e308),
            _V("'0.1'", 0.1),
            _V("'9007199254740993'", 9007199254740992.0),
        ),
        0.10000000000000002,
    ),
    "n": Kind(
        "numeric(20,9)",
        pa.decimal128(20, 9),
        (
            _V("0.000000001", Decimal("0.000000001")),
            _V("-99999999999.999999999", Decimal("-99999999999.999999999")),
            _V("0", Decimal("0")),
            _V("'NaN'", raw="NaN"),
        ),
        Decimal("0.000000002"),
    ),
    "n38": Kind("numeric(38,0)", pa.decimal128(38, 0), (_V("9" * 38, Decimal("9" * 38)),), Decimal("9" * 37)),
    "nneg": Kind("numeric(3,-2)", pa.decimal128(5, 0), (_V("12345", Decimal("12300")),), Decimal("12400")),
    "nsmall": Kind("numeric(2,5)", pa.decimal128(5, 5), (_V("-0.00012", Decimal("-0.00012")),), Decimal("0.00012")),
    "nx": Kind(
        "numeric", pa.string(), (_V("1.500", "1.500"), _V("'NaN'", "NaN"), _V("'-Infinity'", "-Infinity")), "1.5"
    ),
    "d": Kind(
        "date",
        pa.date32(),
        (
            _V("'0001-01-01'", dt.date(1, 1, 1)),
            _V("'9999-12-31'", dt.date(9999, 12, 31)),
            _V("'0001-12-31 BC'", raw="0001-12-31 BC"),
            _V("'10000-01-01'", raw="10000-01-01"),
            *_INFINITIES,
        ),
        dt.date(1, 1, 2),
    ),
    "ts": Kind(
        "timestamp",
        pa.timestamp("us"),
        (
            _V("'0001-01-01 00:00:00'", dt.datetime(1, 1, 1)),
            _V("'9999-12-31 23:59:59.999999'", dt.datetime(9999, 12, 31, 23, 59, 59, 999999)),
            _V("'1969-12-31 23:59:59.999999'", dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
            _V("'0044-03-15 12:00:00 BC'", raw="0044-03-15 12:00:00 BC"),
            _V("'10000-01-01 00:00:00'", raw="10000-01-01 00:00:00"),
            *_INFINITIES,
        ),
        dt.datetime(1, 1, 1, 0, 0, 0, 1),
    ),
    "tz": Kind(
        "timestamptz",
        pa.timestamp("us", "UTC"),
        (
            _V("'0001-01-01 00:00:00+00'", _utc(1, 1, 1)),
            _V("'9999-12-31 23:59:59.999999+00'", _utc(9999, 12, 31, 23, 59, 59, 999999)),
            _V("'0001-01-01 00:00:00+01'", raw="0001-12-31 23:00:00+00 BC"),
            _V("'9999-12-31 23:59:59-01'", raw="10000-01-01 00:59:59+00"),
            *_INFINITIES,
        ),
        _utc(1, 1, 1, 0, 0, 0, 1),
    ),
    "t": Kind(
        "text",
        pa.string(),
        (
            _V("''", ""),
            _V("'NULL'", "NULL"),
            _V("E'a,\"b\"\\r\\n\\\\~'", 'a,"b"\r\n\\~'),
            _V("'😀'", "😀"),
            _V(f"'{_LONG}'", _LONG),
        ),
        " ",
    ),
    "c": Kind("char(4)", pa.string(), (_V("'a'", "a   "), _V("''", "    ")), "a"),
    "u": Kind(
        "uuid", pa.string(), (_V("'A0EEBC999C0B4EF8BB6D6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),), ""
    ),
    "j": Kind("jsonb", pa.string(), (_V("""'{"b":1,"a":[null,"x"]}'""", '{"a": [null, "x"], "b": 1}'),), "{}"),
    "e": Kind('"Odd mood"', pa.string(), (_V("'so so'", "so so"), _V("''''", "'")), "so  so"),
    "y": Kind("bytea", pa.binary(), (_V("''", b""), _V(r"'\x00ff5c'", b"\x00\xff\\")), b"\x00\xff\\\x00"),
    "v": Kind("interval", pa.string(), (_V("'1 year -2 days 03:00'", "1 year -2 days +03:00:00"),), "1 year"),
    "r": Kind("int4range", pa.string(), (_V("'[1,5]'", "[1,6)"),), "[1,5]"),
    "dm": Kind("money_like", pa.decimal128(10, 2), (_V("1.50", Decimal("1.50")),), Decimal("1.51")),
    "k": Kind("pair", pa.string(), (_V("""(1, 'a "b"')""", '(1,"a ""b""")'),), "(1,a)"),
    "ai": Kind(
        "int4[]",
        pa.list_(pa.int32()),
        (
            _V("'{}'", []),
            _V("'{1,NULL,-3}'", [1, None, -3]),
            _V("'{{1,2},{3,4}}'", raw="{{1,2},{3,4}}"),
            _V("'[0:1]={1,2}'", raw="[0:1]={1,2}"),
        ),
        [1, None],
    ),
    "at": Kind(
        "text[]",
        pa.list_(pa.string()),
        (_V("ARRAY['', NULL, 'NULL', 'a,b', '~N', '\"']", ["", None, "NULL", "a,b", "~N", '"']), _V("ARRAY['']", [""])),
        [],
    ),
    "an": Kind(
        "numeric(12,8)[]",
        pa.list_(pa.decimal128(12, 8)),
        (_V("'{0.00000001,NULL}'", [Decimal("0.00000001"), None]), _V("'{1,NaN}'", raw="{1.00000000,NaN}")),
        [Decimal("0.00000001")],
    ),
    "af": Kind(
        "float8[]",
        pa.list_(pa.float64()),
        (_V("'{NaN,-0,NULL}'", [float("nan"), -0.0, None]),),
        [float("nan"), 0.0, None],
    ),
    "az": Kind(
        "timestamptz[]",
        pa.list_(pa.timestamp("us", "UTC")),
        (_V("'{2020-02-29 00:00+00}'", [_utc(2020, 2, 29)]), _V("'{infinity}'", raw="{infinity}")),
        [_utc(2020, 2, 28)],
    ),
    "ay": Kind("bytea[]", pa.list_(pa.binary()), (_V(r"""ARRAY['\x00'::bytea, '']""", [b"\x00", b""]),), [b"\x00"]),
    "ak": Kind("pair[]", pa.list_(pa.string()), (_V("ARRAY[(1,'a')::pair, NULL]", ["(1,a)", None]),), ["(1,a)"]),
    "aa": Kind(
        "steps[]",
        pa.list_(pa.list_(pa.decimal128(4, 1))),
        (
            _V("""'{"{1,NULL}",NULL,"{}"}'""", [[Decimal("1.0"), None], None, []]),
            _V("""'{"{NaN}"}'""", raw='{"{NaN}"}'),
        ),
        [[Decimal("1.0"), None], []],
    ),
    "ac": Kind("char(3)[]", pa.list_(pa.string()), (_V("'{a}'", ["a  "]),), ["a"]),
}

TYPES = """
CREATE TYPE "Odd mood" AS ENUM ('so so', '''');
CREATE DOMAIN money_like AS numeric(10,2);
CREATE DOMAIN steps AS numeric(4,1)[];
CREATE TYPE pair AS (x int, y text)
"""


def rows_of_kinds() -> list[tuple[int, dict[str, Value]]]:
    """Row n holds the n-th value of every column. The last row holds NULLs. Keys count from 1."""
    count = max(len(kind.values) for kind in KINDS.values())
    rows = [{name: kind.values[n] for name, kind in KINDS.items() if n < len(kind.values)} for n in range(count)]
    return list(enumerate([*rows, {}], start=1))


def source_script(table: str) -> str:
    """SQL that creates the table with a column of every type and fills it."""
    columns = ", ".join(f"{name} {kind.declared}" for name, kind in KINDS.items())
    script = [f"CREATE TABLE {table} (id int PRIMARY KEY, {columns})"]
    for key, row in rows_of_kinds():
        names = ", ".join(["id", *row])
        values = ", ".join([str(key), *(value.sql for value in row.values())])
        script.append(f"INSERT INTO {table} ({names}) VALUES ({values})")
    return ";\n".join(script)


def mirror_rows() -> list[dict[str, Any]]:
    """The same rows as :func:`rows_of_kinds`, as the mirror stores them."""
    rows = []
    for key, row in rows_of_kinds():
        raw = [(name, value.raw) for name, value in row.items() if value.raw is not None]
        values = {name: row[name].mirror if name in row else None for name in KINDS}
        rows.append({"id": key, **values, "_pgcdc_raw": raw or None})
    return rows


def mirror_schema(**kinds: pa.DataType) -> pa.Schema:
    return pa.schema([*(pa.field(name, kind) for name, kind in kinds.items()), *OWN])


def write_mirror(path: Path, schema: pa.Schema, rows: list[dict[str, Any]]) -> int:
    """Overwrites the mirror. Returns its new Delta version."""
    write_deltalake(
        str(path),
        pa.Table.from_pylist(rows, schema),
        mode="overwrite",
        configuration={"delta.checkpointInterval": "1000"},
    )
    return DeltaTable(str(path)).version()


Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    replay_lsn: Lsn
    tables: dict[TableName, int]


@dataclass
class Lake:
    """A source whose tables are published, and a lake whose mirrors the test writes."""

    conninfo: str
    root: Path

    def catalog(self) -> Catalog:
        with connect(self.conninfo) as conn:
            return Catalog(Identity("1", "d", "s"), "p", 0, read_tables(conn, ["p"]), ("p",))

    def write(self, table: str, schema: pa.Schema, rows: list[Row]) -> None:
        mirrors.write_mirror(self.path(table), schema, rows)

    def path(self, table: str) -> Path:
        return self.root / TableName.parse(table).folder

    def verify(self, *tables: str) -> VerifyReport:
        """Verifies against a point that lists every mirror at its newest version."""
        settings = Settings(source=self.conninfo, lake=self.root)
        names = [TableName.parse(table) for table in tables] or None
        written = [table.name for table in self.catalog().tables if (self.root / table.name.folder).exists()]
        versions = {name: self.version(str(name)) for name in written}
        return verify(settings, self.catalog(), names, lambda lsn: Point(lsn, versions))

    def version(self, table: str) -> int:
        return DeltaTable(str(self.path(table))).version()

    def only(self) -> TableReport:
        (report,) = self.verify().tables
        return report

    def script(self, script: str) -> None:
        """Runs SQL statements on the source, with ``public`` on the search path."""
        with connect(self.conninfo, options={"search_path": "public"}) as conn:
            conn.execute(script.encode())
