"""Splits PostgreSQL's text form of arrays into elements, for a whole column at once. The form is described in "Array
Input and Output Syntax": ``{1,NULL,"a \\"b\\" \\\\ c"}``. An element is in quotes if it is empty, is the word NULL, or
contains a brace, the delimiter, a quote, a backslash or white space. Inside quotes, a backslash makes the next byte
literal. All these characters are ASCII, so the code works on the bytes of UTF-8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, Ints, Octets
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.text.strings import gathered, laid_out

_QUOTE, _BACKSLASH, _OPEN, _CLOSE = (ord(mark) for mark in '"\\{}')
_NULL: Final = np.frombuffer(b"NULL", np.uint8)


@dataclass(frozen=True)
class Elements:
    """A column of arrays in the layout of Arrow's lists: the elements of row i are
    ``text[offsets[i]:offsets[i + 1]]``."""

    offsets: npt.NDArray[np.int32]
    text: pa.StringArray
    """The texts of the elements, without quotes and escapes. NULL for a NULL element."""


def not_plain(text: pa.StringArray) -> Bools:
    """Marks arrays with two or more dimensions, or with a lower bound that is not 1 (``[0:1]={...}``). Arrow's lists
    cannot represent these."""
    odd = pc.or_(pc.starts_with(text, "["), pc.starts_with(text, "{{"))
    return np.asarray(odd.fill_null(False))


def elements(text: pa.StringArray, delimiter: str = ",") -> Elements:
    """Splits arrays with one dimension into elements. NULL rows have no elements. Raises ProtocolError for any other
    text, also for arrays that :func:`not_plain` marks."""
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
    """Positions in the column's bytes, ascending."""

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
        """Check that each element has quotes at both ends or no quotes, and that escapes are only inside quotes."""
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
    """Marks the elements that are NULL, that is, the word NULL without quotes. With quotes it has six bytes."""
    nulls: Bools = ends - starts == len(_NULL)
    where = np.flatnonzero(nulls)
    nulls[where] = (octets[starts[where, None] + np.arange(len(_NULL))] == _NULL).all(axis=1)
    return nulls


def _require(sound: bool) -> None:
    if not sound:
        raise ProtocolError("a value is not the text form of an array")
