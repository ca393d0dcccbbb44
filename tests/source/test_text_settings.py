"""No default setting of server, database, role or client environment changes the text form of a value. The test finds
the settings that could change a text: it tries values of every setting that a session may change."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.fix_postgres import TEST_SETTINGS, Database, fresh_database
from tests.servers import new_server

LOCALE: Final = "de_DE.UTF-8"
MAKE: Final = """
CREATE TABLE public.plain (id int PRIMARY KEY, v text);
CREATE TYPE public.plain_type AS (a money, b timestamptz, c float8);
CREATE FUNCTION public.plain_function(int) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE OPERATOR public.||| (FUNCTION = public.plain_function, RIGHTARG = int);
CREATE COLLATION public.plain_collation FROM "C";
CREATE TEXT SEARCH CONFIGURATION public.plain_config (COPY = pg_catalog.simple);
CREATE TEXT SEARCH DICTIONARY public.plain_dictionary (TEMPLATE = pg_catalog.simple);
"""
FILTER: Final = r"""
CREATE TABLE public.filtered (id int PRIMARY KEY, v text);
CREATE PUBLICATION filtered FOR TABLE public.filtered WHERE (id > 1 AND 'a\b' > E'\\');
"""
LISTS_SINCE: Final = 15
FILTERED: Final = "SELECT rowfilter FROM pg_publication_tables WHERE pubname = 'filtered'"
TIME: Final = "2024-02-29 13:14:15.123456+00"
VALUES: Final[Mapping[str, str]] = {
    "bool": "true", "bytea": r"\x00ff5c41", "char": "c", "name": "n", "int8": "-8", "int2": "2", "int2vector": "1 2",
    "int4": "4", "regproc": "public.plain_function", "text": "t", "oid": "1", "tid": "(1,2)", "xid": "3", "cid": "4",
    "oidvector": "1 2", "json": '{"a": 1.0}', "xml": "<a/>", "xid8": "5", "point": "(0.1,2)", "lseg": "(0.1,1),(2,3)",
    "path": "((0.1,1),(2,3))", "box": "(3,4),(0.1,2)", "polygon": "((0.1,1),(2,3))", "line": "{0.1,2,3}",
    "circle": "<(0.1,2),3>",
    "float4": "0.1", "float8": "0.30000000000000004", "money": "-1234567.89", "macaddr": "08:00:2b:01:02:03",
    "inet": "10.0.0.1/8", "cidr": "10.0.0.0/8", "macaddr8": "08:00:2b:01:02:03:04:05", "aclitem": "postgres=r/postgres",
    "bpchar": "b ", "varchar": "v", "date": "2024-02-29", "time": "13:14:15.5", "timestamp": TIME, "timestamptz": TIME,
    "interval": "-1 mons +2 days -03:04:05.6", "timetz": "13:14:15.5+05:45", "bit": "1", "varbit": "101",
    "numeric": "1234567.890", "refcursor": "r", "regprocedure": "public.plain_function(int)", "regoper": "public.|||",
    "regoperator": "public.|||(none,int)", "regclass": "public.plain", "regcollation": "public.plain_collation",
    "regtype": "public.plain_type", "regrole": "postgres", "regnamespace": "public", "regconfig": "public.plain_config",
    "regdictionary": "public.plain_dictionary", "uuid": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "pg_lsn": "1/2",
    "tsvector": "a:1A b", "tsquery": "a & !b", "jsonb": '{"a": 1.0, "b": "x"}', "jsonpath": "$.a[*]",
    "txid_snapshot": "1:3:2", "pg_snapshot": "1:3:2", "int4range": "[1,3)", "int8range": "[1,3)", "numrange": "[1.0,2]",
    "tsrange": f"[{TIME},)", "tstzrange": f"[{TIME},)", "daterange": "[2024-02-29,)", "int4multirange": "{[1,3)}",
    "int8multirange": "{[1,3)}", "nummultirange": "{[1.0,2]}", "tsmultirange": f"{{[{TIME},)}}",
    "tstzmultirange": f"{{[{TIME},)}}", "datemultirange": "{[2024-02-29,)}", "public.plain_type": f'(9.9,"{TIME}",0.1)',
    "money[]": "{1.5,-2}", "timestamptz[]": f'{{"{TIME}"}}',
}  # fmt: skip
WITHOUT_INPUT: Final = {
    "pg_node_tree", "gtsvector", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary",
    "pg_brin_minmax_multi_summary",
}  # fmt: skip
WORDS: Final[Mapping[str, list[str]]] = {
    "DateStyle": ["SQL, DMY", "German", "Postgres, MDY"],
    "TimeZone": ["Asia/Kathmandu"],
    "lc_monetary": [LOCALE],
    "lc_numeric": [LOCALE],
    "lc_time": [LOCALE],
    "lc_messages": [LOCALE],
    "search_path": ["public"],
    "timezone_abbreviations": ["Australia", "India"],
    "default_text_search_config": ["pg_catalog.german"],
}
"""Values to try for settings of type string."""
ELSEWHERE: Final = {"client_encoding", "role", "session_authorization"}
"""Settings that are not tried. ``client_encoding`` is set in each connection string. The other two settings do not
affect text forms."""
KNOWN: Final = {
    "DateStyle", "IntervalStyle", "TimeZone", "bytea_output", "extra_float_digits", "lc_monetary", "search_path",
    "quote_all_identifiers", "standard_conforming_strings",
}  # fmt: skip
"""Settings that are known to change the text of a value. The test must find exactly these settings."""


@pytest.fixture(scope="module")
def hostile(pg_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server whose default locale is German, which formats amounts of money differently."""
    if shutil.which("localedef") is None:
        pytest.skip("there is no localedef to make a locale with")
    locales = tmp_path_factory.mktemp("locales")
    done = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", str(locales / LOCALE)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("there is no source of the locale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCPATH", str(locales))
        settings = {**TEST_SETTINGS, "lc_monetary": LOCALE}
        with new_server(tmp_path_factory.mktemp("hostile") / "server", pg_version, settings=settings) as server:
            yield server


