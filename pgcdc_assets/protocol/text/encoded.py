"""Converts columns of texts in the server's encoding to Arrow strings, which are UTF-8, a whole column at once.

Every encoding that a server may have is ASCII below 0x80. So a column of ASCII needs no conversion, like a column of
UTF-8.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import whole
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.protocol.text.slices import gathered, laid_out

_MOST: int = (1 << 31) - 1
"""Largest number of bytes in a column, because Arrow's offsets have 31 bits."""


class NotText(Exception):
    """The value at place ``row`` is not text in the column's encoding, or is too large in UTF-8."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__(f"value {row} is no text")


def decoded(values: pa.BinaryArray, encoding: Encoding, *, shown: bool = False) -> pa.StringArray:
    """The column as text. Raises NotText for the first value that is not text. With ``shown``, bytes that are not text
    are written as by :meth:`Encoding.shown`."""
    if encoding.unicode or bool((laid_out(values)[0] < 0x80).all()):
        try:
            return values.cast(pa.string())
        except pa.ArrowInvalid:
            pass
    # PostgreSQL's texts have no zero byte. So a zero byte can separate the values, and ends a truncated character.
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
    """Decodes a column of names again that were read as UTF-8: see :meth:`Encoding.reread`. Fast for few different
    names."""
    if encoding.unicode or texts.null_count == len(texts):
        return texts
    names = whole(texts).dictionary_encode()
    known = pa.array([encoding.reread(name) for name in names.dictionary.to_pylist()], pa.string())
    return known.take(names.indices)
