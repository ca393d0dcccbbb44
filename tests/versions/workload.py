"""A workload for servers of every version. Its few dozen transactions contain everything that a stream may contain."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.fix_postgres import Database

LISTS_SINCE = 15
"""The first version with row filters, column lists, and FOR TABLES IN SCHEMA."""
GENERATED_SINCE = 18
"""The first version with generated columns in the stream."""

TABLES = (
    "public.families", "public.toast", "public.bag", "public.indexed", "public.pair", "public.root",
    "Odd Schema.Select", "public.emptied",
)  # fmt: skip
"""Tables that are published with all rows and columns on every version, and whose columns do not change."""
ALTERED = "public.altered"

DDL = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s "odd"');
CREATE TYPE spot AS (x int, label text);
CREATE DOMAIN price AS numeric(12,2) CHECK (VALUE >= 0);
CREATE TABLE families (
  id int PRIMARY KEY, b bool, i2 int2, i8 int8, f4 float4, f8 float8, n numeric(12,3), free numeric, cash money,
  t text, vc varchar(20), ch char(5), bin bytea, d date, ts timestamp, tz timestamptz(3), ti time, tt timetz,
  iv interval, u uuid, j json, jb jsonb, ip inet, net cidr, mac macaddr, pt point, rng int4range, mr int4multirange,
  tv tsvector, bits bit(3), ints int[], texts text[], dates date[], m mood, p price, s spot);
CREATE TABLE toast (id int PRIMARY KEY, v int, big text);
ALTER TABLE toast ALTER big SET STORAGE EXTERNAL;
CREATE TABLE bag (a int, b text, big text); ALTER TABLE bag REPLICA IDENTITY FULL;
ALTER TABLE bag ALTER big SET STORAGE EXTERNAL;
CREATE TABLE indexed (code text NOT NULL, v int); CREATE UNIQUE INDEX indexed_code ON indexed (code);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_code;
CREATE TABLE pair (a int, b text, v text, PRIMARY KEY (b, a));
CREATE TABLE root (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
CREATE TABLE leaf_one PARTITION OF root FOR VALUES IN (1);
CREATE TABLE leaf_rest PARTITION OF root DEFAULT;
CREATE SCHEMA "Odd Schema";
CREATE TABLE "Odd Schema"."Select" ("from" int PRIMARY KEY, "Größe ☃" text, "a b" int GENERATED ALWAYS AS (1) STORED);
CREATE TABLE emptied (id int PRIMARY KEY, v text);
CREATE TABLE altered (id int PRIMARY KEY, v text);
CREATE TABLE outside (id int, v text);
"""

_FAMILIES = """
INSERT INTO families VALUES
(1, true, -32768, 9223372036854775807, 1.5, 'NaN', 123456789.125, 1e50, '12.34', E'tab\\t"quote" ☃ \\\\', 'var', 'ch',
 '\\x00ff10', '2024-02-29', '1999-12-31 23:59:59.999999', '2024-03-31 02:30:00.123+02', '23:59:59.5', '12:00+05:45',
 '1 year -2 days 03:04:05.6', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a" : 1}', '{"b": [1, null]}', '10.0.0.1/8',
 '10.0.0.0/8', '08:00:2b:01:02:03', '(1.5,-2)', '[1,5)', '{[1,3),[7,9)}', 'a:1 b:2', '101', '{1,NULL,-3}',
 '{"a,b",NULL,"",NULL_}', '{0001-01-01,9999-12-31}', 'it''s "odd"', 0.10, '(1,"a,b")'),
(2, false, 32767, -9223372036854775808, '-Infinity', 1e-300, -0.001, 'NaN', '-0.01', '', '', '', '', '0001-01-01',
 '0001-01-01', '9999-12-31 23:59:59.999Z', '00:00', '00:00-12', '00:00', '00000000-0000-0000-0000-000000000000',
 'null', '[]', '::1', '::/0', 'ff:ff:ff:ff:ff:ff', '(0,0)', 'empty', '{}', '', '000', '{}', '{}', '{}', 'sad', 0, NULL);
INSERT INTO families (id) SELECT g FROM generate_series(3, 40) g;
"""

_BIG = "repeat(md5(id::text), 200)"


