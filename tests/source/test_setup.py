"""Setup and teardown: what they create, drop and report, and that no write on the source fails because of them."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SlotActive, SourceNotReady
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.setup import findings
from pgcdc_assets.source.setup.findings import Finding, _version, exposed, matches_standby_names
from pgcdc_assets.source.setup.publications import inserts_name
from pgcdc_assets.source.setup.rights import lacking_rights
from pgcdc_assets.source.setup.setup import check_source, setup, teardown
from pgcdc_assets.source.slot.blockers import Blocker
from tests.deadpath import DeadPath
from tests.fix_postgres import Database
from tests.waiting import wait_for

DDL = """
CREATE TABLE keyed (id int PRIMARY KEY); CREATE TABLE bag (a int); ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE keyless (a int); CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE);
CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent);
CREATE TABLE r (id int, d int, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1);
CREATE TABLE rb (id int) PARTITION BY LIST (id); CREATE TABLE rb1 PARTITION OF rb FOR VALUES IN (1);
ALTER TABLE rb1 REPLICA IDENTITY FULL;
CREATE TABLE rk (id int) PARTITION BY LIST (id); CREATE TABLE rk1 PARTITION OF rk FOR VALUES IN (1);
CREATE TABLE rn (id int PRIMARY KEY) PARTITION BY LIST (id); CREATE TABLE rn1 PARTITION OF rn FOR VALUES IN (1);
ALTER TABLE rn1 REPLICA IDENTITY NOTHING;
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY); CREATE MATERIALIZED VIEW view_ AS SELECT 1 AS one;
CREATE SEQUENCE seq;
"""
WRITABLE = ("keyed", "bag", "keyless", "deferred", "parent", "child", "r", "rb", "rk", "rn")


@pytest.fixture
def settings(database: Database) -> Settings:
    return Settings(source=database.conninfo, slot=f"s_{secrets.token_hex(4)}", publication="Our pub")


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection]:
    with database.connect() as conn:
        yield conn


def published(conn: psycopg.Connection, publication: str) -> set[str]:
    rows = conn.execute("SELECT tablename::text FROM pg_publication_tables WHERE pubname = %s", [publication])
    return {name for (name,) in rows}


def slots(conn: psycopg.Connection) -> list[str]:
    rows = conn.execute("SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()")
    return [name for (name,) in rows]


def about(findings: list[Finding], thing: str) -> list[str]:
    return [finding.what for finding in findings if thing in finding.thing]


def test_setup_reports_columns_and_tables_whose_changes_pgcdc_may_miss(database: Database, settings: Settings) -> None:
    with database.connect() as conn:
        conn.execute("""
            CREATE TYPE tagged AS (n int, r regclass[]); CREATE TABLE plain (id int PRIMARY KEY);
            CREATE TABLE named (id int PRIMARY KEY, c regclass, t tagged, o oid);
            CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY HASH (id);
            CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 1, REMAINDER 0)""")
        found = [str(finding) for finding in check_source(conn, settings)]
        (names,) = [text for text in found if "names of database objects" in text]
        assert names.startswith("columns public.named.c, public.named.t: ")
        (unlogged,) = [text for text in found if "SET UNLOGGED" in text]
        assert unlogged.startswith("tables public.parted_1: have no TOAST table")


def test_setup_creates_publications_before_the_slot_and_can_be_repeated(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    conn.execute(DDL)
    report = setup(settings, database.conninfo)
    assert report.created == ["publication Our pub", "publication Our pub_inserts", f"slot {settings.slot}"]
    assert setup(settings, database.conninfo).created == []
    assert slots(conn) == [settings.slot]
    assert published(conn, "Our pub") == {"keyed", "bag", "parent", "r1", "rb1"}
    assert published(conn, "Our pub_inserts") == {"keyless", "deferred", "child", "rk1", "rn1"}
    row = conn.execute("SELECT pubupdate, pubdelete, pubinsert, pubtruncate, pubviaroot FROM pg_publication "
                       "WHERE pubname = 'Our pub_inserts'").fetchone()  # fmt: skip
    assert row == (False, False, True, True, False)
    catalog = report.catalog
    assert catalog.publications == ("Our pub", "Our pub_inserts")
    assert catalog.identity.slot == settings.slot
    seen = {table.name.name: table.updates_seen for table in catalog.tables}
    assert seen == {
        "keyed": True, "bag": True, "parent": True, "r": True, "rb": True,
        "keyless": False, "deferred": False, "child": False, "rk": False, "rn": False,
    }  # fmt: skip
    unseen = [(finding.thing, finding.what) for finding in report.findings if "are not replicated" in finding.what]
    assert len(unseen) == 3
    assert unseen[0] == ("tables public.child, public.deferred, public.keyless",
                         "no usable replica identity: their updates and deletes are not replicated")  # fmt: skip
    assert about(report.findings, "keys") == [
        "5 tables replicate updates and deletes: if such a table loses its key or replica identity, PostgreSQL "
        "refuses UPDATE and DELETE on it"
    ]
    (parent,) = about(report.findings, "table public.parent")
    assert parent.startswith(
        "is the parent of public.child by INHERITS: its mirror does not contain the rows of its children"
    )
    assert {finding.thing for finding in report.findings if finding.what.startswith("not replicated")} == {
        "unlogged tables", "materialised views", "sequences",
    }  # fmt: skip


def test_no_write_on_the_source_fails_because_of_setup(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    conn.execute(DDL)
    for table in WRITABLE:
        conn.execute(sql.SQL("INSERT INTO {} VALUES (1, 1)" if table == "r" else "INSERT INTO {} VALUES (1)").format(
            sql.Identifier(table)))  # fmt: skip
    setup(settings, database.conninfo)
    # These partitions are created after setup. rb2 has no replica identity. Setup published rb1, the other partition
    # of rb, but not rb itself. r2 has the key of its root r, and setup published r.
    conn.execute("CREATE TABLE rb2 PARTITION OF rb FOR VALUES IN (2); INSERT INTO rb VALUES (2)")
    conn.execute("CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2); INSERT INTO r VALUES (2, 2)")
    for table in (*WRITABLE, "rb2", "r2"):
        column = "a" if table in ("bag", "keyless") else "id"
        conn.execute(sql.SQL("UPDATE {} SET {c} = {c}").format(sql.Identifier(table), c=sql.Identifier(column)))
        conn.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)))
    assert "r2" in published(conn, "Our pub"), "a new partition of a root with a key is published at once"


def test_no_write_fails_while_a_key_is_replaced_as_setup_advises(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    """Setup advises to replace a key in one transaction, or to set REPLICA IDENTITY FULL while the table has no key. A
    user who does neither gets an error from PostgreSQL for each UPDATE, as the last statement shows."""
    conn.execute("CREATE TABLE t (id int PRIMARY KEY, k int NOT NULL); INSERT INTO t VALUES (1, 1)")
    setup(settings, database.conninfo)
    conn.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (k)")
    conn.execute("UPDATE t SET id = 2")
    conn.execute("ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t DROP CONSTRAINT t_pkey")
    conn.execute("UPDATE t SET id = 3")
    conn.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="replica identity"):
        conn.execute("UPDATE t SET id = 4")


def test_setup_locks_no_other_table_while_it_waits_for_one_table(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    """During the wait, a session that alters a different table gets its lock at once. Setup publishes the tables that
    are not locked."""
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); "
                 "CREATE TABLE c (id int PRIMARY KEY)")  # fmt: skip
    with database.connect() as owner:
        owner.execute("BEGIN; LOCK TABLE b IN SHARE UPDATE EXCLUSIVE MODE")
        told: list[list[Blocker]] = []
        run = threading.Thread(target=lambda: setup(settings, database.conninfo, on_wait=told.append))
        run.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'b'::regclass"
        wait_for(lambda: conn.execute(waiting).fetchone() != (0,), what="setup's wait")
        conn.execute("SET lock_timeout = 100")
        conn.execute("ALTER TABLE a ADD COLUMN n int")
        wait_for(lambda: published(conn, settings.publication) == {"a", "c"}, what="the unlocked tables")
        wait_for(lambda: told, what="setup's report of the session that it waits for")
        assert [holder.pid for holder in told[0]] == [owner.info.backend_pid]
        owner.execute("COMMIT")
        run.join(20)
    assert published(conn, settings.publication) == {"a", "b", "c"}


def test_setup_moves_a_table_that_gained_or_lost_its_key_to_the_publication_that_fits(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    """A table with a key belongs to the publication ``Our pub``, a table without a key to ``Our pub_inserts``."""
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int); CREATE TABLE c (id int PRIMARY KEY)")
    setup(settings, database.conninfo)
    conn.execute("ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE b ADD PRIMARY KEY (id); DROP TABLE c")
    conn.execute("CREATE TABLE d (id int PRIMARY KEY)")
    report = setup(settings, database.conninfo)
    assert report.created == ["tables of publication Our pub", "tables of publication Our pub_inserts"]
    assert published(conn, "Our pub") == {"b", "d"}
    assert published(conn, "Our pub_inserts") == {"a"}
    conn.execute("INSERT INTO a VALUES (1); UPDATE a SET id = 2; INSERT INTO b VALUES (1); UPDATE b SET id = 2")


def test_teardown_keeps_a_slot_that_is_in_use(conn: psycopg.Connection, settings: Settings, database: Database) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    report = setup(settings, database.conninfo)
    with ReplicationConnection.open(database.conninfo) as walsender:
        walsender.start(settings.slot, walsender.identify().flush_lsn, report.catalog.publications)
        if conn.info.server_version < 180000:
            with pytest.raises(SlotActive, match=settings.slot):
                teardown(settings, database.conninfo, report.created)
            assert slots(conn) == [settings.slot]


@pytest.mark.since(15, "row filters")
def test_setup_and_teardown_do_not_change_a_publication_that_a_user_created(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY, x text); CREATE TABLE b (id int); CREATE TABLE c (id int)")
    conn.execute('CREATE PUBLICATION "Our pub" FOR TABLE a WHERE (id > 5), b')
    before = conn.execute("SELECT xmin, oid FROM pg_publication_rel ORDER BY oid").fetchall()
    report = setup(settings, database.conninfo)
    assert f"slot {settings.slot}" in report.created
    assert report.catalog.publications == ("Our pub",)
    assert [table.name.name for table in report.catalog.tables] == ["a", "b"]
    assert any("UPDATE and DELETE fail on the source" in what for what in about(report.findings, "public.b"))
    assert any("row filter" in what for what in about(report.findings, "public.a"))
    assert conn.execute("SELECT xmin, oid FROM pg_publication_rel ORDER BY oid").fetchall() == before
    assert setup(settings, database.conninfo).created == []
    assert teardown(settings, database.conninfo, report.created)[0] == f"slot {settings.slot}"
    assert conn.execute("SELECT pubname::text FROM pg_publication").fetchall() == [("Our pub",)]
    assert slots(conn) == []


def test_setup_refuses_an_existing_slot_if_the_publication_does_not_exist(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [settings.slot])
    with pytest.raises(SourceNotReady, match=r"exists, but publication Our pub does not"):
        setup(settings, database.conninfo)
    assert conn.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)


def test_setup_that_waits_too_long_for_an_open_transaction_fails_and_names_it(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    with database.connect() as writer:
        writer.execute("BEGIN; INSERT INTO a VALUES (1)")
        with pytest.raises(CopyBlocked, match=f"pid {writer.info.backend_pid}"):
            setup(settings, database.conninfo, lock_seconds=0.5)
        writer.execute("COMMIT")
    assert setup(settings, database.conninfo).created == [f"slot {settings.slot}"]


def test_setup_reports_each_right_that_the_role_lacks(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    role = f"plain_{secrets.token_hex(4)}"
    conn.execute(f"CREATE ROLE {role} LOGIN; CREATE TABLE a (id int PRIMARY KEY);"
                 f"CREATE TABLE s (id int PRIMARY KEY); ALTER TABLE s ENABLE ROW LEVEL SECURITY;"
                 f"GRANT SELECT ON s TO {role}".encode())  # fmt: skip
    try:
        conninfo = f"{database.conninfo} user={role}"
        with pytest.raises(SourceNotReady) as caught:
            setup(settings, conninfo)
        told = str(caught.value)
        for line in (f"ALTER ROLE {role} REPLICATION;", f"GRANT SELECT ON TABLE public.a TO {role};",
                     f"ALTER ROLE {role} BYPASSRLS;", f"public.a: may not be read by role {role}"):  # fmt: skip
            assert line in [line.strip() for line in told.splitlines()]
        for part in ("public.a, public.s: not owned", "nor create a publication", "public.s: row-level security"):
            assert part in told
        assert told.endswith("`pgcdc setup --sql` prints one script for the owner")
        assert "..." not in told
        assert conn.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
        conn.execute(f"ALTER ROLE {role} REPLICATION BYPASSRLS; GRANT CREATE ON DATABASE {database.name} TO {role};"
                     f"ALTER TABLE a OWNER TO {role}; ALTER TABLE s OWNER TO {role}".encode())  # fmt: skip
        made = setup(settings, conninfo).created
        assert len(made) == 3
        teardown(settings, conninfo, made)
    finally:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_all_missing_rights_on_a_table_are_reported_in_one_message(
    conn: psycopg.Connection, database: Database
) -> None:
    """The message contains the statements that grant the rights. Semicolons separate the statements, but the last
    statement has no semicolon."""
    role = f"plain_{secrets.token_hex(4)}"
    conn.execute(f"CREATE ROLE {role} LOGIN; CREATE SCHEMA closed; CREATE TABLE closed.a (id int)".encode())
    try:
        ((oid,),) = conn.execute("SELECT 'closed.a'::regclass::oid")
        name = TableName("closed", "a")
        with connect(f"{database.conninfo} user={role}") as own:
            (told,) = lacking_rights(own, {name: [oid]}).values()
        assert told == (
            f"role {role} may not read the whole table: run GRANT USAGE ON SCHEMA closed TO {role}; "
            f"GRANT SELECT ON TABLE closed.a TO {role}"
        )
    finally:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_setup_quotes_names_that_need_quotes(conn: psycopg.Connection, database: Database, settings: Settings) -> None:
    odd = settings.model_copy(update={"publication": "p\"u'b, %s {} ☃"})
    conn.execute('CREATE SCHEMA "S{}"; CREATE TABLE "S{}"."T""%s;" (id int PRIMARY KEY)')
    report = setup(odd, database.conninfo)
    with ReplicationConnection.open(database.conninfo) as walsender:
        walsender.start(odd.slot, walsender.identify().flush_lsn, report.catalog.publications)
        walsender.end_stream()
    assert len(teardown(odd, database.conninfo, report.created)) == 3


def test_the_name_of_the_insert_only_publication_is_not_too_long_for_postgresql() -> None:
    assert inserts_name("pgcdc") == "pgcdc_inserts"
    assert len(inserts_name("ü" * 31).encode()) <= 63


@pytest.mark.parametrize(
    ("setting", "matches"),
    [
        ("", False), ("*", True), ("pgcdc_assets", True), ('"PGCDC_Assets/receive"', True), ("s1, s2", False),
        ("FIRST 1 (s1, *)", True), ("ANY 2 (a, b)", False), ("any 1 (pgcdc_assets/receive)", True), ("2 (x)", False),
    ],
)  # fmt: skip
def test_synchronous_standby_names_that_match_our_application_name_are_recognised(setting: str, matches: bool) -> None:
    assert matches_standby_names(setting, "pgcdc_assets") is matches


def test_setup_reports_an_error_if_commits_on_the_source_would_wait_for_pgcdc(
    conn: psycopg.Connection, settings: Settings, database: Database
) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    with connect(database.conninfo) as ours:
        conn.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        try:
            conn.execute("SELECT pg_reload_conf()")
            for _ in range(200):
                if ours.execute("SHOW synchronous_standby_names").fetchone() == ("*",):
                    break
            found = [finding.what for finding in check_source(ours, settings) if finding.severity == "error"]
        finally:
            conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
            conn.execute("SELECT pg_reload_conf()")
    assert any("wait for pgcdc" in what for what in found)


@pytest.mark.parametrize(
    ("number", "severity"),
    [(130010, "error"), (140017, "warning"), (150013, None), (160008, "warning"), (180000, None)],
)
def test_server_versions_that_are_too_old_or_may_lose_changes_are_reported(number: int, severity: str | None) -> None:
    assert [finding.severity for finding in _version(number)] == ([severity] if severity else [])


# The connection to the source -----------------------------------------------------------------------

FAR = ("db.example.org", "203.0.113.7")
OPEN = "without encryption"
ANOTHER = "does not check the identity of the server"


@pytest.mark.parametrize(
    ("address", "sslmode", "tls", "gss", "said"),
    [
        ("", "prefer", False, False, None),
        ("127.0.0.1", "disable", False, False, None),
        ("127.8.0.1", "prefer", False, False, None),
        ("::1", "prefer", False, False, None),
        ("::ffff:127.0.0.1", "prefer", False, False, None),
        ("10.0.0.7", "prefer", False, False, OPEN),
        ("203.0.113.7", "disable", False, False, OPEN),
        ("fe80::1%eth0", "prefer", False, False, OPEN),
        ("203.0.113.7", "prefer", True, False, ANOTHER),
        ("203.0.113.7", "require", True, False, ANOTHER),
        ("203.0.113.7", "verify-ca", True, False, ANOTHER),
        ("203.0.113.7", "verify-full", True, False, None),
        ("203.0.113.7", "prefer", False, True, None),
    ],
)
def test_a_remote_connection_without_encryption_or_check_of_the_server_is_reported(
    address: str, sslmode: str, tls: bool, gss: bool, said: str | None
) -> None:
    found = exposed(FAR[0], address, sslmode, tls=tls, gss=gss)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and said in found and FAR[0] in found)


def test_setup_does_not_warn_about_a_source_on_this_machine(database: Database) -> None:
    with connect(database.conninfo) as conn:
        found = check_source(conn, Settings(source=database.conninfo))
        assert not [finding for finding in found if "is reached" in finding.what]


def test_setup_warns_about_a_remote_source_without_encryption(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "_loopback", lambda address: False)
    with DeadPath(database) as path, connect(path.conninfo) as conn:
        assert conn.info.hostaddr == "127.0.0.1"
        (found,) = [one for one in check_source(conn, Settings(source=path.conninfo)) if "is reached" in one.what]
    assert (found.severity, found.thing) == ("warning", "source")
    assert OPEN in found.what
    assert "sslmode=verify-full" in found.do


# Every role may emit logical messages. After the statements in docs/guides/outbox.md, only the application may do so

OUTBOX = (Path(__file__).parents[2] / "docs" / "guides" / "outbox.md").read_text()
EMIT = ("true, 'app', 'text'", "false, 'app', 'text'", "true, 'app', '\\x00'::bytea")
FLUSHED = ("false, 'app', 'text', true", "false, 'app', '\\x00'::bytea, true")


@pytest.fixture
def roles(database: Database) -> Iterator[tuple[str, str]]:
    names = (f"app_{secrets.token_hex(4)}", f"any_{secrets.token_hex(4)}")
    with database.connect() as conn:
        for name in names:
            conn.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        yield names
        for name in names:
            conn.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def may_emit(conn: psycopg.Connection, role: str, arguments: str) -> bool:
    with conn.transaction(force_rollback=True):
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role)))
        try:
            conn.execute(f"SELECT pg_logical_emit_message({arguments})".encode())
        except psycopg.errors.InsufficientPrivilege:
            return False
    return True


def test_after_the_documented_statements_only_the_application_may_emit_messages(
    database: Database, roles: tuple[str, str], pg_version: int
) -> None:
    application, other = roles
    (block,) = [text for text in re.findall(r"```sql\n(.*?)```", OUTBOX, re.DOTALL) if "REVOKE EXECUTE" in text]
    every = (*EMIT, *(FLUSHED if pg_version >= 17 else ()))
    with database.connect() as conn:
        assert all(may_emit(conn, other, arguments) for arguments in every)
        conn.execute(block.replace("application", application).encode())
        assert [may_emit(conn, application, arguments) for arguments in every] == [True] * len(every)
        assert [may_emit(conn, other, arguments) for arguments in every] == [False] * len(every)
