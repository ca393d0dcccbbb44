"""The columnar decoder on hand-made batches of messages. tests/property compares it with the scalar decoder, which
decodes one message at a time, on random batches.

An image has all tuples of one kind in a batch as columns: key tuples (K), old tuples (O) or new tuples (N).
"""

from __future__ import annotations

import mmap
from struct import pack, unpack_from
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.columns import images
from pgcdc_assets.protocol.frames import FrameBlock, Keepalive, data_messages, keepalive, keepalive_frame, status_update
from pgcdc_assets.protocol.layouts import EPOCH
from pgcdc_assets.protocol.messages import UNCHANGED, Delete, Insert, Update
from pgcdc_assets.protocol.text.strings import NotText, decoded, reread
from tests.protocol import wire
from tests.protocol.examples import messages
from tests.protocol.wire import connection_message as message

UPDATES = [
    Update(7, None, None, ("1", "a", None)),
    Update(7, "K", ("2", None, None), ("3", UNCHANGED, "x" * 300)),
    Update(7, "O", ("3", "é", ""), ("3", UNCHANGED, None)),
    Update(7, None, None, (None, None, UNCHANGED)),
    Update(7, "K", ("5", None, None), ("6", "", "z")),
]
PAYLOADS = [wire.update(message) for message in UPDATES]


def test_decoded_columns_are_strings_and_mark_values_that_were_not_sent() -> None:
    keys, whole, new = images(pa.array(PAYLOADS, pa.binary()), "U", 3)
    assert all(values.type == pa.string() for item in (keys, whole, new) for values in item.text)
    assert [marks if marks is None else marks.tolist() for marks in new.unchanged] == [
        None,
        [False, True, True, False, False],
        [False, False, False, True, False],
    ]
    assert keys.text[1].null_count == 2
    assert keys.unchanged == [None, None, None]


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("payload", ["array", "sliced", "chunked"])
def test_decoding_an_empty_batch_returns_no_images(type_: pa.DataType, payload: str) -> None:
    empty: Any = pa.array([], type_)
    if payload == "sliced":
        empty = pa.array(PAYLOADS, type_).slice(2, 0)
    if payload == "chunked":
        empty = pa.chunked_array([], type_)
    assert images(empty, "U", 3) == []


def test_columns_of_more_than_2_gib_are_decoded() -> None:
    # The offsets are above 2 GiB. The anonymous memory below them is never touched, so the test needs little memory.
    start = (1 << 31) + 5
    content = b"".join(PAYLOADS)
    with mmap.mmap(-1, start + len(content)) as memory:
        memory[start:] = content
        offsets = np.cumsum([start, *map(len, PAYLOADS)])
        array = pa.Array.from_buffers(pa.large_binary(), 5, [None, pa.py_buffer(offsets), pa.py_buffer(memory)])
        assert messages(images(array, "U", 3), "U", 7, 5) == UPDATES
        del array


def test_images_are_divided_into_pieces_by_size_and_keep_their_row_numbers() -> None:
    payload = pa.array(PAYLOADS, pa.binary())
    found = images(payload, "U", 3, piece_bytes=sum(map(len, PAYLOADS[:2])))
    assert [item.rows.tolist() for item in found if item.image == "N"] == [[0, 1], [2, 3, 4]]
    assert messages(found, "U", 7, 5) == UPDATES
    found = images(payload, "U", 3, piece_bytes=1)
    assert [item.rows.tolist() for item in found if item.image == "N"] == [[0], [1], [2], [3], [4]]


