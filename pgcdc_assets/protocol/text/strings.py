"""Makes Arrow string columns from slices of a buffer, returns their bytes, and converts them from the server's encoding
to UTF-8. In every encoding that a server may have, bytes below 0x80 are ASCII. So a column of only such bytes needs no
conversion."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, Ints, Octets, whole
from pgcdc_assets.core.encoding import Encoding

_MOST: Final = (1 << 31) - 1
"""The largest number of bytes in a string column, because Arrow's offsets have 31 bits."""


def gathered(data: Any, starts: Ints, ends: Ints, valid: Bools | None = None) -> pa.BinaryArray:
    """Copies ``data[starts[i]:ends[i]]`` for every i to one binary array; NULL where ``valid`` is false. The slices
    must be in order and must not overlap. ``data`` (an Arrow buffer or numpy bytes) must be shorter than 2 GiB."""
    # Build an array over the buffer without a copy: slice, gap, slice, gap ... Then take every second value.
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
    """Returns the bytes of a string or binary array, and the n + 1 offsets of its values in these bytes. NULLs are
    empty values."""
    if array.null_count:
        array = array.fill_null("" if pa.types.is_string(array.type) else b"")
    _, offset_buffer, data = array.buffers()
    if len(array) == 0:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    octets = np.frombuffer(data, np.uint8)[start:end] if end > start else np.empty(0, np.uint8)
    return octets, offsets - start


class NotText(Exception):
    """Raised if the value with index ``row`` is not text in the column's encoding, or is too large in UTF-8."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__(f"value {row} is not text")


def decoded(values: pa.BinaryArray, encoding: Encoding, *, shown: bool = False) -> pa.StringArray:
    """Converts a binary column to text. Raises NotText for the first value that is not text in ``encoding``. With
    ``shown``, bytes that are not text are replaced as in :meth:`Encoding.shown`."""
    if encoding.unicode or bool((laid_out(values)[0] < 0x80).all()):
        try:
            return values.cast(pa.string())
        except pa.ArrowInvalid:
            pass
    # Decode all values at once, separated by zero bytes. PostgreSQL's texts contain no zero byte, and a zero byte
    # cannot complete a truncated character.
    count = len(values)
    one = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values.fill_null(b""))
    joined: bytes = pc.binary_join(one, b"\0")[0].as_py()
    try:
        text = (encoding.shown if shown else encoding.decode)(joined).encode()
    except UnicodeDecodeError as error:
        raise NotText(joined.count(b"\0", 0, error.start)) from None
    if len(text) > _MOST:
        raise NotText(int(np.argmax(pc.binary_length(values).fill_null(0))))
    data = np.frombuffer(text, np.uint8)
    ends = np.append(np.flatnonzero(data == 0), len(data))
    if len(ends) != count:
        raise NotText(int(np.argmax(pc.match_substring(values, b"\0").fill_null(False))))
    starts = np.concatenate(([0], ends[:-1] + 1))
    return gathered(text, starts, ends, np.asarray(values.is_valid())).cast(pa.string())


def reread(
    texts: pa.StringArray | pa.ChunkedArray, encoding: Encoding
) -> pa.StringArray | pa.ChunkedArray:  # fmt: skip
    """Applies :meth:`Encoding.reread` to a column of names. Decodes each distinct name once, so it is fast if there are
    few distinct names."""
    if encoding.unicode or texts.null_count == len(texts):
        return texts
    names = whole(texts).dictionary_encode()
    known = pa.array([encoding.reread(name) for name in names.dictionary.to_pylist()], pa.string())
    return known.take(names.indices)
