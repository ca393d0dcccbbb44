"""Event triggers that put changes of structure into the stream: what they say, and that they harm nobody."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.core.prefixes import structure_prefix
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import SetupRefused
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.eventtriggers import Noting
from pgcdc_assets.source.setup.script import owner_script
from pgcdc_assets.source.setup.setup import event_triggers, left_to_owners, setup, teardown
from tests.fix_postgres import Database, fresh_database

Said = list[dict[str, Any]]


@pytest.fixture
def settings(database: Database) -> Settings:
    return Settings(source=database.conninfo, slot=f"s_{secrets.token_hex(4)}", publication="Our pub")


@pytest.fixture
def conn(database: Database, settings: Settings) -> Iterator[psycopg.Connection]:
    """Tables t and parent with its child are published, other is not; the event triggers are there."""
    with database.connect() as conn:
        conn.execute("""
            CREATE TABLE t (id int PRIMARY KEY, v varchar(10)); CREATE TABLE parent (id int PRIMARY KEY);
            CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent); CREATE TABLE other (id int PRIMARY KEY, v text);
            CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY LIST (id);
            CREATE TABLE part PARTITION OF parts FOR VALUES IN (1)""")
        setup(settings.model_copy(update={"tables": ("*", "-public.other")}), database.conninfo, ddl=True)
        # A slot of our own, which sees all messages as they come.
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"{settings.slot}_said"])
        yield conn


def said(conn: psycopg.Connection, settings: Settings) -> Said:
    """What has been put into the stream since the last call, and committed."""
    rows = conn.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'messages', 'true', "
        "'publication_names', %s)", [f"{settings.slot}_said", sql.Identifier(settings.publication).as_string(conn)],
    ).fetchall()  # fmt: skip
    mark = structure_prefix(settings.slot).encode() + b"\0"
    found = [bytes(data) for (data,) in rows if bytes(data)[:1] == b"M" and mark in bytes(data)]
    return [json.loads(data[data.index(mark) + len(mark) + 4 :]) for data in found]


def names(found: Said) -> list[tuple[str, list[str]]]:
    return [(one["tag"], [table["name"] for table in one["tables"]]) for one in found]


@pytest.mark.parametrize(
    ("statement", "tables"),
    [
        ("ALTER TABLE t ADD w int NOT NULL DEFAULT 5", ["t"]),
        ("ALTER TABLE t RENAME v TO x", ["t"]),
        ("ALTER TABLE t DROP v", ["t"]),
        ("ALTER TABLE t ALTER v TYPE text", ["t"]),
        ("ALTER TABLE t ALTER v TYPE int USING length(v)", ["t"]),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id)", ["t"]),
        ("ALTER TABLE t RENAME TO u", ["u"]),
        ("ALTER TABLE parent ADD w int", ["child", "parent"]),
        ("ALTER TABLE parts ADD w int", []),
        ("ALTER TABLE parts DETACH PARTITION part", []),
        ("CREATE TYPE mood AS ENUM ('a'); ALTER TYPE mood ADD VALUE 'b'", []),
        ("ALTER SCHEMA public RENAME TO elsewhere", []),
        ("CREATE TYPE mood AS ENUM ('a'); ALTER TABLE t ADD m mood; DROP TYPE mood CASCADE", ["t"]),
        ("CREATE SCHEMA s; CREATE DOMAIN s.d AS int; ALTER TABLE t ADD d s.d; DROP SCHEMA s CASCADE", ["t"]),
        ("DROP TABLE t", []),
        ('DROP PUBLICATION "Our pub"', []),
    ],
)
def test_what_touches_us_is_said(
    conn: psycopg.Connection, settings: Settings, statement: str, tables: list[str]
) -> None:
    for one in statement.split("; "):
        conn.execute(one.encode())
    if "DROP PUBLICATION" in statement:
        # The stream cannot be read without it.
        conn.execute('CREATE PUBLICATION "Our pub"')
    (tag, found), *_ = [one for one in names(said(conn, settings))[::-1] if one[0] != "CREATE PUBLICATION"]
    assert (sorted(found), tag) == (tables, " ".join(statement.split("; ")[-1].split()[:2]))


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE other ADD w int",
        "DROP TABLE other",
        "CREATE TABLE more (id int)",
        "CREATE TABLE more AS SELECT 1 AS one",
        "CREATE TEMP TABLE more (id int)",
        "CREATE TEMP TABLE more (id int); ALTER TABLE more ADD v text; DROP TABLE more",
        "CREATE INDEX ON t (v)",
        "CREATE VIEW w AS SELECT 1 AS one; ALTER TABLE w ALTER one SET DEFAULT 2",
        "CREATE SCHEMA s; DROP SCHEMA s",
        "BEGIN; ALTER TABLE t ADD w int; ROLLBACK",
        "BEGIN; SAVEPOINT s; ALTER TABLE t ADD w int; ROLLBACK TO s; COMMIT",
    ],
)
def test_what_does_not_is_not(conn: psycopg.Connection, settings: Settings, statement: str) -> None:
    for one in statement.split("; "):
        conn.execute(one.encode())
    assert said(conn, settings) == []


def test_facts_are_those_of_their_own_time(conn: psycopg.Connection, settings: Settings) -> None:
    conn.execute("SET DateStyle = 'SQL, DMY'; SET TimeZone = 'Asia/Kathmandu'; SET bytea_output = 'escape'")
    conn.execute("CREATE DOMAIN short AS varchar(4)")
    with conn.transaction():
        conn.execute("ALTER TABLE t ADD at timestamptz DEFAULT '2026-01-02 03:04:05Z', ADD s short DEFAULT 'ab'")
        with conn.transaction():
            conn.execute('ALTER TABLE t RENAME v TO "w x"')
    conn.execute("ALTER TABLE t DROP s, ALTER id TYPE bigint")
    *both, rewriting, dropped = said(conn, settings)
    added, renamed, last = (one["tables"][0] for one in (*both, dropped))
    assert (rewriting["tables"], rewriting["rewritten"]) == ([], added["oid"])
    assert [one["rewritten"] for one in (*both, dropped)] == [None] * 3
    columns = {row[1]: row for row in added["columns"]}
    assert columns["at"][6] == "2026-01-02 03:04:05+00"
    assert columns["s"][6] == "ab"
    assert [row[1] for row in renamed["columns"]] == ["id", "w x", "at", "s"]
    assert [row[8] for row in renamed["columns"]] == [False, True, True, True]
    assert [row[8] for row in last["columns"]] == [True, False, True], (
        "a rewrite writes the values of older rows into them"
    )
    assert last["relfilenode"] != renamed["relfilenode"] == added["relfilenode"]
    assert [index[3] for index in last["indexes"]] == [["id"]]
    assert {"short", "varchar", "timestamptz", "int4"} <= {row[1] for row in added["types"]}
    now = conn.execute("""SELECT string_agg(attnum || ':' || xmin, ' ' ORDER BY attnum) FROM pg_attribute
                          WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped""").fetchall()  # fmt: skip
    assert [(" ".join(row[7] for row in last["columns"]),)] == now


@pytest.fixture
def role(conn: psycopg.Connection) -> Iterator[str]:
    """An ordinary one, which owns a table of ours."""
    name = f"r_{secrets.token_hex(4)}"
    conn.execute(
        f"CREATE ROLE {name} LOGIN; GRANT CREATE ON SCHEMA public TO {name}; ALTER TABLE t OWNER TO {name}".encode()
    )
    yield name
    conn.execute(f"RESET ROLE; DROP OWNED BY {name} CASCADE; DROP ROLE {name}".encode())


def test_an_ordinary_user_s_changes_are_said(conn: psycopg.Connection, settings: Settings, role: str) -> None:
    said(conn, settings)
    conn.execute(f"SET ROLE {role}".encode())
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
    # Nothing of the user's own stands in for what the functions call.
    conn.execute("CREATE FUNCTION public.json_agg(oid) RETURNS json LANGUAGE sql AS 'SELECT 1/0; SELECT NULL::json'")
    conn.execute("SET search_path = public, pg_catalog")
    conn.execute("ALTER TABLE t ADD w int")
    conn.execute("DROP FUNCTION public.json_agg(oid)")
    conn.execute("RESET ROLE")
    assert names(said(conn, settings)) == [("ALTER TABLE", ["t"])]
    assert notices == []


@pytest.mark.parametrize(
    "harm",
    [
        "DROP FUNCTION {schema}.facts(oid)",
        "DROP FUNCTION {schema}.emit(text, oid[], oid, boolean)",
        "CREATE OR REPLACE FUNCTION {schema}.facts(relation oid) RETURNS json LANGUAGE sql AS 'SELECT to_json(1/0)'",
    ],
)
def test_a_failure_inside_is_a_warning(conn: psycopg.Connection, settings: Settings, harm: str) -> None:
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(f"{notice.severity} {notice.message_primary}"))
    conn.execute(sql.SQL(harm).format(schema=sql.Identifier(event_triggers(conn, settings).schema)))
    conn.execute("ALTER TABLE t ADD w int")
    conn.execute("DROP TYPE IF EXISTS nothing")
    assert [notice for notice in notices if notice.startswith("WARNING")] == [
        next(notice for notice in notices if "a change of structure is not noted in the stream" in notice)
    ]
    assert conn.execute("SELECT w FROM t").fetchall() == []
    assert event_triggers(conn, settings).make(conn) == [], "their version is the same"
    for statement in event_triggers(conn, settings).statements(conn):
        conn.execute(statement)
    conn.execute("ALTER TABLE t ADD x int")
    assert names(said(conn, settings)) == [("ALTER TABLE", ["t"])]


def test_without_schema_publication_or_slot(conn: psycopg.Connection, settings: Settings, database: Database) -> None:
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(f"{notice.severity} {notice.message_primary}"))
    said(conn, settings)
    conn.execute("SELECT pg_drop_replication_slot(%s)", [settings.slot])
    conn.execute("ALTER TABLE t ADD w int")
    conn.execute('DROP PUBLICATION "Our pub", "Our pub_inserts"')
    conn.execute("ALTER TABLE t ADD x int")
    conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(event_triggers(conn, settings).schema)))
    conn.execute("ALTER TABLE t ADD y int")
    assert event_triggers(conn, settings).state(conn) is Noting.ABSENT
    assert [notice for notice in notices if notice.startswith("WARNING")] == []


def test_as_a_replica_and_in_extensions(conn: psycopg.Connection, settings: Settings) -> None:
    """What a session that loads a dump changes is said too; the scripts of extensions go through."""
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(f"{notice.severity} {notice.message_primary}"))
    conn.execute("SET session_replication_role = replica")
    conn.execute("ALTER TABLE t ADD w int")
    conn.execute("RESET session_replication_role")
    for (name,) in conn.execute(
        "SELECT name FROM pg_available_extensions WHERE installed_version IS NULL AND name !~ 'pl|python' LIMIT 5"
    ).fetchall():
        with contextlib.suppress(psycopg.errors.UndefinedFile, psycopg.errors.FeatureNotSupported,
                                 psycopg.errors.ObjectNotInPrerequisiteState):  # fmt: skip
            conn.execute(sql.SQL("CREATE EXTENSION {}").format(sql.Identifier(name)))
            conn.execute(sql.SQL("DROP EXTENSION {}").format(sql.Identifier(name)))
    assert [one for one in names(said(conn, settings)) if one[1]] == [("ALTER TABLE", ["t"])]
    assert [notice for notice in notices if notice.startswith("WARNING")] == []


def test_a_dump_of_the_source_is_restored(
    conn: psycopg.Connection, settings: Settings, database: Database, server: EmbeddedServer
) -> None:
    """It brings the triggers, which harm nobody there either."""
    if not (server.bin / "pg_dump").exists():
        pytest.skip("no pg_dump of this version here")
    dumped = server.runner.run([server.bin / "pg_dump", "--schema-only", "-d", database.conninfo])
    assert dumped.returncode == 0, dumped.stderr
    script = "\n".join(line for line in dumped.stdout.splitlines() if not line.startswith("\\"))
    with fresh_database(server) as other, other.connect() as there:
        there.execute(script.encode())
        assert event_triggers(there, settings).noted(there)
        there.execute("ALTER TABLE public.t ADD w int; DROP TABLE public.t")


def test_twice_is_fine_and_without_the_option_they_stay(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    triggers = event_triggers(conn, settings)
    assert triggers.state(conn) is Noting.CURRENT
    assert triggers.noted(conn)
    assert setup(settings, database.conninfo, ddl=True).created == ["tables of publication Our pub"]
    assert setup(settings, database.conninfo).created == []
    assert triggers.state(conn) is Noting.CURRENT
    conn.execute(f"ALTER EVENT TRIGGER {triggers.names['changed']} DISABLE".encode())
    assert triggers.state(conn) is Noting.DISABLED
    assert not triggers.noted(conn)
    assert setup(settings, database.conninfo).created == []
    assert triggers.state(conn) is Noting.DISABLED
    assert setup(settings, database.conninfo, ddl=True).created == [
        f"event triggers {', '.join(triggers.names.values())}"
    ]
    conn.execute(
        f"COMMENT ON SCHEMA {triggers.schema} IS 'Made by pgcdc_assets for slot {settings.slot}, version 0'".encode()
    )
    assert triggers.state(conn) is Noting.OUTDATED
    assert triggers.noted(conn)
    conn.execute("SELECT pg_drop_replication_slot(%s)", [f"{settings.slot}_said"])
    removed = teardown(settings, database.conninfo)
    assert f"event triggers {', '.join(triggers.names.values())}" in removed
    assert left_to_owners(settings, database.conninfo) == []
    left = conn.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", [triggers.schema]).fetchall()
    assert left == [(0,)]


def test_a_role_that_may_not_make_them(conn: psycopg.Connection, settings: Settings, database: Database) -> None:
    """One line says so, and what a superuser has to run makes them."""
    name = f"r_{secrets.token_hex(4)}"
    conn.execute(f"CREATE ROLE {name} LOGIN REPLICATION; GRANT pg_read_all_data TO {name}".encode())
    own = Settings(source=f"{database.conninfo} user={name}", slot=f"s_{secrets.token_hex(4)}", tables=("public.t",))
    conn.execute(f"ALTER TABLE t OWNER TO {name}; GRANT CREATE ON DATABASE {database.name} TO {name}".encode())
    try:
        with pytest.raises(SetupRefused, match="may not make event triggers") as refused:
            setup(own, str(own.source), ddl=True)
        assert "pgcdc setup --ddl --sql" in str(refused.value)
        script = owner_script(own, str(own.source), ddl=True)
        assert "CREATE EVENT TRIGGER" not in owner_script(own, str(own.source))
        conn.execute(script.encode())
        assert event_triggers(conn, own).state(conn) is Noting.CURRENT
        setup(own, str(own.source), ddl=True)
        said(conn, settings)
        teardown(own, str(own.source))
        assert any("event triggers" in thing for thing in left_to_owners(own, str(own.source)))
        event_triggers(conn, own).remove(conn)
    finally:
        conn.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}".encode())
