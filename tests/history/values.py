"""Values of every type family, including edge values, as SQL expressions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """A type, and expressions for its values."""

    type: str
    pool: tuple[str, ...] = field(repr=False)
    spare: str | None = None
    """A value that no row has. To swap the values of two rows, one row gets this value for a moment."""
    toasted: bool = False

    def value(self, chance: random.Random, *, null: bool = True) -> str:
        if null and chance.random() < 0.15:
            return "NULL"
        if self.toasted and chance.random() < 0.8:
            return large(chance.randrange(1 << 30), chance.randrange(100, 320))
        return f"{chance.choice(self.pool)}::{self.type}"


def large(seed: int, pieces: int) -> str:
    """Text of ``pieces`` × 32 characters that compresses badly or not at all."""
    return f"(SELECT string_agg(md5('{seed}-' || g), '') FROM generate_series(1, {pieces}) g)"


def _kind(type_: str, *texts: str, spare: str | None = None) -> Kind:
    pool = tuple("'" + text.replace("'", "''") + "'" for text in texts)
    return Kind(type_, pool, None if spare is None else f"'{spare}'::{type_}")


HOSTILE = (
    "DateStyle = 'German'", "DateStyle = 'SQL, DMY'", "IntervalStyle = 'iso_8601'", "IntervalStyle = 'sql_standard'",
    "bytea_output = 'escape'", "extra_float_digits = -15", "TimeZone = 'Asia/Kathmandu'", "search_path = ''",
    "search_path = 'nowhere'", "xmloption = 'document'", "quote_all_identifiers = on", "array_nulls = off",
    "standard_conforming_strings = off", "default_transaction_read_only = on", "statement_timeout = '1ms'",
    "lock_timeout = '1ms'", "idle_in_transaction_session_timeout = '20ms'", "row_security = off",
    "default_transaction_isolation = 'serializable'", "client_encoding = 'SQL_ASCII'", "enable_seqscan = off",
)  # fmt: skip
"""Defaults of a database or role that must not affect a mirror."""


def default(change: str, role: str | None = None) -> str:
    """A statement that changes a default of the current database, or of a role in it: ``SET ...`` or ``RESET ...``."""
    change = change.replace("'", "''")
    whose = f"ROLE {role} IN DATABASE" if role else "DATABASE"
    return f"DO $$ BEGIN EXECUTE format('ALTER {whose} %I {change}', current_database()); END $$"


CODECS = {"UTF8": "utf-8", "LATIN1": "latin-1", "WIN1252": "cp1252", "EUC_JP": "euc_jp"}
"""Python's nearest codec, by server encoding."""


def fitting(texts: Sequence[str], encoding: str) -> list[str]:
    """The texts that the encoding can encode."""
    return [text for text in texts if text.encode(CODECS[encoding], "ignore").decode(CODECS[encoding]) == text]


