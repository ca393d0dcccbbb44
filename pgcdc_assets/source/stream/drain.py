"""Reads WAL through the SQL functions: the frames that a stream would bring, many to a send.

The walsender sends message by message, and that is its limit. ``pg_logical_slot_get_binary_changes``
decodes the same WAL with the same plugin and hands all of it to COPY, which fills the socket. It is
called for one range of WAL after the other on a temporary copy of the slot, so that the slot itself
stays where the log is durable: ``pg_replication_slot_advance`` moves it there.

Each call collects its range on the server (in memory up to ``work_mem``, then in a file) before it sends the first row,
and begins to read at the oldest open transaction: see :attr:`Drain.over`.

A backlog is drained this way before the stream takes over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

import numpy as np
import psycopg
from psycopg import OperationalError

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import PgcdcError, SlotActive, SourceUnavailable
from pgcdc_assets.protocol.frames import FrameBlock, keepalive_frame
from pgcdc_assets.protocol.layouts import COMMIT, XLOG_DATA, MessageKind
from pgcdc_assets.source.connect.failures import of_exception
from pgcdc_assets.source.connect.pluginoptions import PluginOptions
from pgcdc_assets.source.connect.quoting import literal
from pgcdc_assets.source.connect.readers import FrameSource
from pgcdc_assets.source.connect.socketreader import SocketReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.positions import FLUSH_LSN, WITHIN

LEAST_BYTES: Final = 32 << 20
"""A smaller backlog is streamed: a drain first copies the slot, and the stream brings this much WAL in that time."""


@dataclass(frozen=True)
class RangeLimits:
    """How large the ranges are, and how often the source is looked at and the slot moves. Sizes are bytes of WAL."""

    smallest_range: int = 256 << 20
    largest_range: int = 512 << 20
    """What one call decodes at most. Each call reads from the slot's restart_lsn on. That moves only at WAL records of
    the running transactions (every 15 s, and at checkpoints), and no further than the oldest open transaction. So each
    call reads WAL again: what was sent before at an eighth of the cost, what is still open at its whole cost. Therefore
    ranges are large, and at least half of what is read again. A transaction comes whole with the range in which it
    commits."""
    unsure_bytes: int = 1 << 20
    """If the flush position lies inside a record: how far before it that record begins at most. The decoding function
    would wait for the record's end with all that it has collected, for seconds if the source has come to rest. A larger
    record (as a rule that of a message) is waited for."""
    release_bytes: int = 256 << 20
    """What may be durable in the log while the slot still holds it: advancing the slot reads it once more."""
    touch_seconds: float = 10.0
    """The slot is touched this often, wherever it stands: a slot that nobody acquires for long is invalidated
    (idle_replication_slot_timeout), even if a copy of it is in use."""
    held_seconds: float = 30.0
    """Somebody else may hold the slot for this long when it is to move; then the run ends."""


RANGE_LIMITS: Final = RangeLimits()

_MOST_AGAIN: Final = 8
"""How many largest ranges of WAL a call may read again: beyond that the calls cost more than the stream."""
_PREAMBLE: Final = 19
"""Bytes of binary COPY before the first row, sent together with it: signature, flags and extension."""
_TRAILER: Final = 2
_SHIFT: Final = 5
"""A row of (lsn, 0::int8, data) is the count of columns (2 bytes), then length (4) and value of each. ``lsn`` lies at
byte 6 and the message at byte 30. So from byte 5 on, which is the last of the length of ``lsn`` (FrameKind.ROW), the
row reads as an XLogData frame, whose LSN and message lie at 1 and at 25, and nothing is copied."""
_COMMIT_END: Final = XLOG_DATA.size + COMMIT.at("end_lsn")
"""Offset of end_lsn in a frame that carries a Commit."""

_RANGE: Final = (
    "COPY (SELECT lsn, 0::int8, data FROM pg_logical_slot_get_binary_changes({slot}, {upto}, NULL, {options}))"
    " TO STDOUT (FORMAT binary)"
)
_WHERE: Final = (
    f"SELECT {FLUSH_LSN}::text, {WITHIN}::text, restart_lsn::text"  # noqa: S608
    " FROM pg_catalog.pg_replication_slots WHERE slot_name = {slot}"
)
_ADVANCE: Final = """
SELECT pg_replication_slot_advance(w.slot, w.lsn) FROM (SELECT %s::name AS slot, %s::pg_lsn AS lsn) AS w
WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
                  WHERE s.slot_name = w.slot AND s.confirmed_flush_lsn > w.lsn)
