"""Decodes many insert, update or delete messages of one relation at once, without a Python loop over the messages.

The input is an Arrow array with one message per row. Each message has its own cursor into the array's bytes. Each step
reads the same item of all messages (a letter, a count, or the value of one column), and moves all cursors past it. A
property test ensures that this module accepts and rejects the same messages as :mod:`pgcdc_assets.protocol.decode`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np
import pyarrow as pa

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.layouts import BINARY, CHANGE, NULL, TEXT, UNCHANGED, Image, RowKind
from pgcdc_assets.protocol.text.strings import NotText, decoded, gathered

PIECE_BYTES: Final = 1 << 30
"""The most bytes of payload that are decoded at once. Arrow's string offsets have 31 bits, and a message of PostgreSQL
has less than 1 GiB."""


class UndecodedValue(ProtocolError):
    """Raised if a value is not text in the source's encoding. ``row`` and ``column``: the index of the message in the
    payload array, and of the value in its tuple."""

    def __init__(self, what: str, *, lsn: Lsn | None = None, row: int = 0, column: int = 0) -> None:
        super().__init__(what, lsn=lsn)
        self.row = row
        self.column = column


@dataclass(frozen=True)
class Images:
    """The tuples of one kind (new, old or key tuples) from many messages, as columns."""

    image: Image
    """``N``: new tuples. ``O``: complete old tuples. ``K``: old tuples with only the key columns; PostgreSQL sends NULL
    for the other columns."""
    rows: Ints
    """For each tuple, the index of its message in the payload array; ascending."""
    text: list[pa.StringArray]
    """For each column, the values in text form. NULL if the value is NULL, or was not sent."""
    unchanged: list[Bools | None]
    """For each column, which values were not sent because they are unchanged TOAST; None if there are no such
    values."""


def images(
    payload: pa.Array | pa.ChunkedArray,
    kind: RowKind,
    columns: int,
    lsns: pa.Array | pa.ChunkedArray | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
    encoding: Encoding = UTF8,
    shown: bool = False,
) -> list[Images]:
    """Decodes ``payload``, an array (binary or large_binary) of messages of one kind and one relation. ``columns``: how
    many columns the relation has.

    The payload is decoded in pieces of at most ``piece_bytes``. Returns one :class:`Images` for each piece and kind of
    tuple. So an update with an old tuple is in two Images. With ``shown``, bytes that are not text in ``encoding`` are
    replaced as in :meth:`Encoding.shown`; otherwise they raise UndecodedValue. Raises ProtocolError for the first
    message that :mod:`pgcdc_assets.protocol.decode` would reject, or that has a different number of columns. The error
    names the message's LSN if ``lsns`` (one for each message) is given.
    """
    found: list[Images] = []
    first = 0
    for piece in _pieces(payload, piece_bytes):
        if len(piece):
            found += _Walk(piece, kind, columns, first, lsns, encoding, shown=shown).images()
        first += len(piece)
    return found


def _pieces(payload: pa.Array | pa.ChunkedArray, most: int) -> Iterator[pa.Array]:
    """Cuts the chunks into pieces of at most ``most`` bytes. A message that is larger is alone in its piece."""
    for chunk in payload.chunks if isinstance(payload, pa.ChunkedArray) else [payload]:
        if chunk.null_count:
            raise ProtocolError("a row of the change log has no payload")
        ends = _offsets(chunk)
        at = 0
        while at < len(chunk):
            stop = max(int(np.searchsorted(ends, ends[at] + most, side="right")) - 1, at + 1)
            yield chunk.slice(at, stop - at)
            at = stop


def _offsets(array: pa.Array) -> Ints:
    if len(array) == 0:
        return np.zeros(1, np.int64)
    width = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    return np.frombuffer(array.buffers()[1], width)[array.offset : array.offset + len(array) + 1].astype(np.int64)


class _Walk:
    """Decodes one piece of payload, which must be smaller than 2 GiB, with one cursor per message."""

    def __init__(
        self, payload: pa.Array, kind: RowKind, columns: int, first: int, lsns: pa.Array | pa.ChunkedArray | None,
        encoding: Encoding, *, shown: bool,
    ) -> None:  # fmt: skip
        offsets = _offsets(payload)
        start, stop = int(offsets[0]), int(offsets[-1])
        if stop - start >= 1 << 31:
            raise ProtocolError("a message of 2 GiB or more, which no server sends")
        self.kind, self.columns, self.first, self.lsns = kind, columns, first, lsns
        self.encoding, self.shown = encoding, shown
        # Eight bytes of padding are added at the end, so that eight bytes can be read at any cursor.
        self.data = np.zeros(stop - start + 8, np.uint8)
        if stop > start:
            self.data[:-8] = np.frombuffer(payload.buffers()[2], np.uint8)[start:stop]
        # A view with a big-endian 8-byte word at every byte, so that one read gets letter and length of a value.
        self.words = np.ndarray((len(self.data) - 7,), ">i8", self.data, strides=(1,))
        self.at: Ints = offsets[:-1] - start
        self.ends: Ints = offsets[1:] - start

    def images(self) -> list[Images]:
        head = self._read(None)
        self._move(None, self.at + CHANGE.size, "truncated")
        self._require(head >> 56 == ord(self.kind), None, "its payload begins with the letter of another kind")
        self._require(self.at < self.ends, None, "truncated")
        letters = self._read(None) >> 56
        # Only a delete needs this check. For an insert or an update, _tuples checks the letter before the new tuple.
        known = (letters == ord("K")) | (letters == ord("O")) | (self.kind != "D")
        self._require(known, None, "has an unexpected letter before its tuple")
        found: list[Images] = []
        if self.kind != "I":
            found += self._tuples("K", np.flatnonzero(letters == ord("K")))
            found += self._tuples("O", np.flatnonzero(letters == ord("O")))
        if self.kind != "D":
            # After a possible old tuple, the cursors of all rows are now at the new tuple.
            found += self._tuples("N", None)
        self._require(self.at == self.ends, None, "has bytes after its end")
        return found

    def _tuples(self, image: Image, rows: Ints | None) -> list[Images]:
        """Decodes the tuples that start at the cursors of ``rows`` (None: all messages)."""
        if rows is not None and len(rows) == 0:
            return []
        head = self._read(rows)
        self._move(rows, self._cursor(rows) + 3, "truncated")
        self._require(head >> 56 == ord(image), rows, "has an unexpected letter before its tuple")
        self._require(
            head >> 40 & 0xFFFF == self.columns,
            rows,
            f"has a number of columns other than {self.columns}, the number of its relation",
        )
        text: list[pa.StringArray] = []
        unchanged: list[Bools | None] = []
        for column in range(self.columns):
            values, marks = self._column(rows, column)
            text.append(values)
            unchanged.append(marks)
        where = np.arange(len(self.at)) if rows is None else rows
        return [Images(image, where + self.first, text, unchanged)]

    def _column(self, rows: Ints | None, column: int) -> tuple[pa.StringArray, Bools | None]:
        """Reads the value of one column in each message, and moves the cursors past it. Returns the texts, and which
        values were not sent because they are unchanged TOAST."""
        at = self._cursor(rows)
        word = self._read(rows)
        letter = word >> 56
        length = word >> 24 & 0xFFFF_FFFF
        present = letter == TEXT
        if present.all():
            starts = at + 5
            ends = starts + length
            self._move(rows, ends, "truncated")
            return self._strings(rows, column, starts, ends, None), None
        starts = at + np.where(present, 5, 1)
        ends = starts + np.where(present, length, 0)
        self._move(rows, ends, "truncated")
        unchanged = letter == UNCHANGED
        self._require(letter != BINARY, rows, "has a value in binary form, which was not requested")
        self._require(
            present | unchanged | (letter == NULL), rows, "has a value with a letter other than n, u, t and b"
        )
        return self._strings(rows, column, starts, ends, present), unchanged if unchanged.any() else None

    def _strings(
        self, rows: Ints | None, column: int, starts: Ints, ends: Ints, present: Bools | None
    ) -> pa.StringArray:  # fmt: skip
        if present is not None and not present.any():
            return pa.nulls(len(starts), pa.string())
        try:
            return decoded(gathered(self.data, starts, ends, present), self.encoding, shown=self.shown)
        except NotText as error:
            row = error.row if rows is None else int(rows[error.row])
            what = f"message of kind {self.kind!r}: has a text that is not in {self.encoding.title}"
            raise UndecodedValue(what, lsn=self._lsn(row), row=row + self.first, column=column) from None

    def _cursor(self, rows: Ints | None) -> Ints:
        return self.at if rows is None else self.at[rows]

    def _read(self, rows: Ints | None) -> Ints:
        """The eight bytes at each cursor, as a big-endian number. The caller must not use bytes past the message's
        end."""
        return self.words[self._cursor(rows)].astype(np.int64)

    def _move(self, rows: Ints | None, to: Ints, what: str) -> None:
        """Moves the cursors. Raises ProtocolError if a cursor would leave its message, so that later reads at a cursor
        need no check."""
        self._require(to <= (self.ends if rows is None else self.ends[rows]), rows, what)
        if rows is None:
            self.at = to
        else:
            self.at[rows] = to

    def _require(self, sound: Bools, rows: Ints | None, what: str) -> None:
        if sound.all():
            return
        bad = int(np.argmin(sound))
        self._fail(bad if rows is None else int(rows[bad]), what)

    def _fail(self, row: int, what: str) -> NoReturn:
        raise ProtocolError(f"message of kind {self.kind!r}: {what}", lsn=self._lsn(row))

    def _lsn(self, row: int) -> Lsn | None:
        lsn = None if self.lsns is None else self.lsns[row + self.first].as_py()
        return None if lsn is None else Lsn(lsn)
