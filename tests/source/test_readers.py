"""Reads frames from a socket, on which the bytes arrive in pieces of any size and the frames are mixed with other
messages."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError, SlotMissing, SourceUnavailable
from pgcdc_assets.source.connect.readers import SocketReader
from tests.protocol.wire import connection_message as message

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


def test_a_frame_larger_than_the_buffer_is_read(pair: tuple[socket.socket, SocketReader]) -> None:
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


def test_frames_before_the_end_of_the_connection_are_returned_before_its_error_is_raised(
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


def test_the_end_of_the_stream_by_the_server_is_recognised(pair: tuple[socket.socket, SocketReader]) -> None:
    server, reader = pair
    server.sendall(message(b"d", b"one") + ENDED)
    reader.pull()
    assert taken(reader) == [b"one"]
    with pytest.raises(SourceUnavailable, match="ended the stream"):
        reader.take()


def test_an_invalid_message_is_refused(pair: tuple[socket.socket, SocketReader]) -> None:
    server, reader = pair
    server.sendall(b"\x16\x03\x01\x02\x00\x01")
    reader.pull()
    with pytest.raises(ProtocolError):
        reader.take()


def test_nothing_is_lost_when_the_server_reads_late(pair: tuple[socket.socket, SocketReader]) -> None:
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
