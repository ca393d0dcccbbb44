"""The replication connection with a real walsender."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

import pytest

from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.errors import CopyBlocked, SlotActive, SlotMissing, SourceFailed, SourceNotReady, SourceUnavailable
from pgcdc_assets.source.connect.connection import identifier, literal
from pgcdc_assets.source.connect.readers import LibpqReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.fix_postgres import Database


@pytest.fixture
def slot() -> str:
    return f"s_{secrets.token_hex(5)}"


@pytest.fixture(params=["socket", "libpq"])
def walsender(
    database: Database, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplicationConnection]:
    """A replication connection. Each test runs twice: frames are read from the socket, or through libpq."""
    if request.param == "libpq":
        monkeypatch.setattr(ReplicationConnection, "socket", lambda connection: None)
    with ReplicationConnection.open(database.conninfo) as connection:
        yield connection


def frames(walsender: ReplicationConnection, until: Callable[[bytes], bool], seconds: float = 20) -> list[bytes]:
    """Returns the frames up to and including the first frame for which ``until`` is true. Later frames are dropped."""
    taken: list[bytes] = []
    deadline = time.monotonic() + seconds
    while not any(map(until, taken)):
        assert time.monotonic() < deadline, f"{len(taken)} frames, not the one waited for"
        if not walsender.frames.pull():
            walsender.wait(0.1)
        found = walsender.frames.take()
        taken += [found.frame(index) for index in range(len(found))]
    return taken[: next(index for index, frame in enumerate(taken) if until(frame)) + 1]


def is_commit(frame: bytes) -> bool:
    return frame[:1] == b"w" and frame[25:26] == b"C"


def _pid(walsender: ReplicationConnection) -> int:
    return walsender.pgconn.backend_pid


def test_closing_the_stream_releases_the_slot_at_once(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (i int PRIMARY KEY, x text); CREATE PUBLICATION p FOR TABLE t")
        created = walsender.create_slot(slot)
        conn.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) AS i")
    walsender.start(slot, created.consistent_point, ["p"])
    frames(walsender, lambda frame: frame[:1] == b"w")
    walsender.end_stream()
    walsender.drop_slot(slot)
    with pytest.raises(SlotMissing):
        walsender.drop_slot(slot)


def test_each_slot_error_has_its_class(walsender: ReplicationConnection, database: Database, slot: str) -> None:
    with pytest.raises(SlotMissing) as missing:
        walsender.start(slot, ZERO, ["p"])
    assert missing.value.thing == f"slot {slot}"
    with ReplicationConnection.open(database.conninfo) as other:
        other.create_slot(slot)
        other.start(slot, ZERO, ["p"])
        with pytest.raises(SlotActive, match=str(_pid(other))) as active:
            walsender.start(slot, ZERO, ["p"])
        assert active.value.retryable


def test_a_missing_publication_is_not_reported_as_a_missing_slot(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    created = walsender.create_slot(slot)
    walsender.start(slot, created.consistent_point, ["no_such_publication"])
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (i int PRIMARY KEY); INSERT INTO t VALUES (1)")
    if walsender.pgconn.server_version < 180000:
        with pytest.raises((SourceNotReady, SourceFailed), match="no_such_publication"):
            frames(walsender, is_commit)


@pytest.mark.long
def test_slot_creation_waits_for_writers_and_lock_timeout_ends_it(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    waits: list[float] = []
    with database.connect() as writer:
        writer.execute("BEGIN; SELECT pg_current_xact_id()")
        walsender.execute("SET lock_timeout = '1200ms'")
        with pytest.raises(CopyBlocked):
            walsender.create_slot(slot, temporary=True, export=True, waiting=lambda: waits.append(time.monotonic()))
    assert waits
    assert walsender.create_slot(slot, temporary=True, export=True).snapshot_name


def test_names_are_quoted_for_the_replication_grammar() -> None:
    assert identifier('a"b') == '"a""b"'
    assert literal("a'b\\c") == "'a''b\\c'"


def test_read_and_write_raise_the_error_that_the_server_sent(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    """The server's error is reported even if a status update can no longer be sent."""
    created = walsender.create_slot(slot)
    walsender.start(slot, created.consistent_point, ["p"])
    with database.connect() as conn:
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", [_pid(walsender)])
    assert walsender.wait(5)
    if isinstance(walsender.frames, LibpqReader):
        # libpq has received the end of the stream, and the connection is no longer in COPY mode.
        walsender.frames._read()
    with pytest.raises(SourceUnavailable, match="terminating connection"):
        _converse(walsender)


def _converse(walsender: ReplicationConnection) -> None:
    for _ in range(5):
        walsender.send_status(ZERO, ZERO, ZERO)
        walsender.frames.pull()
        walsender.frames.take()