@pytest.fixture(scope="module")
def made(hostile: EmbeddedServer) -> Iterator[Database]:
    """A database with the table ``sample``. The table has one row, and a column for each value of VALUES whose type the
    server supports."""
    with fresh_database(hostile) as database:
        with connect(database.conninfo) as conn:
            conn.execute(MAKE)
            conn.execute("CREATE TABLE public.sample (id int)")
            conn.execute("INSERT INTO public.sample VALUES (1)")
            for name, text in VALUES.items():
                kind = '"char"' if name == "char" else name
                try:
                    with conn.transaction():
                        conn.execute(f'ALTER TABLE public.sample ADD "{name}" {kind}'.encode())
                        conn.execute(f'UPDATE public.sample SET "{name}" = %s::{kind}'.encode(), [text])
                except (psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedObject):
                    continue  # The server was built without libxml, or is too old for the type.
            if hostile.version >= LISTS_SINCE:
                conn.execute(FILTER)
        yield database


def _query(database: Database) -> str:
    """A query that returns the texts of all values, and of a row filter."""
    with database.connect() as conn:
        columns = conn.execute(
            "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = 'public.sample'::regclass AND attnum > 0"
        ).fetchall()
    texts = [f"format('%s', {column})" for (column,) in columns]
    texts += [f"({FILTERED})"] if database.server.version >= LISTS_SINCE else []
    return f"SELECT ARRAY[{', '.join(texts)}] FROM public.sample"


def _texts(conn: psycopg.Connection[Any], query: str) -> list[str]:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return list(row[0])


