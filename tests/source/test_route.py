"""A route contains everything that an executor needs to connect to the source without the driver's environment
variables and files."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import SourceNotReady, SourceUnavailable
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.connect.route import SourceRoute, _contents
from tests.fix_postgres import TEST_SETTINGS, Database
from tests.servers import new_server

SECRET = "it's a secret"


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


def test_a_route_contains_the_libpq_variables(walled: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PGHOST", str(walled.socket_folder))
        patch.setenv("PGUSER", "walled")
        patch.setenv("PGPASSWORD", SECRET)
        route = _found("dbname=postgres")
    with pytest.raises((SourceUnavailable, SourceNotReady)):
        connect("dbname=postgres").close()
    assert _reaches(route)


def test_a_route_contains_the_contents_of_service_and_password_files(
    walled: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, passwords = tmp_path / "services", tmp_path / "passwords"
    services.write_text(f"[prod]\nhost={walled.socket_folder}\nuser=walled\ndbname=postgres\n")
    passwords.write_text(f"*:*:*:walled:{SECRET}\n")
    passwords.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setenv("PGSERVICEFILE", str(services))
        patch.setenv("PGPASSFILE", str(passwords))
        route = _found("service=prod")
    services.unlink()
    passwords.unlink()
    assert _reaches(route)
    assert not {"service", "passfile"} & conninfo_to_dict(route.conninfo).keys()


def test_of_several_servers_a_route_contains_the_server_with_the_snapshot(database: Database) -> None:
    there = str(database.server.socket_folder)
    route = _found(make_conninfo(database.conninfo, host=f"/nowhere,{there}", port="5432,5432"))
    assert conninfo_to_dict(route.conninfo)["host"] == there


def test_a_route_contains_the_options_of_the_user(database: Database) -> None:
    given = make_conninfo(database.conninfo, options="-c work_mem=7MB")
    with _found(given).here() as conninfo, connect(conninfo) as conn:
        assert conn.execute("SHOW work_mem").fetchone() == ("7MB",)


def test_a_route_contains_tls_files_which_are_deleted_after_use(
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


def test_a_route_can_be_pickled_and_is_never_printed() -> None:
    route = SourceRoute("host=db password=secret", {"sslkey": b"secret"})
    assert pickle.loads(pickle.dumps(route)) == route
    assert "secret" not in repr(route)
