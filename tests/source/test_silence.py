"""A server sends nothing more, but the connection stays open. Every kind of wait fails within its time limit."""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pgcdc_assets.errors import SettingsError, SourceUnavailable
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect import silence
from pgcdc_assets.source.connect.connection import SourceConnection, connect
from pgcdc_assets.source.connect.silence import Patience, Silence
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.snapshot.export import exported_snapshot
from pgcdc_assets.source.snapshot.pieces import pieces
from pgcdc_assets.source.snapshot.reading import Interrupted, copy_blocks
from tests.deadpath import DeadPath
from tests.fix_postgres import Database
from tests.waiting import wait_for

NEW = pytest.mark.parametrize("new", [False, True], ids=["no connection is served", "new connections are served"])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceConnection, "patience", Patience(0.5, 1, 0.5))
    monkeypatch.setattr(silence, "CHECK_SECONDS", 2)


@pytest.fixture
def path(database: Database) -> Iterator[DeadPath]:
    with DeadPath(database) as path:
        yield path


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@contextmanager
def soon(action: Callable[[], object], seconds: float = 0.7) -> Iterator[None]:
    """Runs ``action`` after ``seconds``, while the block of the ``with`` statement waits."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@NEW
def test_a_query_fails_if_the_server_sends_nothing(path: DeadPath, new: bool) -> None:
    with connect(path.conninfo) as conn:
        conn.execute("SELECT 1")
        path.die(new=new)
        with within(20), pytest.raises(SourceUnavailable, match="has sent nothing for 1 s"):
            conn.execute("SELECT 1")
        assert conn.closed


@pytest.mark.long
@NEW
def test_a_running_query_fails_if_its_connection_dies(path: DeadPath, new: bool) -> None:
    with (
        connect(path.conninfo) as conn, soon(lambda: path.die(new=new)), within(20),
        pytest.raises(SourceUnavailable, match="has sent nothing"),
    ):  # fmt: skip
        conn.execute("SELECT pg_sleep(1.2)")


@pytest.mark.long
@NEW
def test_a_copy_is_interrupted_if_the_server_sends_nothing(path: DeadPath, database: Database, new: bool) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, x text); CREATE PUBLICATION p FOR TABLE t")
        conn.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 300) FROM generate_series(1, 5000) AS i")
        (table,) = read_tables(conn, ["p"])
        with exported_snapshot(database.conninfo) as snapshot:
            (piece,) = pieces(conn, table, 1 << 30)
            blocks = copy_blocks(path.conninfo, snapshot.name, piece, 1 << 16)
            next(blocks)
            path.die(new=new)
            # After Interrupted, the caller reads the piece again on a new connection. If the source cannot be reached,
            # this connection fails.
            with within(30), pytest.raises(Interrupted, match="has sent nothing"):
                list(blocks)


@pytest.mark.long
@pytest.mark.parametrize("kind", [connect, ReplicationConnection.open])
def test_a_connection_attempt_fails_if_the_server_sends_nothing(path: DeadPath, kind: Callable[[str], object]) -> None:
    path.die()
    with within(10), pytest.raises(SourceUnavailable, match="timeout"):
        kind(f"{path.conninfo} connect_timeout=2")


@pytest.mark.long
def test_a_query_may_wait_for_a_lock_longer_than_for_a_silent_server(database: Database) -> None:
    """During the wait, ``on_wait`` gets a text that names the session that holds the lock."""
    told: list[str] = []
    with database.connect() as holder, connect(database.conninfo) as conn:
        holder.execute("CREATE TABLE t ()")
        holder.execute("BEGIN; LOCK TABLE t")
        conn.on_wait = told.append
        with soon(lambda: holder.execute("COMMIT"), 3):
            conn.execute("SELECT FROM public.t")
        assert told
        assert set(told) == {f"pgcdc's session waits for a lock held by pid {holder.info.backend_pid}"}
        conn.execute("SELECT pg_sleep(2.5)")
        assert "busy (Timeout)" in told[-1]


def test_a_long_wait_is_logged_if_on_wait_is_not_set(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    with ReplicationConnection.open(database.conninfo) as walsender, caplog.at_level(logging.WARNING):
        walsender.execute("SELECT pg_sleep(2)")
    assert "pgcdc's session is busy" in caplog.text


@pytest.mark.long
def test_an_exception_in_a_signal_handler_interrupts_a_wait(path: DeadPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception ends the wait at once. The session cannot be used afterwards."""
    monkeypatch.setattr(SourceConnection, "patience", Patience(60, 60))
    for query in (connect(path.conninfo).execute, ReplicationConnection.open(path.conninfo).execute):
        path.die()
        with soon(_thread.interrupt_main), within(6), pytest.raises(KeyboardInterrupt):
            query("SELECT pg_sleep(30)")
        path.die(new=True)


def test_an_interrupted_query_is_ended_on_the_server(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as other:
        pid = conn.info.backend_pid
        with soon(_thread.interrupt_main), within(6), pytest.raises(KeyboardInterrupt):
            conn.execute("SELECT pg_sleep(60)")
        query = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        wait_for(lambda: other.execute(query, [pid]).fetchone() is None, what="the end of the session")


def test_only_time_spent_listening_counts_as_silence() -> None:
    """While a process is stopped, or is slowed down by its disk, it does not listen to the server. This time does not
    count as silence of the server."""
    quiet = Silence(Patience(0.2, 0.4), "source", lambda: False)
    quiet._LONGEST = 0.01
    for _ in range(5):
        time.sleep(0.1)
        quiet.listened()
    with pytest.raises(SourceUnavailable):
        _listen(quiet)


def _listen(quiet: Silence) -> None:
    for _ in range(1000):
        time.sleep(0.002)
        quiet.listened()


@pytest.mark.parametrize(
    "conninfo", [f"host=localhost {field}" for field in ("password='x", "port=abc", "connect_timeout=y", "sslmode=z")]
)
def test_an_invalid_conninfo_is_a_settings_error(conninfo: str) -> None:
    with pytest.raises(SettingsError) as told:
        connect(conninfo)
    assert told.value.exit_code == 2
    assert "password" not in str(told.value)