class Workload:
    """Writes through two sessions. ``database`` must have only the tables that :func:`make` creates."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._gid = f"g_{database.name}"
        self.version = database.server.version

    def before(self) -> None:
        """Writes rows that exist before a copy."""
        self._run("INSERT INTO toast SELECT id, 0, repeat('old', 2000) FROM generate_series(1001, 1010) id")
        self._run("INSERT INTO root SELECT g, g % 3, 'old' FROM generate_series(1001, 1009) g")
        self._run("INSERT INTO emptied VALUES (1001, 'old')", "INSERT INTO bag VALUES (1001, 'old'), (1001, 'old')")

    def rows(self) -> None:
        """Changes rows in single statements and short transactions: types, TOAST, keys, replica identities,
        partitions."""
        self._run(_FAMILIES, "UPDATE families SET b = NOT b, tz = tz + interval '1 us' WHERE id < 20",
                  "DELETE FROM families WHERE id BETWEEN 30 AND 35")  # fmt: skip
        self._run(f"INSERT INTO toast SELECT id, 0, {_BIG} FROM generate_series(1, 20) id",
                  "UPDATE toast SET v = v + 1", "UPDATE toast SET id = id + 100 WHERE id <= 5",
                  "UPDATE toast SET big = 'short' WHERE id = 6; UPDATE toast SET v = 7 WHERE id = 6",
                  "DELETE FROM toast WHERE id = 7; INSERT INTO toast VALUES (7, 1, 'again')")  # fmt: skip
        self._run("INSERT INTO bag SELECT 1, 'same', repeat('x', 6000) FROM generate_series(1, 3)",
                  "INSERT INTO bag VALUES (NULL, NULL, NULL), (NULL, NULL, NULL)",
                  "UPDATE bag SET a = 2 WHERE ctid = (SELECT min(ctid) FROM bag WHERE b = 'same')",
                  "DELETE FROM bag WHERE ctid = (SELECT max(ctid) FROM bag WHERE a IS NULL)")  # fmt: skip
        self._run("INSERT INTO indexed VALUES ('a', 1), ('b', 2), ('c', 3)",
                  "UPDATE indexed SET v = 9 WHERE code = 'a'",
                  "UPDATE indexed SET code = 'z' WHERE code = 'b'", "DELETE FROM indexed WHERE code = 'c'")  # fmt: skip
        self._run("INSERT INTO pair SELECT g, 'k' || g % 2, 'v' FROM generate_series(1, 10) g",
                  "UPDATE pair SET a = -a WHERE a > 5; UPDATE pair SET v = NULL WHERE a = 1")  # fmt: skip
        self._run("INSERT INTO root SELECT g, g % 3, 'v' FROM generate_series(1, 12) g", "UPDATE root SET part = 1 "
                  "WHERE part = 2 AND id < 1000", "DELETE FROM root WHERE id = 3")  # fmt: skip
        self._run('INSERT INTO "Odd Schema"."Select" VALUES (1, \'x\'), (2, NULL)',
                  'UPDATE "Odd Schema"."Select" SET "from" = 3 WHERE "from" = 2')  # fmt: skip

    def transactions(self) -> None:
        """Runs transactions of all kinds: with subtransactions, interleaved, prepared and empty, with truncates,
        origins and messages."""
        self._run("BEGIN; INSERT INTO pair VALUES (100, 's', 'kept'); SAVEPOINT one;"
                  "INSERT INTO pair VALUES (101, 's', 'gone'); SAVEPOINT two;"
                  "UPDATE pair SET v = 'gone' WHERE b = 's'; ROLLBACK TO one;"
                  "INSERT INTO pair VALUES (102, 's', 'kept'); RELEASE one; COMMIT",
                  "BEGIN; INSERT INTO pair VALUES (103, 's', 'gone'); ROLLBACK")  # fmt: skip
        with self._database.connect() as first, self._database.connect() as second:
            first.execute("BEGIN; INSERT INTO emptied VALUES (1, 'begins first')")
            second.execute("BEGIN; INSERT INTO emptied VALUES (2, 'commits first')")
            first.execute("INSERT INTO toast VALUES (500, 0, 'interleaved')")
            second.execute("UPDATE pair SET v = 'second' WHERE b = 's'; COMMIT")
            first.execute("UPDATE pair SET v = v || ' then first' WHERE a = 100; COMMIT")
        self._prepared("COMMIT", 200)
        self._prepared("ROLLBACK", 201)
        self._run("BEGIN; INSERT INTO emptied VALUES (3, 'gone'); TRUNCATE emptied RESTART IDENTITY CASCADE;"
                  "INSERT INTO emptied VALUES (4, 'stays'); COMMIT", "TRUNCATE leaf_rest",
                  "INSERT INTO root VALUES (50, 0, 'after')")  # fmt: skip
        self._run("INSERT INTO outside VALUES (1, 'seen by nobody')", "SELECT pg_current_xact_id()",
                  "CREATE TABLE later (id int)")  # fmt: skip
        self._run("SELECT pg_logical_emit_message(false, 'loose', 'between')",
                  "BEGIN; INSERT INTO pair VALUES (300, 'm', NULL);"
                  "SELECT pg_logical_emit_message(true, 'held', 'inside'); COMMIT")  # fmt: skip
        self._foreign("INSERT INTO pair VALUES (400, 'o', 'from elsewhere')")
        self._run("INSERT INTO altered VALUES (1, 'narrow'), (2, 'narrow')",
                  "BEGIN; UPDATE altered SET v = 'x' WHERE id = 1; ALTER TABLE altered ADD COLUMN more int[];"
                  "INSERT INTO altered VALUES (3, 'wide', '{3,NULL}'); COMMIT",
                  "UPDATE altered SET more = ARRAY[id] WHERE id = 2")  # fmt: skip

    def lists(self) -> None:
        """Changes tables of which only some rows or columns are published (15 and later)."""
        assert self.version >= LISTS_SINCE
        self._run("INSERT INTO filtered SELECT g, g * 10, 'x' FROM generate_series(1, 6) g",
                  "UPDATE filtered SET v = 45 WHERE id = 1; UPDATE filtered SET v = 1 WHERE id = 6",
                  "UPDATE filtered SET t = 'y'; DELETE FROM filtered WHERE id = 5",
                  "INSERT INTO listed VALUES (1, 'secret', 'shown'), (2, 'secret', NULL)",
                  "UPDATE listed SET secret = 'other'; UPDATE listed SET shown = 'new' WHERE id = 2",
                  "INSERT INTO whole_schema.inside VALUES (1); DELETE FROM whole_schema.inside;"
                  "INSERT INTO whole_schema.inside VALUES (2)")  # fmt: skip

    # The parts of the workload, one method for each kind of change ---------------------------------

    def _prepared(self, end: str, key: int) -> None:
        with self._database.connect() as conn:
            conn.execute(f"BEGIN; INSERT INTO pair VALUES ({key}, 'p', 'prepared'); SAVEPOINT s;"
                         f"INSERT INTO toast VALUES ({key}, 1, repeat('p', 5000));"
                         f"PREPARE TRANSACTION '{self._gid}'".encode())  # fmt: skip
            conn.execute("INSERT INTO emptied VALUES (%s, 'meanwhile')", [1000 + key])
            conn.execute(f"{end} PREPARED '{self._gid}'".encode())

    def _foreign(self, statement: str) -> None:
        name = f"o_{self._database.name}"
        with self._database.connect() as conn:
            conn.execute("SELECT pg_replication_origin_create(%s)", [name])
            conn.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
            conn.execute(statement.encode())
            conn.execute("SELECT pg_replication_origin_session_reset()")
            conn.execute("SELECT pg_replication_origin_drop(%s)", [name])

    def _run(self, *statements: str) -> None:
        with self._database.connect() as conn:
            for statement in statements:
                conn.execute(statement.encode())


def make(conn: psycopg.Connection[Any], version: int) -> None:
    """Creates the tables, including the tables that are published in part if the server supports this."""
    conn.execute(DDL.encode())
    if version >= LISTS_SINCE:
        conn.execute(
            "CREATE TABLE filtered (id int PRIMARY KEY, v int, t text); ALTER TABLE filtered REPLICA IDENTITY FULL;"
            "CREATE TABLE listed (id int PRIMARY KEY, secret text, shown text);"
            "CREATE SCHEMA whole_schema; CREATE TABLE whole_schema.inside (id int PRIMARY KEY)"
        )


def publish(conn: psycopg.Connection[Any], version: int, name: str) -> tuple[str, ...]:
    """Publishes all tables except ``outside``, with all options that the server supports. Returns the names of the
    publications."""
    listed = ["families", "toast", "bag", "indexed", "pair", "root", '"Odd Schema"."Select"', "emptied", "altered"]
    options = " WITH (publish_generated_columns = stored)" if version >= GENERATED_SINCE else ""
    if version < LISTS_SINCE:
        conn.execute(f"CREATE PUBLICATION {name} FOR TABLE {', '.join(listed)}".encode())
        return (name,)
    listed += ["filtered WHERE (v > 30)", "listed (id, shown)"]
    conn.execute(f"CREATE PUBLICATION {name} FOR TABLE {', '.join(listed)}{options}".encode())
    # A publication cannot have both a schema and a column list.
    conn.execute(f"CREATE PUBLICATION {name}_schema FOR TABLES IN SCHEMA whole_schema".encode())
    return name, f"{name}_schema"