def test_character_split_between_two_values_is_refused() -> None:
    # Each half of the character is invalid alone. Both halves together would be valid.
    halves = b"I" + pack("!I", 7) + b"N\0\2t\0\0\0\1\xc3t\0\0\0\1\xa9"
    with pytest.raises(ProtocolError, match="not in UTF-8"):
        images(pa.array([halves]), "I", 2)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "truncated"),
        (b"I\0\0\0", "truncated"),
        (b"U" + bytes(4) + b"N\0\1n", "of another kind"),
        (b"I" + bytes(4), "truncated"),
        (b"I" + bytes(4) + b"K\0\1n", "unexpected letter"),
        (b"I" + bytes(4) + b"N\0\2nn", "columns other than 1"),
        (b"I" + bytes(4) + b"N\0\0", "columns other than 1"),
        (b"I" + bytes(4) + b"N\0\1", "truncated"),
        (b"I" + bytes(4) + b"N\0\1x", "letter other than"),
        (b"I" + bytes(4) + b"N\0\1\xf4", "letter other than"),
        (b"I" + bytes(4) + b"N\0\1b\0\0\0\1a", "binary form"),
        (b"I" + bytes(4) + b"N\0\1t\0\0\0\2a", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\xff\xff\xff\xffa", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\x7f\xff\xff\xffa", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\0\0\0\1\xff", "not in UTF-8"),
        (b"I" + bytes(4) + b"N\0\1n ", "bytes after its end"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_error_for_a_malformed_row_has_its_lsn(payload: bytes, what: str, at: int) -> None:
    good = wire.insert(Insert(7, ("value",)))
    rows = [good] * 2
    rows.insert(at, payload)
    lsns = pa.chunked_array([[100 + row] for row in range(3)], pa.int64())
    with pytest.raises(ProtocolError) as caught:
        images(pa.chunked_array([rows[:1], rows[1:]], pa.binary()), "I", 1, lsns)
    assert what in str(caught.value)
    assert caught.value.lsn == Lsn(100 + at)
    with pytest.raises(ProtocolError):
        images(pa.array(rows, pa.binary()), "I", 1)


@pytest.mark.parametrize("payload", [b"D" + bytes(4), b"D" + bytes(4) + b"N\0\1n", b"D" + bytes(4) + b"K\0\1nN\0\1n"])
def test_delete_without_exactly_one_old_tuple_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        images(pa.array([wire.delete(Delete(7, "K", ("1",))), payload]), "D", 1)


@pytest.mark.parametrize("payload", [b"U" + bytes(4) + b"K\0\1n", b"U" + bytes(4) + b"K\0\1nO\0\1nN\0\1n"])
def test_update_with_two_old_tuples_or_no_new_tuple_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        images(pa.array([wire.update(Update(7, None, None, ("1",))), payload]), "U", 1)


def test_message_whose_payload_is_null_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no payload"):
        images(pa.array([PAYLOADS[0], None]), "U", 3)


# Decoding a whole column in the server's encoding gives the same texts as decoding each value alone -

ENCODINGS = [Encoding.of(name) for name in ("UTF8", "SQL_ASCII", "WIN1252", "KOI8U", "EUC_JP", "EUC_KR", "LATIN10")]
PIECES = st.sampled_from([b"", b"a", b"\xe9", b"\x81", b"\xc6\xfc", b"\xad\xa1", b"\x8f", b"\xff", b"\xc3\xa9", b"\n"])
VALUES = st.lists(st.none() | st.lists(PIECES, max_size=4).map(b"".join), max_size=8)


def _alone(raw: bytes | None, encoding: Encoding) -> str | None:
    return None if raw is None else encoding.decode(raw)


@given(VALUES, st.sampled_from(ENCODINGS), st.integers(0, 3))
@example([b"\x8f", None], Encoding.of("EUC_JP"), 0)
@example([b"\x8f\x8fa", b"\x8f"], Encoding.of("EUC_JP"), 0)
def test_decoding_a_column_gives_the_same_texts_as_decoding_each_value(
    values: list[bytes | None], encoding: Encoding, cut: int
) -> None:
    column = pa.array([b"cut off", *values], pa.binary()).slice(1)[cut:]
    values = values[cut:]
    for row, raw in enumerate(values):
        try:
            _alone(raw, encoding)
        except UnicodeDecodeError:
            with pytest.raises(NotText) as caught:
                decoded(column, encoding)
            assert caught.value.row == row
            break
    else:
        assert decoded(column, encoding).to_pylist() == [_alone(raw, encoding) for raw in values]
    shown = [None if raw is None else encoding.shown(raw) for raw in values]
    assert decoded(column, encoding, shown=True).to_pylist() == shown


def test_zero_byte_in_a_text_is_refused() -> None:
    with pytest.raises(NotText) as caught:
        decoded(pa.array([b"\xe9", b"a\0b"]), Encoding.of("WIN1252"))
    assert caught.value.row == 1


def test_column_names_that_are_not_utf8_are_decoded_in_the_servers_encoding() -> None:
    win1252, utf8 = Encoding.of("WIN1252"), Encoding.of("UTF8")
    names = pa.chunked_array([pa.array(["a", None, utf8.shown(b"\xe9")]), pa.array(["a"])])
    assert reread(names, win1252).to_pylist() == ["a", None, "é", "a"]
    assert reread(names, utf8) is names


# Replication frames are found in the bytes of a connection, and read --------------------------------

DATA = b"w" + bytes.fromhex("00000016B374D848 FFFFFFFF00000000 0000000000000005") + b"Bmessage"
ALIVE = b"k" + bytes.fromhex("00000016B374D848 FFFFFFFFFFFFFFFE 01")


def test_keepalive_is_read() -> None:
    assert keepalive(ALIVE) == Keepalive(Lsn.parse("16/B374D848"), True)
    assert keepalive(ALIVE[:-1] + b"\0").reply_requested is False


@pytest.mark.parametrize("frame", [b"", b"w", ALIVE[:-1], ALIVE + b"\0", DATA])
def test_frame_of_another_kind_or_length_is_refused_as_a_keepalive(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        keepalive(frame)


def test_generated_keepalive_frame_can_be_parsed_and_requests_no_reply() -> None:
    assert keepalive(keepalive_frame(1 << 40)) == Keepalive(Lsn(1 << 40), False)


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


def test_times_of_the_protocol_count_from_the_year_2000() -> None:
    assert EPOCH == 946_684_800 * 10**6


def walked(data: bytes) -> list[tuple[int, int]]:
    """Start and end of each complete CopyData message at the beginning of ``data``, found by a sequential scan."""
    found, at = [], 0
    while at + 5 <= len(data) and data[at : at + 1] == b"d":
        length = unpack_from("!I", data, at + 1)[0]
        if length < 4 or at + 1 + length > len(data):
            break
        found.append((at, at + 1 + length))
        at += 1 + length
    return found


def looked_up(data: bytes) -> list[tuple[int, int]]:
    """The same starts and ends, found by repeated calls of the tested function ``data_messages``."""
    found: list[tuple[int, int]] = []
    octets, at = np.frombuffer(data, np.uint8), 0
    while len((bounds := data_messages(octets[at:]))[0]):
        found += [(at + start, at + end) for start, end in zip(*(each.tolist() for each in bounds), strict=True)]
        at = found[-1][1]
    return found


looks_so = st.sampled_from([b"d", b"d\0\0\0", b"\0\0\0\x05", message(b"d", b""), message(b"d", b"d\0\0\0\x04"), b"dd"])
"""Bytes inside the body of a message that look like the start of a message."""
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
def test_frames_found_with_numpy_equal_the_frames_of_a_sequential_scan(stream: bytes, cut: int) -> None:
    assert looked_up(stream[:cut]) == walked(stream[:cut])
    assert looked_up(stream) == walked(stream)


@given(st.binary(max_size=60).map(lambda noise: noise.replace(b"\x07", b"d").replace(b"\x08", b"\0")))
def test_frames_found_in_random_bytes_equal_the_frames_of_a_sequential_scan(noise: bytes) -> None:
    assert looked_up(b"d\0\0\0\x05x" + noise) == walked(b"d\0\0\0\x05x" + noise)
