"""Reads values and messages of a real server: extreme values of each type, and the times and LSNs of a transaction."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import (
    Begin,
    Commit,
)
from pgcdc_assets.protocol.text.strings import elements, not_plain
from pgcdc_assets.protocol.text.types import cast
from pgcdc_assets.source.connect.connection import session_options
from tests.fix_postgres import Database
from tests.protocol.examples import (
    BOOL,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT8,
    MONEY,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    array,
    domain,
    numeric,
)

Connection = psycopg.Connection[Any]
PEEK = (
    "SELECT data FROM pg_logical_slot_peek_binary_changes('codec', NULL, NULL,"
    " 'proto_version', '1', 'publication_names', 'codec', 'messages', 'true')"
)


@pytest.fixture
def conn(database: Database) -> Iterator[Connection]:
    """A session with the settings of our own sessions. It can create tables in schema public."""
    with database.connect(options=session_options(search_path="public"), client_encoding="UTF8") as conn:
        yield conn


@pytest.fixture(scope="module")
def reader(server: EmbeddedServer) -> Iterator[Connection]:
    """A session with the settings of our own sessions, for tests that create nothing."""
    conninfo = server.conninfo_of("postgres")
    with psycopg.connect(conninfo, autocommit=True, options=session_options(), client_encoding="UTF8") as conn:
        yield conn


def stream(conn: Connection) -> list[bytes]:
    return [bytes(data) for (data,) in conn.execute(PEEK)]


def start(conn: Connection) -> None:
    conn.execute("CREATE PUBLICATION codec FOR ALL TABLES")
    conn.execute("SELECT pg_create_logical_replication_slot('codec', 'pgoutput')")


def printed(conn: Connection, expressions: list[str], type_: str) -> list[str]:
    """The texts of the values as COPY writes them. The stream has the same texts."""
    rows = ", ".join(f"({at}, {text}::{type_})" for at, text in enumerate(expressions))
    query = f"COPY (SELECT v FROM (VALUES {rows}) AS t (i, v) ORDER BY i) TO STDOUT (FORMAT csv, FORCE_QUOTE *)"
    with conn.cursor().copy(query.encode()) as copy:
        lines = [bytes(line).decode() for line in copy]
    return [line.rstrip("\n")[1:-1].replace('""', '"') for line in lines]


UNFIT = object()

EDGES: list[tuple[str, PgType, dict[str, Any]]] = [
    ("bool", BOOL, {"true": True, "false": False}),
    ("int2", INT2, {"'-32768'": -32768, "32767": 32767}),
    ("int8", INT8, {"'-9223372036854775808'": -(1 << 63), "9223372036854775807": (1 << 63) - 1}),
    ("float4", FLOAT4, {"'3.4028235e38'": 3.4028234663852886e38, "'1e-45'": 1.401298464324817e-45,
                        "0.1": 0.10000000149011612, "'-Infinity'": -math.inf}),
    ("float8", FLOAT8, {"'1.7976931348623157e308'": 1.7976931348623157e308, "'5e-324'": 5e-324, "0.1": 0.1,
                        "'Infinity'": math.inf, "'1e15'": 1e15, "'1e-5'": 1e-5,
                        "123456789012345680": 123456789012345680.0}),
    ("numeric(10,2)", numeric(10, 2), {"1.5": Decimal("1.50"), "'-99999999.99'": Decimal("-99999999.99"),
                                       "'NaN'": UNFIT, "0": Decimal(0), "'-0.001'": Decimal(0)}),
    ("numeric(38,38)", numeric(38, 38), {"0." + "9" * 38: Decimal("0." + "9" * 38), "'-1e-38'": Decimal("-1e-38")}),
    ("numeric(38,0)", numeric(38, 0), {"9" * 38: Decimal("9" * 38), "'-1e37'": Decimal(-(10**37))}),
    ("numeric(2,-3)", numeric(2, -3), {"99499": Decimal(99000), "'-1500'": Decimal(-2000), "0": Decimal(0)}),
    ("numeric(2,5)", numeric(2, 5), {"0.00099": Decimal("0.00099"), "0": Decimal(0)}),
    ("numeric", NUMERIC, {"'NaN'": "NaN", "'Infinity'": "Infinity", "1e100": "1" + "0" * 100, "1.50": "1.50"}),
    ("money", MONEY, {"'1234.5'": "$1,234.50"}),
    ("date", DATE, {"'0001-01-01'": date.min, "'9999-12-31'": date.max, "'10000-01-01'": UNFIT, "'infinity'": UNFIT,
                    "'-infinity'": UNFIT, "'0001-12-31 BC'": UNFIT, "'5874897-12-31'": UNFIT, "'4714-11-24 BC'": UNFIT,
                    "'1582-10-10'": date(1582, 10, 10), "'2000-02-29'": date(2000, 2, 29)}),
    ("timestamp", TIMESTAMP, {
        "'0001-01-01'": datetime.min, "'9999-12-31 23:59:59.999999'": datetime.max, "'infinity'": UNFIT,
        "'-infinity'": UNFIT, "'294276-12-31 23:59:59.999999'": UNFIT, "'0044-03-15 12:00 BC'": UNFIT,
        "'2024-02-29 24:00:00'": datetime(2024, 3, 1), "'2024-02-29 23:59:60'": datetime(2024, 3, 1),
        "'2024-02-29 12:00:00.000001'": datetime(2024, 2, 29, 12, 0, 0, 1),
        "'2024-02-29 12:00:00.100'": datetime(2024, 2, 29, 12, 0, 0, 100_000)}),
    ("timestamptz", TIMESTAMPTZ, {
        "'2024-02-29 12:00:00.5+05:45'": datetime(2024, 2, 29, 6, 15, 0, 500_000, UTC),
        "'1850-01-01 00:00:00 Asia/Kolkata'": datetime(1849, 12, 31, 18, 6, 32, tzinfo=UTC),
        "'9999-12-31 23:59:59.999999+00'": datetime.max.replace(tzinfo=UTC), "'9999-12-31 23:59:59-01'": UNFIT,
        "'0001-01-01 00:00:00+00'": datetime.min.replace(tzinfo=UTC), "'0001-01-01 00:00:00+01'": UNFIT,
        "'infinity'": UNFIT, "'-infinity'": UNFIT, "'4714-11-24 00:00:00+00 BC'": UNFIT}),
    ("time", TIME, {"'24:00:00'": "24:00:00", "'00:00:00.5'": "00:00:00.5"}),
    ("timetz", PgType(1266, "timetz"), {"'24:00:00+05:53:28'": "24:00:00+05:53:28"}),
    ("interval", PgType(1186, "interval"), {"'1 year -2 days 03:04:05.6'": "1 year -2 days +03:04:05.6"}),
    ("bytea", BYTEA, {r"'\x00ff5c22'": b'\0\xff\\"', "''": b""}),
    ("char(4)", PgType(1042, "bpchar", 8), {"'ab'": "ab  ", "''": "    "}),
    ("text", TEXT, {"''": "", "'NULL'": "NULL", "E'a\"\\\\é'": 'a"\\é'}),
    ("int8[]", array(INT8), {"'{}'": [], "'{1,NULL,-3}'": [1, None, -3], "'[0:1]={1,2}'": UNFIT, "'{{1},{2}}'": UNFIT,
                             "'[1:2]={1,2}'": [1, 2]}),
    ("bool[]", array(BOOL), {"ARRAY[true,NULL,false]": [True, None, False]}),
    ("bytea[]", array(BYTEA), {r"ARRAY['\x5c','\x','\x00ff'::bytea]": [b"\\", b"", b"\0\xff"]}),
    ("text[]", array(TEXT), {r"""ARRAY['','NULL','null',NULL,'a,b','{','"','\','\"',' x','é ü']""": [
        "", "NULL", "null", None, "a,b", "{", '"', "\\", '\\"', " x", "é ü"]}),
    ("numeric(5,2)[]", array(numeric(5, 2)), {"'{1.5,NULL}'": [Decimal("1.50"), None], "'{1,NaN}'": UNFIT}),
    ("timestamptz[]", array(TIMESTAMPTZ), {
        "ARRAY['2024-02-29 12:00+05:45',NULL]": [datetime(2024, 2, 29, 6, 15, tzinfo=UTC), None],
        "'{infinity}'": UNFIT}),
    ("date[]", array(DATE), {"'{2024-02-29,NULL}'": [date(2024, 2, 29), None], "'{0044-03-15 BC}'": UNFIT}),
    ("box[]", PgType(1020, "_box", element=PgType(603, "box"), delimiter=";"), {
        "'{(1,1),(0,0);(2,2),(1,1)}'": ["(1,1),(0,0)", "(2,2),(1,1)"]}),
    ("int4range[]", array(PgType(3904, "int4range", family="r")), {
        "ARRAY['[1,5)','empty'::int4range]": ["[1,5)", "empty"]}),
    ("jsonb[]", array(PgType(3802, "jsonb")), {"""ARRAY['{"a": [1, "b"]}'::jsonb]""": ['{"a": [1, "b"]}']}),
    ("int2vector", PgType(22, "int2vector", element=INT2), {"'1 2 3'": "1 2 3"}),
]  # fmt: skip


