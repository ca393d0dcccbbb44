"""Connections: session settings, typed errors, and secrets that are never shown."""

from __future__ import annotations

import pickle
import stat
import traceback
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc_assets.core.encoding import _BY_NAME, Encoding
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import CopyBlocked, PgcdcError, SettingsError, SlotLost, SourceNotReady, SourceUnavailable
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect import connection
from pgcdc_assets.source.connect.connection import connect, parsed, redacted, source_conninfo, without_secret
from pgcdc_assets.source.connect.failures import ServerError, of_refusal
from pgcdc_assets.source.connect.route import SourceRoute, _contents
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.setup.setup import check_source
from tests.fix_postgres import TEST_SETTINGS, Database
from tests.servers import new_server

SECRET = "s3cr'et w0rd"


def test_text_forms_of_values_do_not_depend_on_the_servers_defaults(database: Database) -> None:
    """The test server has unusual defaults for the settings that change these text forms, see fix_postgres."""
    query = (
        "SELECT '2024-01-02 03:04:05.678901+00'::timestamptz::text, '1 day 02:00'::interval::text, "
        "(0.1::float8 + 0.2)::text, '\\x00ff'::bytea::text, 'pg_class'::regclass::text"
    )
    with connect(database.conninfo) as conn:
        row = conn.execute(query.encode()).fetchone()
        assert row == ("2024-01-02 03:04:05.678901+00", "1 day 02:00:00", "0.30000000000000004", "\\x00ff", "pg_class")
        assert conn.autocommit
    with ReplicationConnection.open(database.conninfo) as walsender:
        assert walsender.execute(query) == [row]


