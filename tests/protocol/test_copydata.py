"""Messages found all at once are those of a walk from one to the next."""

from __future__ import annotations

from struct import unpack_from

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc_assets.protocol.copydata import data_messages
from tests.protocol.copydata import message


def walked(data: bytes) -> list[tuple[int, int]]:
    """Start and end of the whole data messages at the front, one by one."""
    found, at = [], 0
    while at + 5 <= len(data) and data[at : at + 1] == b"d":
        length = unpack_from("!I", data, at + 1)[0]
        if length < 4 or at + 1 + length > len(data):
            break
        found.append((at, at + 1 + length))
        at += 1 + length
    return found


def looked_up(data: bytes) -> list[tuple[int, int]]:
    """In as many calls as it takes."""
    found: list[tuple[int, int]] = []
    octets, at = np.frombuffer(data, np.uint8), 0
    while len((bounds := data_messages(octets[at:]))[0]):
        found += [(at + start, at + end) for start, end in zip(*(each.tolist() for each in bounds), strict=True)]
        at = found[-1][1]
    return found


looks_so = st.sampled_from([b"d", b"d\0\0\0", b"\0\0\0\x05", message(b"d", b""), message(b"d", b"d\0\0\0\x04"), b"dd"])
"""What looks like the beginning of a message, within a value or a position."""
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
def test_the_same_as_one_by_one(stream: bytes, cut: int) -> None:
    assert looked_up(stream[:cut]) == walked(stream[:cut])
    assert looked_up(stream) == walked(stream)


@given(st.binary(max_size=60).map(lambda noise: noise.replace(b"\x07", b"d").replace(b"\x08", b"\0")))
def test_of_noise_too(noise: bytes) -> None:
    assert looked_up(b"d\0\0\0\x05x" + noise) == walked(b"d\0\0\0\x05x" + noise)
