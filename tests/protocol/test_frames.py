"""Replication frames, against bytes written by hand."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import FrameBlock, Keepalive, keepalive, keepalive_frame, status_update
from pgcdc_assets.protocol.layouts import EPOCH

DATA = b"w" + bytes.fromhex("00000016B374D848 FFFFFFFF00000000 0000000000000005") + b"Bmessage"
ALIVE = b"k" + bytes.fromhex("00000016B374D848 FFFFFFFFFFFFFFFE 01")


def test_keepalive() -> None:
    assert keepalive(ALIVE) == Keepalive(Lsn.parse("16/B374D848"), -2, True)
    assert keepalive(ALIVE[:-1] + b"\0").reply_requested is False


@pytest.mark.parametrize("frame", [b"", b"w", ALIVE[:-1], ALIVE + b"\0", DATA])
def test_what_is_no_keepalive_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        keepalive(frame)


def test_keepalive_of_our_own_is_read_back_and_asks_for_no_reply() -> None:
    assert keepalive(keepalive_frame(1 << 40)) == Keepalive(Lsn(1 << 40), 0, False)


def test_block_holds_its_frames_in_one_piece_and_parts_share_it() -> None:
    block = FrameBlock.of([b"one", b"", memoryview(b"three"), b"four"])
    part = block.part(2, 4)
    assert [block.frame(index) for index in range(len(block))] == [b"one", b"", b"three", b"four"]
    assert [part.frame(index) for index in range(len(part))] == [b"three", b"four"]
    assert part.raw is block.raw
    assert len(FrameBlock.of([])) == 0


def test_status_update() -> None:
    frame = status_update(1, 2, 3, 4, True)
    assert frame == b"r" + bytes.fromhex("0000000000000001 0000000000000002 0000000000000003 0000000000000004 01")
    assert status_update(1 << 63, 0, 0, 0, False)[-1:] == b"\0"


def test_the_clock_starts_in_2000() -> None:
    assert EPOCH == 946_684_800 * 10**6
