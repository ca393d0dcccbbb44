"""Replication frames are found in the bytes of a connection, and read. The bytes are written by hand."""

from __future__ import annotations

from struct import unpack_from

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import FrameBlock, Keepalive, data_messages, keepalive, keepalive_frame, status_update
from pgcdc_assets.protocol.layouts import EPOCH
from tests.protocol.wire import connection_message as message

DATA = b"w" + bytes.fromhex("00000016B374D848 FFFFFFFF00000000 0000000000000005") + b"Bmessage"
ALIVE = b"k" + bytes.fromhex("00000016B374D848 FFFFFFFFFFFFFFFE 01")


def test_keepalive_is_read() -> None:
    assert keepalive(ALIVE) == Keepalive(Lsn.parse("16/B374D848"), -2, True)
    assert keepalive(ALIVE[:-1] + b"\0").reply_requested is False


@pytest.mark.parametrize("frame", [b"", b"w", ALIVE[:-1], ALIVE + b"\0", DATA])
def test_frame_of_another_kind_is_not_a_keepalive(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        keepalive(frame)


def test_keepalive_that_we_build_is_read_back_and_requests_no_reply() -> None:
    assert keepalive(keepalive_frame(1 << 40)) == Keepalive(Lsn(1 << 40), 0, False)


def test_part_of_a_frame_block_shares_the_memory_of_the_block() -> None:
    block = FrameBlock.of([b"one", b"", memoryview(b"three"), b"four"])
    part = block.part(2, 4)
    assert [block.frame(index) for index in range(len(block))] == [b"one", b"", b"three", b"four"]
    assert [part.frame(index) for index in range(len(part))] == [b"three", b"four"]
    assert part.raw is block.raw
    assert len(FrameBlock.of([])) == 0


def test_status_update_has_positions_and_reply_flag() -> None:
    frame = status_update(1, 2, 3, 4, True)
    assert frame == b"r" + bytes.fromhex("0000000000000001 0000000000000002 0000000000000003 0000000000000004 01")
    assert status_update(1 << 63, 0, 0, 0, False)[-1:] == b"\0"


def test_the_clock_starts_in_2000() -> None:
    assert EPOCH == 946_684_800 * 10**6


def walked(data: bytes) -> list[tuple[int, int]]:
    """Start and end of the complete data messages at the beginning of ``data``, found one after another."""
    found, at = [], 0
    while at + 5 <= len(data) and data[at : at + 1] == b"d":
        length = unpack_from("!I", data, at + 1)[0]
        if length < 4 or at + 1 + length > len(data):
            break
        found.append((at, at + 1 + length))
        at += 1 + length
    return found


def looked_up(data: bytes) -> list[tuple[int, int]]:
    """The same starts and ends, found by repeated calls of the tested function."""
    found: list[tuple[int, int]] = []
    octets, at = np.frombuffer(data, np.uint8), 0
    while len((bounds := data_messages(octets[at:]))[0]):
        found += [(at + start, at + end) for start, end in zip(*(each.tolist() for each in bounds), strict=True)]
        at = found[-1][1]
    return found


looks_so = st.sampled_from([b"d", b"d\0\0\0", b"\0\0\0\x05", message(b"d", b""), message(b"d", b"d\0\0\0\x04"), b"dd"])
"""Bytes inside a value or position that look like the start of a message."""
bodies = st.lists(st.one_of(st.binary(max_size=8), looks_so), max_size=6).map(b"".join)
streams = st.lists(
    st.builds(message, st.sampled_from([b"d"] * 9 + [b"N"]), bodies), max_size=12
).map(b"".join)  # fmt: skip


@given(streams, st.integers(0, 400))
@example(b"", 0)
@example(message(b"d", b"") * 3, 15)
@example(message(b"d", b"d\0\0\0\x04"), 10)
@example(message(b"d", b"x") + message(b"d", bytes(70_000)) + message(b"d", b"d\0\0\0"), 70_020)
@example(message(b"d", bytes(70_000)), 70_004)
@example(message(b"d", b"x") + message(b"d", bytes(17 << 20)) + message(b"d", b""), 18 << 20)
@example(b"d\0\0\0\0" + message(b"d", b""), 10)
@example(b"d\0\x01\0\0", 5)
def test_frames_are_found_as_by_a_sequential_scan(stream: bytes, cut: int) -> None:
    assert looked_up(stream[:cut]) == walked(stream[:cut])
    assert looked_up(stream) == walked(stream)


@given(st.binary(max_size=60).map(lambda noise: noise.replace(b"\x07", b"d").replace(b"\x08", b"\0")))
def test_frames_in_noise_are_found_as_by_a_sequential_scan(noise: bytes) -> None:
    assert looked_up(b"d\0\0\0\x05x" + noise) == walked(b"d\0\0\0\x05x" + noise)