LONG_KEYS = tuple(large(seed, 75) for seed in (1, 2))
"""Texts of 2400 characters. They fit into an index entry, and PostgreSQL stores them out of line if the row's other
columns are large."""

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'so so', 'glad ''" \\ 😀');
CREATE DOMAIN price AS numeric(8, 2) CHECK (VALUE IS NULL OR VALUE <> 666);
CREATE DOMAIN words AS text[];
CREATE TYPE place AS (street text, no int, at timestamptz);
CREATE FUNCTION doubled(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1 * 2';
"""

_ODD_TEXTS = ("", " ", "a", "A", "NULL", "null", "it's", 'say "hi"', "back\\slash", "tab\tline\nend", "😀 ünï", "\\x00",
              "(a,b)", "{a}", "\u2028", "e\u0301", "ÿ ü", "€ “ü”", "日本語 ①～￢ ｶﾅ")  # fmt: skip

KEYS = (
    _kind("int", "-3", "-2", "-1", "0", "1", "2", "3", spare="77"),
    _kind("int", "1", "2", "3", "4", "5", "6", "-1", spare="77"),
    _kind("bigint", "-9223372036854775808", "9223372036854775807", "0", "1", "2", "-1", spare="77"),
    _kind("smallint", "-32768", "32767", "0", "1", "2", "-1", spare="77"),
    _kind("text", *_ODD_TEXTS[:12], spare="spare"),
    Kind("text", ("'short'", "'other'", "'third'", *LONG_KEYS), "'spare'::text"),
    _kind("varchar(20)", "a", "b", "B", "", "0", "00", spare="spare"),
    _kind("char(4)", "a", "ab", "", "abcd", spare="zz"),
    _kind("uuid", *(f"00000000-0000-0000-0000-00000000000{n}" for n in "123abc"),
          spare="ffffffff-0000-0000-0000-000000000000"),
    _kind("date", "2024-02-29", "0001-01-01", "9999-12-31", "10000-01-01", "0044-03-15 BC", "infinity", "-infinity",
          spare="1999-09-09"),
    _kind("timestamp", "2024-02-29 23:59:59.999999", "0001-01-01", "294276-12-31 23:59:59", "infinity",
          "2024-01-01 00:00:00.000001", spare="1999-09-09"),
    _kind("timestamptz", "2024-02-29 23:59:59.999999+05:45", "infinity", "-infinity", "0044-03-15 12:00 BC",
          "2024-01-01 00:00:00+00", "9999-12-31 23:59:59+00", spare="1999-09-09"),
    _kind("numeric", "1", "1.0", "1.00", "NaN", "-0.5", "100000000000000000000000000000000000000000", spare="77"),
    _kind("numeric(10, 2)", "1", "-1", "0.01", "NaN", "99999999.99", spare="77"),
    _kind("price", "1", "-1", "0.01", "NaN", spare="77"),
    _kind("float8", "NaN", "-0", "0", "1e300", "Infinity", "-Infinity", "0.1", spare="77"),
    _kind("float4", "NaN", "-0", "0", "1e30", "0.1", "1", spare="77"),
    _kind("boolean", "t", "f"),
    _kind("bytea", "", "\\x00", "\\xff00", "\\x5c78", spare="\\x77"),
    _kind("mood", "sad", "so so"),
    _kind("inet", "10.0.0.1", "10.0.0.1/8", "::1", spare="9.9.9.9"),
    _kind("interval", "1 day", "24:00:00", "1 mon", "-1 year 3 days 00:00:01.5", spare="77 days"),
    _kind("jsonb", "1", '{"a": 1}', "[]", "null", spare='"spare"'),
    _kind("int[]", "{}", "{1}", "{1,2}", "{1,NULL}", "[0:1]={1,2}", "{{1},{2}}", spare="{77}"),
    _kind("text[]", "{}", '{""}', "{NULL}", '{"NULL"}', '{"a,b","c\\"d"}', spare="{spare}"),
    _kind("place", '(a,1,"2024-01-01 00:00:00+00")', "(,,)", spare="(spare,,)"),
)  # fmt: skip

LARGE = Kind("text", ("''", "'small'", "'😀'"), toasted=True)
"""Large texts, stored EXTERNAL (out of line, not compressed). Most values have 3 to 10 kB."""

VALUES = (
    *KEYS,
    LARGE,
    _kind("text", *_ODD_TEXTS),
    _kind("numeric(38, 10)", "1", "-9999999999999999999999999999.9999999999", "0.0000000001", "NaN", "0"),
    _kind("numeric(3, -2)", "100", "-99900", "0", "NaN"),
    _kind("numeric(2, 4)", "0.0099", "-0.0001", "0"),
    _kind("numeric(60, 30)", "1.000000000000000000000000000001", "-1", "NaN"),
    _kind("money", "12.34", "-92233720368547758.08"),
    _kind("time", "00:00:00", "24:00:00", "23:59:59.999999"),
    _kind("timetz", "00:00:00+15:59", "23:59:59.999999-05:45"),
    _kind("json", '{"b" :  1, "a":[ ] , "b":2}', "null", '  "😀"', '"\\u0000"'),
    _kind("bit(4)", "1010", "0000"),
    _kind("varbit", "", "1", "10101"),
    _kind("cidr", "10.0.0.0/8", "2001:db8::/32"),
    _kind("macaddr", "08:00:2b:01:02:03"),
    _kind("point", "(1,2)", "(-0,1e300)"),
    _kind("box", "(1,1),(0,0)"),
    _kind("int4range", "[1,5)", "empty", "(,)"),
    _kind("tstzrange", "[2024-01-01 00:00:00+00,infinity)", "empty", "(,)"),
    _kind("nummultirange", "{[1.0,2.0),(3,)}", "{}"),
    _kind("tsvector", "a:1 b:2A", ""),
    _kind("xid8", "0", "18446744073709551615"),
    _kind('"char"', "a", ""),
    _kind("name", "x", "a name"),
    _kind("oid", "0", "4294967295"),
    _kind("int2vector", "1 2 3", ""),
    _kind("words", "{}", "{a,NULL}", "[3:3]={x}", "{{a,b}}"),
    _kind("bytea[]", "{}", '{"\\\\x00",NULL}'),
    _kind("float8[]", "{NaN,-0,1e300}", "{}", "{{1,2}}", "[0:0]={0.1}"),
    _kind("float4[]", "{0.1,NULL,Infinity}", "{{0.1}}"),
    _kind("numeric(6, 2)[]", "{1.5,NULL}", "{NaN}", "{}"),
    _kind("date[]", "{2024-02-29,NULL}", "{infinity}", '{"0044-03-15 BC"}'),
    _kind("timestamptz[]", '{"2024-02-29 12:00:00.000001+00",NULL}', "{infinity}"),
    _kind("boolean[]", "{t,f,NULL}", "{{t}}"),
    _kind("mood[]", '{sad,NULL,"so so"}'),
    _kind("place[]", '{"(a,1,)",NULL}'),
    _kind("box[]", "{(1,1),(0,0);(2,2),(1,1)}"),
    _kind("json[]", '{"{\\"a\\" : 1}"}'),
    _kind("char(3)[]", '{a,"b  "}'),
    _kind("uuid[]", "{00000000-0000-0000-0000-000000000001,NULL}"),
)  # fmt: skip