def _candidates(conn: psycopg.Connection[Any]) -> Iterator[tuple[str, str]]:
    """Each setting that a session may change, with the values to try."""
    settings = conn.execute(
        "SELECT name, vartype, setting, enumvals, min_val, max_val FROM pg_settings "
        "WHERE context IN ('user', 'superuser') ORDER BY name"
    ).fetchall()
    for name, kind, setting, choices, low, high in settings:
        if name in ELSEWHERE:
            continue
        values = {"bool": ["on", "off"], "enum": choices, "integer": [low, high], "real": [low, high]}
        for value in values.get(kind, WORDS.get(name, [])):
            if value != setting:
                yield name, value


@pytest.fixture(scope="module")
def changing(made: Database) -> list[tuple[str, str]]:
    """Names and values of the settings that change the text of a value."""
    found, query = [], _query(made)
    with connect(made.conninfo) as conn:
        usual = _texts(conn, query)
        for name, value in _candidates(conn):
            try:
                with conn.transaction(force_rollback=True):
                    conn.execute("SELECT set_config(%s, %s, true)", [name, value])
                    if _texts(conn, query) != usual:
                        found.append((name, value))
            except psycopg.Error:
                assert not conn.closed, name
    return found


def test_each_type_has_a_sample_value(made: Database) -> None:
    with made.connect() as conn:
        types = conn.execute(
            "SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace "
            "AND typtype IN ('b', 'r', 'm') AND typcategory <> 'A'"
        ).fetchall()
    assert {name for (name,) in types} - VALUES.keys() - WITHOUT_INPUT == set()


def test_our_sessions_set_each_setting_that_can_change_a_text(made: Database, changing: list[tuple[str, str]]) -> None:
    found = {name for name, _ in changing}
    assert found == KNOWN - (set() if made.server.version >= LISTS_SINCE else {"standard_conforming_strings"})
    with connect(made.conninfo) as conn:
        pinned = conn.execute("SELECT name FROM pg_settings WHERE source = 'session'").fetchall()
    assert found <= {name for (name,) in pinned}


def test_no_default_of_database_or_role_or_environment_changes_a_text(
    made: Database, changing: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets defaults of the database, of the role, of the role in the database, and in the environment variables of
    libpq."""
    query, last = _query(made), dict(changing)
    with connect(made.conninfo) as conn:
        usual = _texts(conn, query)
    assert "-$1,234,567.89" in usual
    with made.connect() as admin:
        for place in (f"DATABASE {made.name}", "ROLE postgres", f"ROLE postgres IN DATABASE {made.name}"):
            for name, value in last.items():
                given = sql.SQL(value) if name == "search_path" else sql.Literal(value)
                admin.execute(sql.SQL(f"ALTER {place} SET {name} = {{}}").format(given))
        monkeypatch.setenv("PGOPTIONS", " ".join(f"-c {n}={v.replace(' ', '')}" for n, v in last.items()))
        monkeypatch.setenv("PGTZ", "Asia/Tokyo")
        monkeypatch.setenv("PGDATESTYLE", "German")
        try:
            with made.connect() as conn:
                assert "-1.234.567,89 €" in _texts(conn, query), (
                    "the defaults must change the text in an ordinary session"
                )
            monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
            for row_security in (True, False):
                with connect(made.conninfo, row_security=row_security) as conn:
                    assert _texts(conn, query) == usual
            with ReplicationConnection.open(made.conninfo) as walsender:
                assert walsender.execute(f"SELECT unnest FROM unnest(({query}))") == [(text,) for text in usual]
        finally:
            admin.execute("ALTER ROLE postgres RESET ALL")


def test_a_role_whose_transactions_are_read_only_by_default_can_create_publications(made: Database) -> None:
    with made.connect() as admin:
        admin.execute(f"ALTER ROLE postgres IN DATABASE {made.name} SET default_transaction_read_only = on".encode())
    try:
        with connect(made.conninfo) as conn:
            conn.execute("CREATE PUBLICATION by_a_reader")
    finally:
        with connect(made.conninfo) as admin:
            admin.execute(f"ALTER ROLE postgres IN DATABASE {made.name} RESET ALL".encode())
