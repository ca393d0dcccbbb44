"""The replication connection with a real walsender."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.errors import (
    CopyBlocked,
    ProtocolError,
    SlotActive,
    SlotMissing,
    SourceFailed,
    SourceNotReady,
    SourceUnavailable,
)
from pgcdc_assets.source.connect.connection import identifier, literal
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, Origins, PluginOptions
from pgcdc_assets.source.connect.readers import LibpqReader, SocketReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.fix_postgres import Database
from tests.protocol.wire import connection_message as message


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
        assert time.monotonic() < deadline, f"{len(taken)} frames, without the expected one"
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


def test_a_missing_slot_and_a_slot_in_use_have_their_own_error_classes(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    with pytest.raises(SlotMissing) as missing:
        walsender.start(slot, ZERO, ["p"])
    assert missing.value.thing == f"slot {slot}"
    with ReplicationConnection.open(database.conninfo) as other:
        other.create_slot(slot)
        other.start(slot, ZERO, ["p"])
        with pytest.raises(SlotActive, match=str(_pid(other))) as active:
            walsender.start(slot, ZERO, ["p"])
        assert active.value.retryable


def test_servers_before_version_18_name_a_missing_publication_in_their_error(
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
def test_lock_timeout_ends_the_wait_of_slot_creation_for_a_writer(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    waits: list[float] = []
    with database.connect() as writer:
        writer.execute("BEGIN; SELECT pg_current_xact_id()")
        walsender.execute("SET lock_timeout = '1200ms'")
        with pytest.raises(CopyBlocked):
            walsender.create_slot(slot, temporary=True, waiting=lambda: waits.append(time.monotonic()))
    assert waits
    assert walsender.create_slot(slot, temporary=True).snapshot_name


def test_names_are_quoted_as_replication_commands_require() -> None:
    assert identifier('a"b') == '"a""b"'
    assert literal("a'b\\c") == "'a''b\\c'"


def test_reads_and_status_updates_raise_the_error_that_the_server_sent(
    walsender: ReplicationConnection, database: Database, slot: str
) -> None:
    """The server's error is reported even if a status update can no longer be sent."""
    created = walsender.create_slot(slot)
    walsender.start(slot, created.consistent_point, ["p"])
    with database.connect() as conn:
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", [_pid(walsender)])
    assert walsender.wait(5)
    if isinstance(walsender.frames, LibpqReader):
        # In this read, libpq receives the end of the stream. Then the connection is no longer in COPY mode.
        walsender.frames._read()
    with pytest.raises(SourceUnavailable, match="terminating connection"):
        _converse(walsender)


def _converse(walsender: ReplicationConnection) -> None:
    for _ in range(5):
        walsender.send_status(ZERO, ZERO, ZERO)
        walsender.frames.pull()
        walsender.frames.take()


# SocketReader reads frames from a socket. The bytes arrive in pieces of any size, and other messages come between the
# frames

ENDED = pack("!cI", b"c", 4)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, SocketReader]]:
    server, ours = socket.socketpair()
    with server, ours, closing(SocketReader(ours.fileno(), "here")) as reader:
        yield server, reader


def taken(reader: SocketReader) -> list[bytes]:
    frames = reader.take()
    return [frames.frame(index) for index in range(len(frames))]


