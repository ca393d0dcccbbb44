"""Makes Arrow string columns from slices of a buffer, and converts them from the server's encoding to UTF-8. In every
encoding that a server may have, bytes below 0x80 are ASCII. So a column of only such bytes needs no conversion.

Also splits PostgreSQL's text form of arrays into elements, for a whole column at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, Ints, Octets, whole
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.errors import ProtocolError

_MOST: Final = (1 << 31) - 1
"""The largest number of bytes in a string column, because Arrow's offsets have 31 bits."""


def gathered(data: Any, starts: Ints, ends: Ints, valid: Bools | None = None) -> pa.BinaryArray:
    """Copies ``data[starts[i]:ends[i]]`` for every i to one binary array; NULL where ``valid`` is false. The slices
    must be in order and must not overlap. ``data`` (an Arrow buffer or numpy bytes) must be shorter than 2 GiB."""
    # Build an array over the buffer without a copy, whose values are: slice, gap, slice, gap ... Then take every second
    # value.
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
    # Decode all values at once, joined by zero bytes. PostgreSQL's texts contain no zero byte, and a zero byte cannot
    # complete a truncated character.
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
    """Applies :meth:`Encoding.reread` to a column of names. Decodes each distinct name only once."""
    if encoding.unicode or texts.null_count == len(texts):
        return texts
    names = whole(texts).dictionary_encode()
    known = pa.array([encoding.reread(name) for name in names.dictionary.to_pylist()], pa.string())
    return known.take(names.indices)


_QUOTE, _BACKSLASH, _OPEN, _CLOSE = (ord(mark) for mark in '"\\{}')
_NULL: Final = np.frombuffer(b"NULL", np.uint8)


@dataclass(frozen=True)
class Elements:
    """A column of arrays in the layout of Arrow's lists: the elements of row i are ``text[offsets[i]:offsets[i + 1]]``.

    The text form is described in "Array Input and Output Syntax": ``{1,NULL,"a \\"b\\" \\\\ c"}``. An element is in
    quotes if it is empty, is the word NULL, or contains a brace, the delimiter, a quote, a backslash or white space.
    Inside quotes, a backslash makes the next byte literal. All these characters are ASCII, so the code works on bytes.
    """

    offsets: npt.NDArray[np.int32]
    text: pa.StringArray
    """The texts of the elements, without quotes and escapes. NULL for a NULL element."""


def not_plain(text: pa.StringArray) -> Bools:
    """Marks arrays with two or more dimensions, or with a lower bound that is not 1 (``[0:1]={...}``). Arrow's lists
    cannot represent these."""
    odd = pc.or_(pc.starts_with(text, "["), pc.starts_with(text, "{{"))
    return np.asarray(odd.fill_null(False))


def elements(text: pa.StringArray, delimiter: str = ",") -> Elements:
    """Splits each array of the column into its elements. A NULL has no elements. The arrays must have one dimension:
    raises ProtocolError for any other text, also for arrays that :func:`not_plain` marks."""
    octets, offsets = laid_out(text)
    present = np.asarray(text.is_valid())
    marks = _Marks.of(octets, offsets, ord(delimiter))
    letters = octets[marks.structure]
    # Each value must have one opening brace at its start, one closing brace at its end, and no brace between these.
    opening, closing = marks.structure[letters == _OPEN], marks.structure[letters == _CLOSE]
    _require(np.array_equal(opening, offsets[:-1][present]) and np.array_equal(closing, offsets[1:][present] - 1))
    at = np.flatnonzero(letters != _CLOSE)
    starts, ends = marks.structure[at] + 1, marks.structure[at + 1]
    empty = starts == ends
    _require(bool(((letters[at] == _OPEN) & (letters[at + 1] == _CLOSE))[empty].all()))
    starts, ends = starts[~empty], ends[~empty]
    known = ~_nulls(octets, starts, ends)
    content, starts_in, ends_in = marks.unquoted(octets, starts, ends)
    found = gathered(content, starts_in, ends_in, known).cast(pa.string())
    return Elements(np.searchsorted(starts, offsets).astype(np.int32), found)


@dataclass(frozen=True)
class _Marks:
    """The offsets, in ascending order, of those bytes of the column that are not part of an element's text."""

    quotes: Ints
    """Quotes that open or close an element."""
    escapes: Ints
    """Backslashes that make the next byte literal."""
    structure: Ints
    """Braces and delimiters outside of quotes."""

    @classmethod
    def of(cls, octets: Octets, offsets: Ints, delimiter: int) -> _Marks:
        quotes = np.flatnonzero(octets == _QUOTE)
        structure = np.flatnonzero((octets == _OPEN) | (octets == delimiter) | (octets == _CLOSE))
        escapes = _escapes(octets)
        if len(escapes):
            literal = np.zeros(len(octets) + 1, np.bool_)
            literal[escapes + 1] = True
            quotes, structure = quotes[~literal[quotes]], structure[~literal[structure]]
        if len(quotes):
            # Every value must have an even number of quotes. Otherwise the next value would seem to be inside quotes.
            _require(not (np.searchsorted(quotes, offsets) & 1).any())
            structure = structure[np.searchsorted(quotes, structure) & 1 == 0]
        return cls(quotes, escapes, structure)

    def unquoted(self, octets: Octets, starts: Ints, ends: Ints) -> tuple[Octets, Ints, Ints]:
        """Returns the bytes without quotes and escapes, and the starts and ends of the elements in these bytes."""
        if len(self.quotes) == 0 and len(self.escapes) == 0:
            return octets, starts, ends
        self._check_quoted(octets, starts, ends)
        dropped = np.sort(np.concatenate([self.quotes, self.escapes]))
        kept = np.ones(len(octets), np.bool_)
        kept[dropped] = False
        return octets[kept], starts - np.searchsorted(dropped, starts), ends - np.searchsorted(dropped, ends)

    def _check_quoted(self, octets: Octets, starts: Ints, ends: Ints) -> None:
        """Raises ProtocolError unless each element has quotes at both ends or no quotes, and all escapes are inside
        quotes."""
        first = np.searchsorted(self.quotes, starts)
        count = np.searchsorted(self.quotes, ends) - first
        quoted = octets[starts] == _QUOTE
        _require(np.array_equal(count, np.where(quoted, 2, 0)))
        _require(np.array_equal(self.quotes[first[quoted] + 1], ends[quoted] - 1))
        _require(bool((np.searchsorted(self.quotes, self.escapes) & 1).all()))


def _escapes(octets: Octets) -> Ints:
    """The positions of backslashes that escape the next byte: in a row of backslashes, the first, third, fifth ..."""
    found: Ints = np.flatnonzero(octets == _BACKSLASH)
    if len(found) == 0:
        return found
    number = np.arange(len(found))
    first_of_run = np.maximum.accumulate(np.where(np.diff(found, prepend=-2) == 1, 0, number))
    escaping: Ints = found[(number - first_of_run) & 1 == 0]
    return escaping


def _nulls(octets: Octets, starts: Ints, ends: Ints) -> Bools:
    """Marks the elements that are NULL: the word NULL without quotes, so exactly four bytes. In quotes, it would be a
    text of six bytes."""
    nulls: Bools = ends - starts == len(_NULL)
    where = np.flatnonzero(nulls)
    nulls[where] = (octets[starts[where, None] + np.arange(len(_NULL))] == _NULL).all(axis=1)
    return nulls


def _require(sound: bool) -> None:
    if not sound:
        raise ProtocolError("a value is not the text form of an array")