NEW_TYPES = {"numeric(2,-3)": 15, "numeric(2,5)": 15}


def _marks(type_: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.since(NEW_TYPES[type_], type_)] if type_ in NEW_TYPES else []


@pytest.mark.parametrize(
    ("type_", "of", "edges"), [pytest.param(*item, id=item[0], marks=_marks(item[0])) for item in EDGES]
)
def test_edge_values_are_read_as_the_server_prints_them(
    reader: Connection, type_: str, of: PgType, edges: dict[str, Any]
) -> None:
    texts = printed(reader, list(edges), type_)
    found = cast(pa.array(texts, pa.string()), of)
    unfit = [False] * len(texts) if found.unfit is None else found.unfit.tolist()
    values = [UNFIT if marked else value for value, marked in zip(found.values.to_pylist(), unfit, strict=True)]
    assert values == list(edges.values())
    for text, value in zip(texts, values, strict=True):
        assert cast(pa.array([text]), of).values.to_pylist() == [None if value is UNFIT else value]


def test_value_of_a_domain_over_a_domain_is_read_as_its_base_type(conn: Connection) -> None:
    conn.execute("CREATE DOMAIN amount AS numeric(10,2)")
    conn.execute("CREATE DOMAIN price AS amount CHECK (VALUE >= 0)")
    conn.execute("CREATE DOMAIN prices AS price[]")
    price = domain(domain(numeric(10, 2)))
    assert cast(pa.array(printed(conn, ["1.5"], "price")), price).values.to_pylist() == [Decimal("1.50")]
    found = cast(pa.array(printed(conn, ["ARRAY[1.5,NULL]"], "prices")), domain(array(price)))
    assert found.values.to_pylist() == [[Decimal("1.50"), None]]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/New_York", "Africa/Monrovia", "Asia/Kathmandu"])
