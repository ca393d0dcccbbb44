"""Finds the data messages of a connection in the received bytes.

"Message Formats": a message begins with a byte of kind and a big-endian length that counts itself, so each message says
where the next message begins. Following the messages one by one costs one step of the interpreter per message. This
module instead finds all places that look like the beginning of a message at once. It keeps the places that form a chain
from the first byte: each message ends where the next message begins. The bytes of a value can look like a beginning,
but no message ends right in front of them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pgcdc_assets.core.arrays import Ints, Octets

HEADER: Final = 5
"""Bytes of kind and length."""
_DATA: Final = ord("d")
_ALONE: Final = 1 << 20
"""A message of at least this many bytes is returned alone."""
_PAIR: Final = _DATA
"""The kind and the zero byte after it, as a little-endian number."""


def data_messages(octets: Octets) -> tuple[Ints, Ints]:
    """Starts and ends of the whole data messages at the front, up to a message of another kind. A very large message is
    returned alone."""
    end = _end(octets, 0)
    if end is None:
        # Do not search the bytes: the message may be large, and arrive in thousands of pieces.
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if end >= _ALONE:
        return np.array([0]), np.array([end])
    places = _look_alikes(octets)
    ends = _ends(octets, places)
    known = (ends - places >= HEADER) & (ends <= len(octets))
    places, ends = places[known], ends[known]
    # Messages whose end is not the next place: either that place is not a message, or the message is the last one.
    breaks = np.append(np.flatnonzero(ends[:-1] != places[1:]), len(places) - 1)
    starts: list[Ints] = []
    at = 0
    while True:
        first = places.searchsorted(at)
        if first < len(places) and places[first] == at:
            last = breaks[breaks.searchsorted(first)]
            starts.append(places[first : last + 1])
            at = int(ends[last])
        elif (end := _end(octets, at)) is not None:
            starts.append(np.array([at]))
            at = end
        else:
            break
    found = np.concatenate(starts)
    return found, np.append(found[1:], at)


def _look_alikes(octets: Octets) -> Ints:
    """Places where two zero bytes follow the kind. Few messages are larger than 64 KiB, and few other bytes look like
    this."""
    last = len(octets) - HEADER
    # Search for pairs of bytes, at even and at odd places, because the kind's byte alone occurs in every text.
    even, odd = octets[: 2 * (last // 2 + 1)].view("<u2"), octets[1 : 1 + 2 * ((last + 1) // 2)].view("<u2")
    places = np.concatenate((2 * np.flatnonzero(even == _PAIR), 2 * np.flatnonzero(odd == _PAIR) + 1))
    places.sort(kind="stable")
    found: Ints = places[octets[places + 2] == 0]
    return found


def _end(octets: Octets, at: int) -> int | None:
    """The end of the data message that begins at ``at``; None if no whole data message begins there."""
    if at + HEADER > len(octets) or octets[at] != _DATA:
        return None
    end = int(_ends(octets, np.array([at]))[0])
    return end if at + HEADER <= end <= len(octets) else None


def _ends(octets: Octets, places: Ints) -> Ints:
    length = np.zeros(len(places), dtype=np.int64)
    for byte in range(1, HEADER):
        length = (length << 8) | octets[places + byte]
    return places + 1 + length
