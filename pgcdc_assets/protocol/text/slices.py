"""Makes one Arrow array from many slices of a buffer, and the reverse. Column decoding and casts share these steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from pgcdc_assets.core.arrays import Bools, Ints, Octets


def gathered(data: Any, starts: Ints, ends: Ints, valid: Bools | None = None) -> pa.BinaryArray:
    """``data[starts[i]:ends[i]]`` for every i, copied into one binary array; NULL where not ``valid``.

    The slices must be in order and not overlap, and ``data`` (an Arrow buffer or numpy bytes) must be shorter than 2
    GiB.
    """
    # Slice, gap, slice, gap ...: an array over the buffer without a copy. Arrow then takes every second value of it.
    count = len(starts)
    if count == 0:
        return pa.array([], pa.binary())
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = starts
    offsets[1::2] = ends
    offsets[-1] = ends[-1]
    over = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return over.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32), mask=None if valid is None else ~valid))


def laid_out(array: pa.Array) -> tuple[Octets, Ints]:
    """The bytes of a string or binary array, and its n + 1 offsets into them.

    There are no gaps between values, and NULLs are empty, so all the bytes belong to values.
    """
    if array.null_count:
        array = array.fill_null("" if pa.types.is_string(array.type) else b"")
    _, offset_buffer, data = array.buffers()
    if len(array) == 0:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    octets = np.frombuffer(data, np.uint8)[start:end] if end > start else np.empty(0, np.uint8)
    return octets, offsets - start
