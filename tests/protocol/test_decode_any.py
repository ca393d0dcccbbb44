"""The decoder of protocol versions 2 to 4 reads single messages, whose bytes are written by hand."""

from __future__ import annotations

from struct import pack

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import decode_any
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    BeginPrepare,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from tests.protocol import wire

AT = Lsn.parse("16/B374D848")
ONE, TWO = "00000016B374D848", "00000016B374D878"
LSN_ONE, LSN_TWO = Lsn.parse("16/B374D848"), Lsn.parse("16/B374D878")
TIME, AT_TIME = "0000000000000001", 946_684_800_000_001
XID = "FFFFFFFE"

EXAMPLES: list[tuple[bytes, AnyMessage]] = [
    (b"S" + bytes.fromhex(f"{XID} 01"), StreamStart(4_294_967_294, True)),
    (b"S" + bytes.fromhex("00000001 00"), StreamStart(1, False)),
    (b"E", StreamStop()),
    (
        b"c" + bytes.fromhex(f"{XID} 00 {ONE} {TWO} {TIME}"),
        StreamCommit(4_294_967_294, 0, LSN_ONE, LSN_TWO, AT_TIME),
    ),
    (
        b"b" + bytes.fromhex(f"{ONE} {TWO} {TIME} {XID}") + b"g \xc3\xa9\0",
        BeginPrepare(LSN_ONE, LSN_TWO, AT_TIME, 4_294_967_294, "g é"),
    ),
    (
        b"P" + bytes.fromhex(f"00 {ONE} {TWO} {TIME} {XID}") + b"g\0",
        Prepare(0, LSN_ONE, LSN_TWO, AT_TIME, 4_294_967_294, "g"),
    ),
    (
        b"p" + bytes.fromhex(f"00 {ONE} {TWO} {TIME} {XID}") + b"g\0",
        StreamPrepare(0, LSN_ONE, LSN_TWO, AT_TIME, 4_294_967_294, "g"),
    ),
    (
        b"K" + bytes.fromhex(f"00 {ONE} {TWO} {TIME} {XID}") + b"g\0",
        CommitPrepared(0, LSN_ONE, LSN_TWO, AT_TIME, 4_294_967_294, "g"),
    ),
    (
        b"r" + bytes.fromhex(f"00 {ONE} {TWO} {TIME} FFFFFFFFFFFFFFFF {XID}") + b"g\0",
        RollbackPrepared(0, LSN_ONE, LSN_TWO, AT_TIME, 946_684_799_999_999, 4_294_967_294, "g"),
    ),
]
PARALLEL_ABORT = (
    b"A" + bytes.fromhex(f"00000007 {XID} {ONE} {TIME}"),
    StreamAbort(7, 4_294_967_294, LSN_ONE, AT_TIME),
)
SHORT_ABORT = (b"A" + bytes.fromhex(f"00000007 {XID}"), StreamAbort(7, 4_294_967_294))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("payload", "message"), EXAMPLES, ids=lambda item: type(item).__name__)
def test_every_kind_of_message_is_decoded(payload: bytes, message: AnyMessage, parallel: bool) -> None:
    assert decode_any(payload, AT, parallel=parallel) == message
    assert wire.message(message) == payload


def test_stream_abort_is_longer_with_parallel_streaming() -> None:
    assert decode_any(PARALLEL_ABORT[0], parallel=True) == PARALLEL_ABORT[1]
    assert decode_any(SHORT_ABORT[0], parallel=False) == SHORT_ABORT[1]
    with pytest.raises(ProtocolError, match="16 bytes follow its end"):
        decode_any(PARALLEL_ABORT[0], parallel=False)
    with pytest.raises(ProtocolError, match="truncated"):
        decode_any(SHORT_ABORT[0], parallel=True)
    assert StreamAbort(7, 7).whole
    assert not StreamAbort(7, 8).whole


@pytest.mark.parametrize("payload", [payload for payload, _ in [*EXAMPLES, PARALLEL_ABORT]])
def test_message_that_is_too_short_or_too_long_is_refused(payload: bytes) -> None:
    for end in range(1, len(payload)):
        with pytest.raises(ProtocolError) as caught:
            decode_any(payload[:end], AT, parallel=True)
        assert caught.value.lsn == AT
        assert f"{chr(payload[0])!r}" in str(caught.value)
    with pytest.raises(ProtocolError, match="1 bytes follow its end"):
        decode_any(payload + b"\0", AT, parallel=True)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "empty"),
        (b"\xff", "unknown to the protocol"),
        (b"S" + pack("!IB", 1, 2), "unknown flags 0x2"),
        (b"c" + pack("!IB", 1, 1) + bytes(24), "unknown flags 0x1"),
        (b"P\1" + bytes(28) + b"g\0", "unknown flags 0x1"),
        (b"p\1" + bytes(28) + b"g\0", "unknown flags 0x1"),
        (b"K\1" + bytes(28) + b"g\0", "unknown flags 0x1"),
        (b"r\1" + bytes(36) + b"g\0", "unknown flags 0x1"),
        (b"b" + bytes(28) + b"g", "does not end"),
    ],
)
def test_error_for_a_malformed_message_has_its_kind_and_lsn(payload: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match="at LSN 16/B374D848") as caught:
        decode_any(payload, AT, parallel=True)
    assert what in str(caught.value)
