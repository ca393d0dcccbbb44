"""The columnar decoder on hand-made batches. tests/property compares it with the scalar decoder on random batches."""

from __future__ import annotations

import mmap
from struct import pack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.columns import images
from pgcdc_assets.protocol.messages import UNCHANGED, Delete, Insert, Update
from tests.protocol import wire
from tests.protocol.by_row import messages

UPDATES = [
    Update(7, None, None, ("1", "a", None)),
    Update(7, "K", ("2", None, None), ("3", UNCHANGED, "x" * 300)),
    Update(7, "O", ("3", "é", ""), ("3", UNCHANGED, None)),
    Update(7, None, None, (None, None, UNCHANGED)),
    Update(7, "K", ("5", None, None), ("6", "", "z")),
]
PAYLOADS = [wire.update(message) for message in UPDATES]


def test_columns_are_strings_and_mark_values_that_were_not_sent() -> None:
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
def test_empty_batch_has_no_images(type_: pa.DataType, payload: str) -> None:
    empty: Any = pa.array([], type_)
    if payload == "sliced":
        empty = pa.array(PAYLOADS, type_).slice(2, 0)
    if payload == "chunked":
        empty = pa.chunked_array([], type_)
    assert images(empty, "U", 3) == []


def test_offsets_above_2_gib_are_read() -> None:
    # The offsets are above 2 GiB. The anonymous memory below them is never used, so only the size of the slice matters.
    start = (1 << 31) + 5
    content = b"".join(PAYLOADS)
    with mmap.mmap(-1, start + len(content)) as memory:
        memory[start:] = content
        offsets = np.cumsum([start, *map(len, PAYLOADS)])
        array = pa.Array.from_buffers(pa.large_binary(), 5, [None, pa.py_buffer(offsets), pa.py_buffer(memory)])
        assert messages(images(array, "U", 3), "U", 7, 5) == UPDATES
        del array


def test_pieces_are_cut_by_size_and_keep_row_numbers() -> None:
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
        (b"I" + bytes(4) + b"K\0\1n", "unknown letter"),
        (b"I" + bytes(4) + b"N\0\2nn", "other than 1 columns"),
        (b"I" + bytes(4) + b"N\0\0", "other than 1 columns"),
        (b"I" + bytes(4) + b"N\0\1", "truncated"),
        (b"I" + bytes(4) + b"N\0\1x", "unknown form"),
        (b"I" + bytes(4) + b"N\0\1\xf4", "unknown form"),
        (b"I" + bytes(4) + b"N\0\1b\0\0\0\1a", "binary form"),
        (b"I" + bytes(4) + b"N\0\1t\0\0\0\2a", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\xff\xff\xff\xffa", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\x7f\xff\xff\xffa", "truncated"),
        (b"I" + bytes(4) + b"N\0\1t\0\0\0\1\xff", "not in UTF-8"),
        (b"I" + bytes(4) + b"N\0\1n ", "bytes behind its end"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_bad_row_is_refused_with_its_lsn(payload: bytes, what: str, at: int) -> None:
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
def test_deletes_have_exactly_one_old_tuple(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        images(pa.array([wire.delete(Delete(7, "K", ("1",))), payload]), "D", 1)


@pytest.mark.parametrize("payload", [b"U" + bytes(4) + b"K\0\1n", b"U" + bytes(4) + b"K\0\1nO\0\1nN\0\1n"])
def test_updates_have_one_new_tuple_and_at_most_one_old_tuple(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        images(pa.array([wire.update(Update(7, None, None, ("1",))), payload]), "U", 1)


def test_rows_without_payload_are_refused() -> None:
    with pytest.raises(ProtocolError, match="no payload"):
        images(pa.array([PAYLOADS[0], None]), "U", 3)