@given(
    st.lists(st.tuples(st.sampled_from([b"d", b"d", b"d", b"N", b"S"]), st.binary(max_size=60)), max_size=30),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_frames_do_not_depend_on_how_the_bytes_arrive(messages: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    data = b"".join(message(kind, body) for kind, body in messages)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found: list[bytes] = []
    server, ours = socket.socketpair()
    with server, ours, closing(SocketReader(ours.fileno(), "here")) as reader:
        for start, end in pairwise(places):
            server.sendall(data[start:end])
            assert reader.pull()
            found += taken(reader)
        while reader.held:
            found += taken(reader)
    assert found == [body for kind, body in messages if kind == b"d"]


def test_a_frame_that_is_larger_than_the_read_buffer_is_read(pair: tuple[socket.socket, SocketReader]) -> None:
    server, reader = pair
    large = bytes(5_000_000)
    data = message(b"d", b"before") + message(b"d", large) + message(b"d", b"after")
    found: list[bytes] = []
    sent = 0
    while len(found) < 3:
        sent += server.send(data[sent : sent + 100_000])
        while reader.pull():
            continue
        found += taken(reader)
    assert [len(frame) for frame in found] == [6, 5_000_000, 5]
    assert reader.held == 0


def test_frames_before_an_error_are_returned_before_the_error_is_raised(
    pair: tuple[socket.socket, SocketReader],
) -> None:
    server, reader = pair
    error = message(b"E", b'SERROR\0C42704\0Mreplication slot "s" does not exist\0DRow (secret)\0\0')
    server.sendall(message(b"d", b"one") + error + message(b"Z", b"I"))
    reader.pull()
    assert taken(reader) == [b"one"]
    with pytest.raises(SlotMissing) as caught:
        reader.take()
    assert "secret" not in str(caught.value)


def test_frames_before_the_end_of_a_connection_are_returned_before_an_error_is_raised(
    pair: tuple[socket.socket, SocketReader],
) -> None:
    server, reader = pair
    server.sendall(message(b"d", b"one") + message(b"d", b"half")[:6])
    server.close()
    while reader.pull():
        continue
    assert taken(reader) == [b"one"]
    with pytest.raises(SourceUnavailable):
        reader.take()


def test_a_stream_that_the_server_ends_is_recognised(pair: tuple[socket.socket, SocketReader]) -> None:
    server, reader = pair
    server.sendall(message(b"d", b"one") + ENDED)
    reader.pull()
    assert taken(reader) == [b"one"]
    with pytest.raises(SourceUnavailable, match="ended the stream"):
        reader.take()


def test_a_message_of_an_unknown_kind_from_the_server_is_refused(pair: tuple[socket.socket, SocketReader]) -> None:
    server, reader = pair
    server.sendall(b"\x16\x03\x01\x02\x00\x01")
    reader.pull()
    with pytest.raises(ProtocolError):
        reader.take()


def test_status_updates_are_sent_completely_even_if_the_server_reads_late(
    pair: tuple[socket.socket, SocketReader],
) -> None:
    """Sending a status update never waits for the server, because the server may be waiting for the receiver to
    read."""
    server, reader = pair
    status = bytes(34)
    for _ in range(20_000):
        reader.send(status)
    received = bytearray()
    while len(received) < 20_000 * 39:
        received += server.recv(1 << 16)
        reader.pull()
    assert received == message(b"d", status) * 20_000


# The options that are requested from pgoutput on each version of the server -------------------------

NAMES = {"publication_names": '"p","odd, ""name"""', "messages": "true"}


@pytest.mark.parametrize("version", [14, 15, 16, 17, 18, 19])
def test_protocol_version_1_is_requested_by_default(version: int) -> None:
    assert PluginOptions.of(version) == FIRST_VERSION
    assert FIRST_VERSION.given(["p", 'odd, "name"']) == {"proto_version": "1", **NAMES}


@pytest.mark.parametrize(
    ("version", "proto", "streaming"),
    [(14, "2", "on"), (15, "3", "on"), (16, "4", "parallel"), (18, "4", "parallel"), (19, "4", "parallel")],
)
def test_streaming_uses_the_newest_mode_that_the_server_version_supports(
    version: int, proto: str, streaming: str
) -> None:
    options = PluginOptions.of(version, streaming=True)
    given = options.given(["p", 'odd, "name"'])
    assert given == {"proto_version": proto, "streaming": streaming, **NAMES}
    assert options.parallel == (streaming == "parallel")
    assert options.whole == FIRST_VERSION


@pytest.mark.parametrize(("version", "proto"), [(15, "3"), (16, "4"), (18, "4")])
def test_two_phase_does_not_require_streaming(version: int, proto: str) -> None:
    options = PluginOptions.of(version, two_phase=True)
    assert options.given(["p"]).items() >= {"proto_version": proto, "two_phase": "true"}.items()
    assert "streaming" not in options.given(["p"])
    assert options.whole == FIRST_VERSION


def test_two_phase_is_refused_if_the_server_does_not_support_it() -> None:
    with pytest.raises(SourceNotReady, match=r"PostgreSQL 14 .*; set `two_phase` to false"):
        PluginOptions.of(14, two_phase=True)


def test_logical_messages_are_not_requested_if_the_option_messages_is_false() -> None:
    options = PluginOptions.of(18, streaming=True, messages=False)
    assert "messages" not in options.given(["p"])
    assert "messages" not in options.whole.given(["p"])


@pytest.mark.parametrize(("version", "by_server"), [(14, False), (15, False), (16, True), (18, True)])
def test_the_server_filters_by_origin_from_version_16(version: int, by_server: bool) -> None:
    options = PluginOptions.of(version, origins=Origins.NONE)
    assert (options.given(["p"]).get("origin") == "none") == by_server
    # ``whole`` is the options of the SQL functions, which read a backlog. They get the same filter.
    assert options.whole == options
