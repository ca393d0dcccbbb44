"""The scalar decoder reads single messages, whose bytes are written by hand."""

from __future__ import annotations

from struct import pack

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import (
    Message,
)
from tests.protocol.examples import EXAMPLES

AT = Lsn.parse("16/B374D848")


@pytest.mark.parametrize(("payload", "message"), EXAMPLES, ids=lambda item: type(item).__name__)
def test_every_kind_of_message_is_decoded(payload: bytes, message: Message) -> None:
    assert decode(payload, AT) == message


@pytest.mark.parametrize("payload", [payload for payload, _ in EXAMPLES])
def test_message_that_is_too_short_or_too_long_is_refused(payload: bytes) -> None:
    for end in range(1, len(payload)):
        with pytest.raises(ProtocolError) as caught:
            decode(payload[:end], AT)
        assert caught.value.lsn == AT
        assert f"{chr(payload[0])!r}" in str(caught.value)
    with pytest.raises(ProtocolError, match="1 bytes follow its end"):
        decode(payload + b"\0", AT)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "empty"),
        (b"S\0\0\0\1\1", "kind 'S': its kind is unknown"),
        (b"A" + bytes(24), "16 bytes follow its end"),
        (b"\xff", "unknown to protocol version 1"),
        (b"C\1" + bytes(24), "unknown flags 0x1"),
        (b"M\2" + bytes(8) + b"\0" + bytes(4), "unknown flags 0x2"),
        (b"T" + pack("!IB", 0, 4), "unknown flags 0x4"),
        (b"T" + pack("!IB", 0xFFFF_FFFF, 0), "truncated"),
        (b"R" + bytes(4) + b"\0t\0x\0\0", "'x' instead of one of"),
        (b"R" + bytes(4) + b"\0t\0d\0\1\2c\0" + bytes(8), "unknown flags 0x2"),
        (b"I" + bytes(4) + b"K\0\0", "'K' instead of one of 'N'"),
        (b"U" + bytes(4) + b"X\0\0", "'X' instead of one of"),
        (b"U" + bytes(4) + b"K\0\0K\0\0", "'K' instead of one of 'N'"),
        (b"D" + bytes(4) + b"N\0\0", "'N' instead of one of 'KO'"),
        (b"I" + bytes(4) + b"N\0\1x", "'x' instead of one of"),
        (b"I" + bytes(4) + b"N\0\1b\0\0\0\1a", "binary form"),
        (b"I" + bytes(4) + b"N\0\1t\xff\xff\xff\xff", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\0\0\0\2\xc3\x28", "not UTF-8"),
        (b"I" + bytes(4) + b"N\0\1t\0\0\0\3\xed\xa0\x80", "not UTF-8"),
    ],
)
def test_error_for_a_malformed_message_has_its_kind_and_lsn(payload: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match="at LSN 16/B374D848") as caught:
        decode(payload, AT)
    assert what in str(caught.value)


def test_protocol_errors_contain_no_value_of_a_row() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(b"I" + bytes(4) + b"N\0\1t\0\0\0\6secret" + b"more", AT)
    assert "secret" not in str(caught.value)


def test_tuple_with_an_unknown_kind_of_value_is_refused() -> None:
    for letter in set(range(256)) - set(b"nut"):
        with pytest.raises(ProtocolError):
            decode(b"I" + pack(">I", 7) + b"N" + pack(">H", 1) + bytes([letter]) + pack(">I", 1) + b"a")