def test_our_sessions_have_their_settings_even_if_a_pooler_drops_the_startup_options(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PgBouncer drops the startup options if it is configured to ignore unknown parameters."""
    monkeypatch.setattr(connection, "session_options", lambda **more: "")
    shown = "SELECT current_setting('DateStyle'), current_setting('TimeZone'), current_setting('search_path')"
    told = ("ISO, DMY", "UTC", "pg_catalog")
    with connect(database.conninfo, row_security=False) as conn:
        assert conn.execute(shown.encode()).fetchone() == told
        assert conn.execute("SHOW row_security").fetchone() == ("off",)
    with ReplicationConnection.open(database.conninfo) as walsender:
        assert walsender.execute(shown) == [told]


def test_timeouts_that_are_set_for_a_database_do_not_apply_to_our_sessions(database: Database) -> None:
    names = ["statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
    with database.connect() as admin:
        if admin.info.server_version >= 170000:
            names.append("transaction_timeout")
        for name in names:
            admin.execute(f"ALTER DATABASE {database.name} SET {name} = '7s'".encode())
    with connect(database.conninfo) as conn:
        assert {conn.execute(f"SHOW {name}".encode()).fetchone() for name in names} == {("0",)}
    with ReplicationConnection.open(database.conninfo) as walsender:
        assert {walsender.execute(f"SHOW {name}")[0] for name in names} == {("0",)}
        assert walsender.execute("SHOW wal_sender_timeout") == [("1min",)]


def test_options_in_the_users_conninfo_are_kept_but_our_options_override_them() -> None:
    conninfo = "host=h options='-c work_mem=1MB -c TimeZone=Asia/Tokyo' connect_timeout=3"
    merged = parsed(source_conninfo(conninfo, application_name="x"))
    assert merged["options"].startswith("-c work_mem=1MB")
    assert merged["options"].index("TimeZone=UTC") > merged["options"].index("TimeZone=Asia/Tokyo")
    assert (merged["connect_timeout"], merged["keepalives_idle"]) == ("3", "30")


def test_a_lost_connection_raises_a_retryable_error(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])
        with pytest.raises(SourceUnavailable) as caught:
            conn.execute("SELECT 1")
        assert caught.value.retryable
        with pytest.raises(SourceUnavailable):
            conn.execute("SELECT 1")


@pytest.mark.parametrize(
    "conninfo",
    [
        f"host=/nowhere dbname=d password='{SECRET.replace(chr(39), chr(92) + chr(39))}'",
        f"postgresql://u:{SECRET}@127.0.0.1:1/d".replace(" ", "%20").replace("'", "%27"),
        f"host=127.0.0.1 passwrd {SECRET}",
        f"postgresql://u:{SECRET}@[::1/d",
    ],
)
def test_no_error_contains_a_password(conninfo: str) -> None:
    for open_it in (connect, ReplicationConnection.open):
        with pytest.raises((SourceUnavailable, SettingsError)) as caught:
            open_it(conninfo)
        told = "".join(traceback.format_exception(caught.value)) + str(caught.value) + repr(caught.value.thing)
        assert "s3cr" not in told
        assert "w0rd" not in told
    assert "s3cr" not in redacted(conninfo)


def test_a_redacted_conninfo_names_host_and_database() -> None:
    assert redacted("postgresql://u:pw@h:5433/d?sslmode=require") == "u@h:5433/d"
    assert redacted("service=prod password=pw") == "service prod"
    assert redacted("dbname=d") == "local socket/d"
    assert without_secret("bad pw here", "host=h password=pw") == "bad *** here"


def test_a_refused_connection_is_not_retryable_if_waiting_cannot_help(database: Database) -> None:
    with pytest.raises(SourceNotReady, match="database") as caught:
        connect(database.server.conninfo_of("no_such_database"))
    assert not caught.value.retryable
    with pytest.raises(SourceNotReady):
        connect(f"{database.conninfo} user=nobody_here")
    assert isinstance(of_refusal('FATAL:  password authentication failed for user "x"').typed(), SourceNotReady)
    assert isinstance(of_refusal("FATAL:  the database system is starting up").typed(), SourceUnavailable)


WITHOUT_REPLICATION = "ALTER ROLE ... REPLICATION"
TOO_FEW = "raise max_wal_senders"
POOLER = "those of PostgreSQL: a pooler or proxy"


@pytest.mark.parametrize(
    ("text", "kind", "advice"),
    [
        ("FATAL:  must be superuser or replication role to start walsender", SourceNotReady, WITHOUT_REPLICATION),
        ("FATAL:  permission denied to start WAL sender", SourceNotReady, WITHOUT_REPLICATION),
        ('FATAL:  number of requested standby connections exceeds "max_wal_senders" (currently 10)',
         SourceUnavailable, TOO_FEW),
        ("FATAL:  number of requested standby connections exceeds max_wal_senders (currently 0)",
         SourceUnavailable, TOO_FEW),
        ("FATAL:  unsupported startup parameter: replication", SourceNotReady, POOLER),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "u", database "d"', SourceNotReady, "pg_hba.conf"),
    ],
)  # fmt: skip
def test_the_error_of_a_refused_replication_connection_says_what_to_do(
    text: str, kind: type[PgcdcError], advice: str
) -> None:
    error = of_refusal(f'connection to server at "h", port 5432 failed: {text}').typed("u@h/d")
    assert type(error) is kind
    assert text in error.what
    assert advice in str(error.do)


def test_the_error_at_a_roles_connection_limit_says_how_many_connections_are_needed(database: Database) -> None:
    role = f"few_{database.name}"
    with database.connect() as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1".encode())
        try:
            with connect(f"{database.conninfo} user={role}"), pytest.raises(SourceUnavailable) as caught:
                connect(f"{database.conninfo} user={role}")
        finally:
            admin.execute(f"DROP ROLE {role}".encode())
    assert "too many connections for role" in caught.value.what
    assert "pgcdc needs 3 connections to follow" in str(caught.value.do)
    assert "host and port" not in str(caught.value)


@pytest.mark.parametrize("text", [
    "the database system is starting up", "the database system is shutting down",
    "the database system is in recovery mode", "the database system is not yet accepting connections",
])  # fmt: skip
def test_an_error_of_a_server_that_starts_or_stops_says_to_wait_and_run_again(text: str) -> None:
    error = of_refusal(f"connection failed: FATAL:  {text}").typed()
    assert (type(error), error.do) == (
        SourceUnavailable,
        "wait until the server has started, then run the command again",
    )


def test_the_error_for_a_server_that_allows_no_walsenders_names_max_wal_senders(
    tmp_path: Path, pg_version: int
) -> None:
    with new_server(tmp_path / "pg", pg_version, settings={**TEST_SETTINGS, "max_wal_senders": "0"}) as server:
        with pytest.raises(SourceUnavailable) as caught:
            ReplicationConnection.open(server.conninfo_of("postgres"))
        assert TOO_FEW in str(caught.value)
        settings = Settings(source=server.conninfo_of("postgres"))
        with connect(server.conninfo_of("postgres")) as conn:
            found = [finding for finding in check_source(conn, settings) if finding.severity == "error"]
    assert [finding.do for finding in found if "walsenders" in finding.what] == [f"{TOO_FEW} and restart the server"]


def test_a_pooler_that_drops_the_replication_parameter_is_reported(database: Database) -> None:
    """The pooler opens an ordinary session, in which the first replication command is a syntax error."""
    with ReplicationConnection(connect(database.conninfo)) as session:
        for command in (session.identify, lambda: session.create_slot("s", temporary=True)):
            with pytest.raises(SourceNotReady) as caught:
                command()
            assert POOLER in str(caught.value)


@pytest.mark.parametrize(
    ("state", "message", "kind"),
    [
        ("55P03", "canceling statement due to lock timeout", CopyBlocked),
        ("55000", 'can no longer get changes from replication slot "s"', SlotLost),
        ("55000", 'can no longer access replication slot "s"', SlotLost),
        ("58P01", "requested WAL segment 000000010000000000000001 has already been removed", SlotLost),
        ("57P01", "terminating connection due to administrator command", SourceUnavailable),
        (None, "server closed the connection unexpectedly", SourceUnavailable),
        ("53300", 'too many connections for role "r"', SourceUnavailable),
        ("55000", "logical decoding requires wal_level >= logical", SourceNotReady),
    ],
)
def test_server_errors_become_pgcdc_errors_of_the_matching_class(
    state: str | None, message: str, kind: type[PgcdcError]
) -> None:
    assert type(ServerError(state, message).typed()) is kind


@pytest.mark.parametrize("wanted", ["read-only", "standby"])
def test_the_error_names_target_session_attrs_if_this_setting_rejects_the_server(
    wanted: str, database: Database
) -> None:
    with pytest.raises(SourceUnavailable, match=r"is not .*; `target_session_attrs` in the setting") as refused:
        connect(make_conninfo(database.conninfo, target_session_attrs=wanted))
    assert "check that the server runs" not in str(refused.value)


def test_a_service_file_that_sets_replication_still_gives_an_ordinary_session(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = conninfo_to_dict(database.conninfo)
    lines = [f"{name}={value}" for name, value in given.items()]
    (tmp_path / "services").write_text("\n".join(["[shop]", *lines, "replication=true", ""]))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with connect("service=shop") as conn:
        assert conn.execute("SELECT %s", [1]).fetchone() == (1,)


# pgcdc's decoding of every server encoding, compared with the server's own conversion to UTF8 -------

_HIGH = range(0xA1, 0xFF)
_TRIED = """
CREATE FUNCTION converted(raw bytea, encoding text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN RETURN convert_from(raw, encoding); EXCEPTION WHEN untranslatable_character OR character_not_in_repertoire
THEN RETURN NULL; END $$
"""
_VALID = """
CREATE FUNCTION valid(raw bytea, encoding text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN PERFORM length(raw, encoding); RETURN true; EXCEPTION WHEN character_not_in_repertoire THEN RETURN false; END $$
"""


def _sequences(name: str) -> list[bytes]:
    """Every possible character of the encoding, and some sequences of bytes that are not a character."""
    single = [bytes([one]) for one in range(0x80, 0x100)]
    if not name.startswith("EUC"):
        return single
    double = [bytes(pair) for pair in product(_HIGH, _HIGH)]
    half = [bytes([0x8E, one]) for one in range(0xA0, 0x100)]
    return single + double + half + [b"\x8f" + pair for pair in double]


def test_every_character_is_decoded_as_the_server_converts_it(database: Database) -> None:
    with database.connect() as conn:
        conn.execute(_TRIED)
        conn.execute(_VALID)
        for name in sorted(_BY_NAME.keys() - {"UTF8", "SQL_ASCII"}):
            encoding = Encoding.of(name)
            assert encoding.name == name
            found = conn.execute(
                "SELECT raw, converted(raw, %(name)s) FROM unnest(%(raw)s::bytea[]) AS raw WHERE valid(raw, %(name)s)",
                {"name": name, "raw": _sequences(name)},
            ).fetchall()
            assert len(found) >= 0x60
            for of_server, text in found:
                try:
                    ours = encoding.decode(bytes(of_server))
                except UnicodeDecodeError:
                    ours = None
                # Python also decodes characters of older Japanese character sets that the server cannot convert to
                # UTF8.
                assert ours == text or (text is None and name in ("EUC_JP", "EUC_JIS_2004")), (name, bytes(of_server))
                if text is not None:
                    assert encoding.decode(encoding.encode(text)) == text


# A route contains everything that an executor needs to connect to the source without the driver's environment
# variables and files

ROUTE_SECRET = "it's a secret"


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory, pg_version: int) -> Iterator[EmbeddedServer]:
    """A server that requires a password."""
    with new_server(tmp_path_factory.mktemp("walled") / "server", pg_version, settings=TEST_SETTINGS) as server:
        with psycopg.connect(server.conninfo_of("postgres"), autocommit=True) as conn:
            conn.execute("CREATE ROLE walled LOGIN PASSWORD 'it''s a secret'")
            rules = server.data / "pg_hba.conf"
            rules.write_text("local all walled scram-sha-256\n" + rules.read_text())
            conn.execute("SELECT pg_reload_conf()")
        yield server


def _found(conninfo: str) -> SourceRoute:
    with connect(conninfo) as conn:
        return SourceRoute.of(conn, conninfo)


def _reaches(route: SourceRoute) -> bool:
    with route.here() as conninfo, connect(conninfo) as conn:
        return conn.execute("SELECT current_user::text, current_database()::text").fetchone() == ("walled", "postgres")


def test_a_route_contains_the_values_of_the_libpq_environment_variables(
    walled: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PGHOST", str(walled.socket_folder))
        patch.setenv("PGUSER", "walled")
        patch.setenv("PGPASSWORD", ROUTE_SECRET)
        route = _found("dbname=postgres")
    with pytest.raises((SourceUnavailable, SourceNotReady)):
        connect("dbname=postgres").close()
    assert _reaches(route)


def test_a_route_contains_the_contents_of_service_and_password_files(
    walled: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, passwords = tmp_path / "services", tmp_path / "passwords"
    services.write_text(f"[prod]\nhost={walled.socket_folder}\nuser=walled\ndbname=postgres\n")
    passwords.write_text(f"*:*:*:walled:{ROUTE_SECRET}\n")
    passwords.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setenv("PGSERVICEFILE", str(services))
        patch.setenv("PGPASSFILE", str(passwords))
        route = _found("service=prod")
    services.unlink()
    passwords.unlink()
    assert _reaches(route)
    assert not {"service", "passfile"} & conninfo_to_dict(route.conninfo).keys()


def test_a_route_contains_only_the_server_that_was_reached_if_the_conninfo_lists_several(database: Database) -> None:
    there = str(database.server.socket_folder)
    route = _found(make_conninfo(database.conninfo, host=f"/nowhere,{there}", port="5432,5432"))
    assert conninfo_to_dict(route.conninfo)["host"] == there


def test_a_route_contains_the_options_of_the_users_conninfo(database: Database) -> None:
    given = make_conninfo(database.conninfo, options="-c work_mem=7MB")
    with _found(given).here() as conninfo, connect(conninfo) as conn:
        assert conn.execute("SHOW work_mem").fetchone() == ("7MB",)


def test_a_route_contains_the_tls_files_and_deletes_its_copies_of_them_after_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql" / "root.crt").write_bytes(b"usual root")
    (tmp_path / "mine.key").write_bytes(b"a key")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"host": "db", "sslkey": str(tmp_path / "mine.key")}
    files = _contents(given)
    assert files == {"sslkey": b"a key", "sslrootcert": b"usual root"}
    assert _contents({**given, "sslmode": "disable"}) == {}
    assert _contents({"host": "db", "sslrootcert": "system"}) == {}
    with SourceRoute("host=db", files).here() as conninfo:
        paths = [Path(str(conninfo_to_dict(conninfo)[name])) for name in ("sslkey", "sslrootcert")]
        assert [path.read_bytes() for path in paths] == [b"a key", b"usual root"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert not any(path.exists() for path in paths)


def test_a_route_can_be_pickled_and_its_repr_shows_no_secret() -> None:
    route = SourceRoute("host=db password=secret", {"sslkey": b"secret"})
    assert pickle.loads(pickle.dumps(route)) == route
    assert "secret" not in repr(route)