def test_instants_do_not_depend_on_the_time_zone_of_the_session(server: EmbeddedServer, zone: str) -> None:
    options = session_options(TimeZone=zone)
    moments = [f"to_timestamp({seconds}.123456)" for seconds in range(-5_000_000_000, 5_000_000_000, 86_400_061)]
    exactly = [f"(extract(epoch from {moment}) * 1000000)::int8" for moment in moments]
    with psycopg.connect(server.conninfo_of("postgres"), options=options) as conn:
        texts, exact = printed(conn, moments, "timestamptz"), printed(conn, exactly, "text")
    found = cast(pa.array(texts), TIMESTAMPTZ)
    assert found.unfit is None or not found.unfit.any()
    assert found.values.cast(pa.int64()).to_pylist() == [int(text) for text in exact]


def test_text_array_written_by_the_server_is_split_into_elements(conn: Connection) -> None:
    draw = random.Random(20)
    letters = ['"', "\\", "{", "}", ",", " ", "\t", "\n", "N", "U", "L", "a", "é", "日", ";", "(", "[", "="]
    words = [None, "", "NULL", "null"]

    def one() -> str | None:
        return draw.choice(words) if draw.random() < 0.2 else "".join(draw.choices(letters, k=draw.randrange(6)))

    lists = [[one() for _ in range(draw.randrange(5))] for _ in range(2000)]
    conn.execute("CREATE TABLE lists (i int, v text[])")
    with conn.cursor() as cursor:
        cursor.executemany("INSERT INTO lists VALUES (%s, %s)", list(enumerate(lists)))
    texts = pa.array([text for (text,) in conn.execute("SELECT v::text FROM lists ORDER BY i")])
    assert not not_plain(texts).any()
    found = elements(texts)
    values = found.text.to_pylist()
    offsets = found.offsets.tolist()
    assert [values[offsets[i] : offsets[i + 1]] for i in range(len(lists))] == lists


def test_begin_and_commit_message_have_the_same_commit_lsn_and_time(conn: Connection) -> None:
    conn.execute("CREATE TABLE t (i int PRIMARY KEY)")
    start(conn)
    before = datetime.now(UTC)
    conn.execute("INSERT INTO t VALUES (1)")
    first, *_, last = (decode(payload) for payload in stream(conn))
    assert isinstance(first, Begin)
    assert isinstance(last, Commit)
    assert first.final_lsn == last.commit_lsn < last.end_lsn
    assert first.commit_ts == last.commit_ts
    at = datetime.fromtimestamp(first.commit_ts / 1e6, UTC)
    assert abs((at - before).total_seconds()) < 60