"""
_CANCELLED_SECONDS: Final = 3.0
"""Time limit for the end of a call that was cancelled."""
_U64: Final = Struct("!Q")


@dataclass(frozen=True)
class SlotCopy:
    """A temporary copy of ``slot`` that its connection holds, its position, and the plugin's options."""

    connection: ReplicationConnection
    wire: SocketReader
    """The connection's socket."""
    slot: str
    name: str
    position: Lsn
    publications: Sequence[str]
    options: PluginOptions


class Drain(FrameSource):
    """Reads a backlog, one range of WAL after the other, from the copy's position on, until :attr:`over`. Its
    connection runs nothing else during a range.

    Any error drops a session's temporary slots, so what may fail runs on the connection ``beside``.
    """

    def __init__(
        self, copy: SlotCopy, beside: psycopg.Connection[Any], limits: RangeLimits, *, goal: Lsn, drain_bytes: int
    ) -> None:
        self.position = copy.position
        """A boundary: all that commits below it has been taken."""
        self.over = False
        """Whether so little is left that the stream brings it sooner, or a transaction is open for so long that each
        call would decode the same WAL again."""
        self._goal, self._drain_bytes = goal, drain_bytes
        self._connection = copy.connection
        self._beside = beside
        self._limits = limits
        self._wire = copy.wire
        self._slot, self._copy = copy.slot, copy.name
        told = copy.options.given(copy.publications)
        self._options = ", ".join(literal(part) for option in told.items() for part in option)
        self._advanced = self._flushed = copy.position
        self._touch_due = 0.0
        self._upto: Lsn | None = None
        """End of the range that is being read."""
        self._first = True
        self._refused_at: float | None = None
        """Since when somebody else has held the slot."""

    @property
    def held(self) -> int:
        return self._wire.held

    def pull(self) -> bool:
        if self._upto is None:
            self._next_range()
        return self._upto is not None and self._wire.pull()

    def take(self) -> FrameBlock:
        """Rows as XLogData frames; after the rows of a range a keepalive, whose position is a boundary."""
        rows = self._wire.data()
        if not len(rows):
            while (kind := self._wire.other()) is not None:
                if kind == b"Z":
                    return self._ended()
            rows = self._wire.data()
        return self._frames(rows) if len(rows) else rows

    def flushed(self, lsn: Lsn) -> None:
        """Say that everything below ``lsn`` is durable: between two ranges the slot is advanced to it. Until then it is
        touched where it stands, which decodes nothing."""
        self._flushed = max(self._flushed, lsn)
        now = time.monotonic()
        if now >= self._touch_due:
            self._touch_due = now + self._limits.touch_seconds
            self._advance_to(self._advanced)

    def end(self) -> None:
        """Drop the copy when the drain is over; it would hold WAL for as long as the connection lives."""
        self._advance(1)
        self._connection.execute(f"SELECT pg_drop_replication_slot({literal(self._copy)})")

    def finish(self) -> None:
        """End at any time: the range that is being read is cancelled, and the slot is advanced to what is durable."""
        with suppress(PgcdcError, OperationalError):
            # A slot that stays behind the log does no harm: what comes again is known.
            if self._upto is not None:
                self._connection.cancel()
                self._let_go()
            self._advance(1)

    # Ranges -------------------------------------------------------------------------------------

    def _next_range(self) -> None:
        """Begin the next range unless the drain is over. No range is being read."""
        if self.over:
            return
        self._advance(self._limits.release_bytes)
        whole, restart = self._where()
        behind = whole - self.position
        little = behind <= 0 or (behind < self._drain_bytes and self.position >= self._goal)
        self.over = little or self.position - restart > _MOST_AGAIN * self._limits.largest_range
        if not self.over:
            self._begin(restart, whole)

    def _begin(self, restart: Lsn, end: Lsn) -> None:
        """Begin the next range, towards ``end``; it is as large as what it reads again makes worth while."""
        smallest, largest = self._limits.smallest_range, self._limits.largest_range
        size = min(max(smallest, (self.position - restart) // 2), largest)
        self._upto, self._first = Lsn(min(self.position + size, end)), True
        upto, slot = literal(str(self._upto)), literal(self._copy)
        self._wire.command(_RANGE.format(slot=slot, upto=upto, options=self._options))

    def _ended(self) -> FrameBlock:
        assert self._upto is not None
        self.position, self._upto = max(self.position, self._upto), None
        return FrameBlock.of([keepalive_frame(self.position)])

    def _advance(self, least: int) -> None:
        """Advance the slot over what is durable, if that is at least ``least`` bytes of WAL. A slot that somebody has
        advanced further stays there."""
        if self._flushed - self._advanced >= least:
            self._advance_to(self._flushed)

    def _advance_to(self, lsn: Lsn) -> None:
        try:
            self._beside.execute(_ADVANCE, [self._slot, str(lsn)])
        except psycopg.Error as error:
            typed = of_exception(error).typed(f"slot {self._slot}")
            # Somebody else holds the slot for a moment, as monitoring may. Whoever keeps it holds the source's WAL.
            self._refused_at = self._refused_at or time.monotonic()
            held = time.monotonic() - self._refused_at
            if not isinstance(typed, SlotActive) or held > self._limits.held_seconds:
                raise typed from None
            return
        self._advanced, self._refused_at = max(self._advanced, lsn), None

    def _where(self) -> tuple[Lsn, Lsn]:
        """A position up to which the source's WAL is durable in whole records, and where the next call begins to
        read."""
        told, within, restart = self._connection.execute(_WHERE.format(slot=literal(self._copy)))[0]
        flushed = Lsn.parse(told or "")
        whole = Lsn(max(0, flushed - self._limits.unsure_bytes)) if within == "true" else flushed
        return whole, Lsn.parse(restart or "")

    def _let_go(self) -> None:
        """Read and drop until the server is ready for a command. Raises SourceUnavailable if it does not become
        ready."""
        deadline = time.monotonic() + _CANCELLED_SECONDS
        while time.monotonic() < deadline:
            self._wire.data()
            try:
                kind = self._wire.other()
            except SourceUnavailable:
                raise
            except PgcdcError:
                # This is the error that says that the command was cancelled.
                continue
            if kind == b"Z":
                return
            if kind is None and not self._wire.pull():
                self._connection.wait(0.2)
        raise SourceUnavailable("does not give up the call under way", thing=self._connection.endpoint)

    # Rows ---------------------------------------------------------------------------------------

    def _frames(self, rows: FrameBlock) -> FrameBlock:
        offsets, lengths = rows.offsets.copy(), rows.lengths.copy()
        if self._first:
            offsets[0] += _PREAMBLE
            lengths[0] -= _PREAMBLE
            self._first = False
        kept = lengths > _TRAILER
        offsets, lengths = offsets[kept] + _SHIFT, lengths[kept] - _SHIFT
        kinds = np.frombuffer(rows.raw, np.uint8)[offsets + XLOG_DATA.size]
        commits = np.flatnonzero(kinds == MessageKind.COMMIT)
        if len(commits):
            at = int(offsets[commits[-1]]) + _COMMIT_END
            self.position = Lsn(max(self.position, _U64.unpack_from(rows.raw, at)[0]))
        return FrameBlock(rows.raw, offsets, lengths)
