"""The most common mistakes of users. The error message names the problem, the object, and what to do.

Each entry of ``MISTAKES`` contains a function that makes the mistake in a project folder, the command, its exit code,
and phrases that the message must contain. The message never contains a traceback, a secret, or texts of the libraries.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.cli.conftest import Shell
from tests.servers import new_server
from tests.waiting import wait_for

SECRET = "geheim"
NEVER = (
    SECRET, "Traceback", "unexpected", "Error:", "Input should", "pydantic", "psycopg", "ScannerError", "see the log"
)  # fmt: skip
_PENDING = "SELECT pending_restart FROM pg_settings WHERE name = 'wal_level'"
LINES = 13
"""The longest allowed message, in lines."""


@dataclass
class Rig:
    """A shell, together with the other objects that the mistakes need."""

    shell: Shell
    role: str
    """A role without privileges. pg_hba.conf requires its password, also on the Unix socket."""
    undone: ExitStack
    ports: list[int] = field(default_factory=list)

    def source(self, **changed: str) -> None:
        self.shell.set(SOURCE=make_conninfo(self.shell.database.conninfo, **changed))

    def file(self, text: str) -> None:
        Path("pgcdc.yaml").write_text(text)

    def set_up(self) -> None:
        self.shell.pgcdc("setup")

    def sql(self, statement: str) -> None:
        with self.shell.database.connect() as conn:
            conn.execute(statement.encode())

    @property
    def slot(self) -> str:
        return f"s_{self.shell.database.name}"


Prepare = Callable[[Rig], object]


def set_up_then(more: Prepare) -> Prepare:
    """Returns a function that sets up a healthy project and then makes the mistake."""

    def prepare(rig: Rig) -> None:
        rig.set_up()
        more(rig)

    return prepare


@dataclass(frozen=True)
class Mistake:
    name: str
    prepare: Prepare
    arguments: str
    code: int
    said: tuple[str, ...]
    unsaid: tuple[str, ...] = ()


def _in_use(rig: Rig) -> None:
    taken = rig.undone.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    rig.ports.append(taken.getsockname()[1])


def _held(rig: Rig) -> None:
    rig.set_up()
    other = ReplicationConnection.open(rig.shell.database.conninfo, application_name="somebody")
    rig.undone.enter_context(other)
    from pgcdc_assets.core.lsn import ZERO

    other.start(rig.slot, ZERO, [rig.slot])


def _few_rights(rig: Rig) -> None:
    rig.sql(f"ALTER ROLE {rig.role} REPLICATION")
    rig.source(user=rig.role, password=SECRET)


def _no_logical(rig: Rig) -> None:
    folder = rig.shell.folder.parent / "replica"
    server = new_server(folder, rig.shell.database.server.version, settings={"wal_level": "replica"})
    rig.undone.enter_context(server)
    with psycopg.connect(server.conninfo, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY)")
    rig.shell.set(SOURCE=server.conninfo)


def _no_restart(rig: Rig) -> None:
    _no_logical(rig)
    with psycopg.connect(os.environ["PGCDC_SOURCE"], autocommit=True) as conn:
        conn.execute("ALTER SYSTEM SET wal_level = logical")
        conn.execute("SELECT pg_reload_conf()")
        wait_for(lambda: conn.execute(_PENDING).fetchone() == (True,), what="the new value")


def _odd_name(rig: Rig) -> None:
    rig.sql('CREATE TABLE "two\nlines\u202e" (id int PRIMARY KEY)')
    rig.set_up()


def _received(rig: Rig) -> None:
    """Makes a change log, but no copy of a table."""
    rig.set_up()
    for command in ("pause apply", "sync", "resume apply"):
        rig.shell.pgcdc(*command.split())


def _another_kind_of_slot(rig: Rig) -> None:
    _received(rig)
    rig.shell.set(TWO_PHASE="true")
    # The next command must stop before it starts Spark, which would print messages of its own.
    rig.shell.patch.setenv("JAVA_HOME", "/nowhere/java")


def _embedded_far_away(rig: Rig) -> None:
    rig.shell.set(SOURCE="embedded")
    rig.file(f"lake_shared: true\nspark: {{{HEAD}}}\n")


HEAD = 'master: "spark://head:7077"'
TWO_PHASE = (
    "slot {slot}: was created without two_phase, but the setting `two_phase` is true",
    "set `two_phase` to false",
)
PATTERNS = '["public.*", "-public.audit_*"]'
MISTAKES = (
    # Mistakes about the source's address.
    Mistake("host", lambda r: r.shell.set(SOURCE="host=nowhere.invalid dbname=x"), "setup", 1,
            ("nowhere.invalid", "setting `source`", "PGCDC_SOURCE")),
    Mistake("port", lambda r: r.shell.set(SOURCE="host=127.0.0.1 port=1 dbname=x"), "setup", 1,
            ("127.0.0.1:1/x: ", "refused", "check that the server runs, and that host and port in")),
    Mistake("source down", set_up_then(lambda r: r.source(host="/nowhere")), "status", 1,
            ("/nowhere", "check that the server runs")),
    Mistake("database", lambda r: r.source(dbname="nowhere"), "setup", 1,
            ('database "nowhere" does not exist', "check the database's name in the setting `source`")),
    Mistake("role", lambda r: r.source(user="nobody_here"), "setup", 1, ("nobody_here", "allow this user to connect")),
    Mistake("wrong password", lambda r: r.source(user=r.role, password="wrong"), "setup", 1,
            ("password authentication failed", "check PGPASSWORD, the service file or the passfile")),
    Mistake("no password", lambda r: r.source(user=r.role), "setup", 1, ("no password supplied", "check PGPASSWORD")),
    Mistake("conninfo", lambda r: r.shell.set(SOURCE=f"host=x password='{SECRET}"), "status", 2,
            ("setting `source`", "is not a libpq conninfo or URL", "write it like `host=")),
    Mistake("port in words", lambda r: r.shell.set(SOURCE=f"host=x port={SECRET}"), "setup", 2, ("setting `source`",)),
    Mistake("no source", lambda r: r.shell.set(SOURCE=None), "status", 2,
            ("neither PGCDC_SOURCE nor `source`", "embedded")),
    Mistake("mistyped variable", lambda r: r.shell.set(SOURCE=None, SORCE=f"host=x password={SECRET}"), "status", 2,
            ("PGCDC_SORCE is not a setting; did you mean PGCDC_SOURCE?", "neither PGCDC_SOURCE nor `source`")),
    # The source lacks something.
    Mistake("wal_level", _no_logical, "setup", 1,
            ("source: has wal_level = replica", "ALTER SYSTEM SET wal_level = logical;", "restart the server")),
    Mistake("wal_level before the restart", _no_restart, "setup", 1,
            ("source: has wal_level = replica; a new value is set, but needs a restart", "restart the server"),
            ("ALTER SYSTEM",)),
    Mistake("REPLICATION", lambda r: r.source(user=r.role, password=SECRET), "setup", 1,
            ("may not replicate", "ALTER ROLE {role} REPLICATION;")),
    Mistake("SELECT", _few_rights, "setup", 1,
            ("public.a, public.b: may not be read by role", "\n    GRANT SELECT ON TABLE public.a TO {role};\n",
             "\n    GRANT SELECT ON TABLE public.b TO {role};\n", "`pgcdc setup --sql`"), ("REPLICATION;",)),
    Mistake("no table", lambda r: r.sql("DROP TABLE a, b"), "setup", 1, ("has no table to mirror", "create one")),
    Mistake("dropped publication", set_up_then(lambda r: r.sql(f"DROP PUBLICATION {r.slot}")), "status", 1,
            ("publication {slot} does not exist: changes are being lost", "run `pgcdc teardown`")),
    Mistake("slot held", _held, "status", 1,
            ("slot {slot} is in use by another process: pid", "'somebody'", "pg_terminate_backend(")),
    # Mistakes in settings.
    Mistake("password in the file", lambda r: r.file(f"source: host=x password={SECRET}\n"), "status", 2,
            ("setting `source`", "contains a password, and pgcdc.yaml must not", "PGPASSWORD")),
    Mistake("password in the file's URL", lambda r: r.file(f"source: postgresql://u:{SECRET}@h/d\n"), "status", 2,
            ("setting `source`", "contains a password, and pgcdc.yaml must not")),
    Mistake("unknown setting", lambda r: r.file("sorce: host=x\n"), "status", 2,
            ("setting `sorce`: is unknown; did you mean `source`?",)),
    Mistake("unknown value", lambda r: r.file("schema_changes: rewrit\n"), "status", 2,
            ("setting `schema_changes`: must be 'rewrite', 'metadata' or 'set_aside'",)),
    Mistake("negative number", lambda r: r.file("batch_seconds: -1\n"), "status", 2,
            ("setting `batch_seconds`: must be greater than 0",)),
    Mistake("no YAML", lambda r: r.file(f"lake: x\nsource: host: x {SECRET}\n"), "status", 2,
            ("pgcdc.yaml: is not YAML at line 2, column 13", "one `name: value` per line")),
    Mistake("a tab", lambda r: r.file("spark:\n\tmaster: local\n"), "status", 2,
            ("pgcdc.yaml: is not YAML at line 2, column 1",)),
    Mistake("tables in one text", lambda r: r.file("tables: public.*\n"), "setup", 2,
            ("setting `tables`: must be a list of patterns", PATTERNS)),
    Mistake("tables in the environment", lambda r: r.shell.set(TABLES="public.*"), "setup", 2,
            ("setting `tables`: the variable PGCDC_TABLES does not contain JSON", f"PGCDC_TABLES='{PATTERNS}'")),
    Mistake("no pattern", lambda r: r.file('tables: ["a.b.c"]\n'), "setup", 2,
            ("setting `tables`", "'a.b.c' is not a pattern; write schema.table")),
    Mistake("pattern of nothing", lambda r: r.file('tables: ["public.aa"]\n'), "setup", 1,
            ("pattern `public.aa`: in the setting `tables` matches no table", "did you mean public.a?")),
    Mistake("one pattern of two", lambda r: r.file('tables: ["a", "-public.audit_*"]\n'), "setup", 0,
            ("warning: pattern `-public.audit_*`: in the setting `tables` matches no table",)),
    Mistake("size", lambda r: r.shell.set(BATCH_BYTES="plenty"), "status", 2,
            ("setting `batch_bytes`", "'plenty' is not a size; write it like 256MiB")),
    Mistake("span of time", lambda r: r.shell.set(RETENTION="1s"), "status", 2,
            ("setting `retention`", "'1s' is not a duration from 0 to 36500 days; write it like 7 days")),
    Mistake("slot's name", lambda r: r.shell.set(SLOT="My-Slot"), "setup", 2, ("setting `slot`", "a-z, 0-9 and _")),
    Mistake("lake's URL", lambda r: r.shell.set(LAKE="https://bucket/lake"), "status", 2,
            ("setting `lake`: is neither a folder on this machine nor a URL like s3://",)),
    Mistake("lake not writable", set_up_then(lambda r: r.shell.set(LAKE="/proc/lake")), "sync", 1,
            ("lake /proc/lake: cannot be written", "setting `lake`")),
    Mistake("lake not writable at setup", lambda r: r.shell.set(LAKE="/proc/lake"), "setup", 1,
            ("lake /proc/lake: cannot be written", "setting `lake`"), ("published",)),
    Mistake("executors elsewhere", lambda r: r.file("spark: spark://head:7077\n"), "setup", 2,
            ("setting `spark`: executors of spark://head:7077 cannot be used with a lake on a local path",
             "set `lake` to a URL", "`lake_shared: true`")),
    Mistake("no archive", lambda r: r.file(f"lake_shared: true\nspark: {{{HEAD}, archive: x.tar.gz}}\n"), "sync", 2,
            ("setting `spark`: there is no archive", "x.tar.gz; make it with `pgcdc pack`")),
    Mistake("embedded, and executors elsewhere", _embedded_far_away, "setup", 2,
            ("setting `source`: is the embedded server, which listens only on this machine", "spark://head:7077")),
    Mistake("two_phase of a run", _another_kind_of_slot, "sync", 1, TWO_PHASE, ("Java", "copying")),
    Mistake("two_phase of a verify", _another_kind_of_slot, "verify", 1, TWO_PHASE, ("Java",)),
    # The machine lacks something.
    Mistake("JAVA_HOME", lambda r: r.shell.patch.setenv("JAVA_HOME", "/nowhere/java"), "setup", 1,
            ("Java: no `java` in /nowhere/java/bin (JAVA_HOME is /nowhere/java)", "install Java 17")),
    Mistake("DAGSTER_HOME", set_up_then(lambda r: r.shell.patch.setenv("DAGSTER_HOME", "/nowhere/x")), "sync", 2,
            ("DAGSTER_HOME: /nowhere/x is not a folder", "create it, or unset the variable")),
    Mistake("port of the UI", _in_use, "up --port {port}", 1, ("port: {port} is in use", "--port")),
    # Mistakes in arguments.
    Mistake("not set up", lambda r: None, "verify", 1, ("there is no saved catalog", "run `pgcdc setup`")),
    Mistake("unknown table", lambda r: r.set_up(), "repair public.aa --range 0/1..0/2", 1,
            ("public.aa: is not among the published tables; did you mean public.a?",), ("range",)),
    Mistake("table to copy", lambda r: r.set_up(), "snapshot nowhere", 1,
            ("public.nowhere: is not among the published tables", "`pgcdc status`")),
    Mistake("table to verify", lambda r: r.set_up(), "verify public.aa", 1,
            ("public.aa: is not among the published tables; did you mean public.a?",)),
    Mistake("table to heal", lambda r: r.set_up(), "heal public.aa", 1,
            ("public.aa: is not among the published tables; did you mean public.a?",)),
    Mistake("table to forget", _received, "forget nowhere --yes", 1,
            ("public.nowhere: has no mirror in this lake", "`pgcdc status`")),
    Mistake("name with a line's end", _odd_name, "status", 0, (r'public."two\nlines\u202e"  waiting',)),
)  # fmt: skip


@pytest.fixture
def rig(shell: Shell, server: EmbeddedServer) -> Iterator[Rig]:
    role = f"mistaken_{secrets.token_hex(4)}"
    rules = server.data / "pg_hba.conf"
    before = rules.read_text()
    with shell.database.connect() as conn, ExitStack() as undone:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), SECRET))
        undone.callback(conn.execute, f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
        rules.write_text(f"local all {role} scram-sha-256\n{before}")
        undone.callback(conn.execute, "SELECT pg_reload_conf()")
        undone.callback(rules.write_text, before)
        conn.execute("SELECT pg_reload_conf()")
        for name in ("PGPASSWORD", "PGPASSFILE"):
            shell.patch.delenv(name, raising=False)
        yield Rig(shell, role, undone)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_error_for_a_mistake_names_the_problem_and_what_to_do(mistake: Mistake, rig: Rig) -> None:
    mistake.prepare(rig)
    words = {"role": rig.role, "slot": rig.slot, "port": rig.ports[0] if rig.ports else 0}
    said = rig.shell.pgcdc(*mistake.arguments.format(**words).split(), expect=mistake.code)
    for phrase in mistake.said:
        wanted = phrase
        for name, value in words.items():
            wanted = wanted.replace("{" + name + "}", str(value))
        assert wanted in said, said
    for phrase in (*NEVER, *mistake.unsaid):
        assert phrase not in said, said
    assert len(said.splitlines()) <= LINES, said


def test_at_least_twenty_different_mistakes_are_tested() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 20
