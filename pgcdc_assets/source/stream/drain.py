"""Reads a large backlog of WAL through SQL functions before the stream begins, which is called a **drain**.

The walsender sends each message separately, which limits its speed. ``pg_logical_slot_get_binary_changes`` decodes the
same WAL with the same plugin, and returns the same messages in bulk, through COPY. Each call reads one range of WAL, on
a temporary copy of the slot. The slot itself is advanced only to the durable end of the change log. The receiver gets
the same frames as from the stream.

The server collects the rows of a call before it sends the first one, in memory up to ``work_mem`` and then in a file.
Each call begins to read at the oldest open transaction, so a long transaction makes each call read more WAL again. The
drain ends when this costs too much (:attr:`Drain.over`).
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
from pgcdc_assets.source.connect.connection import literal
from pgcdc_assets.source.connect.failures import of_exception
from pgcdc_assets.source.connect.pluginoptions import PluginOptions
from pgcdc_assets.source.connect.readers import FrameSource, SocketReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import WAL_ENDS, WITHIN

LEAST_BYTES: Final = 32 << 20
"""A smaller backlog is streamed. A drain has to copy the slot first, and the stream sends this much WAL in the same
time."""


@dataclass(frozen=True)
class RangeLimits:
    """The sizes of ranges, in bytes of WAL, and when the slot is advanced."""

    smallest_range: int = 256 << 20
    largest_range: int = 512 << 20
    """The most that one call decodes. Each call begins to read at the slot's restart_lsn. This LSN moves only at WAL
    records of the running transactions (every 15 s, and at checkpoints), and never past the oldest open transaction. So
    each call reads some WAL again: a transaction that was sent before costs an eighth of its first decoding, and an
    open transaction costs as much as the first time. To limit this cost, a range is at least half as large as the WAL
    that is read again, if ``largest_range`` allows it. A transaction is sent completely with the range that contains
    its commit."""
    unsure_bytes: int = 1 << 20
    """If the flush position may lie inside a record, a range ends at least this many bytes below it, so that the range
    probably ends below this record. Otherwise the decoding function waits until the record is complete, which takes
    seconds on an idle source. A record of more than this size still causes this wait."""
    release_bytes: int = 256 << 20
    """The slot is advanced each time that this much more WAL is durable in the log. It is not advanced more often,
    because each advance makes the server read this WAL again."""
    touch_seconds: float = 10.0
    """The longest time between two uses of the slot itself. PostgreSQL invalidates a slot that is not used for a long
    time (idle_replication_slot_timeout), even if a copy of it is in use."""
    held_seconds: float = 30.0
    """The run ends with an error if we cannot advance the slot for this many seconds, because another process holds
    it."""


RANGE_LIMITS: Final = RangeLimits()

_MOST_AGAIN: Final = 8
"""The drain ends if the next call would have to read again more WAL than this many times ``largest_range``. The stream
then costs less."""
_PREAMBLE: Final = 19
"""Bytes of binary COPY ahead of the first row, in the same message: signature, flags and extension."""
_TRAILER: Final = 2
_SHIFT: Final = 5
"""Offset from which a row of (lsn, 0::int8, data) has the layout of an XLogData frame, so that no byte is copied. A row
is the number of columns (2 bytes), then the length (4 bytes) and the value of each column. So ``lsn`` is at byte 6, and
the message at byte 30. In an XLogData frame, the LSN is at byte 1, and the message at byte 25. The frame's kind is at
byte 0, so byte 5 of the row is read as the kind. It is the last byte of the length field of ``lsn``. An LSN has 8
bytes, so this byte is always 8 (FrameKind.ROW)."""
_COMMIT_END: Final = XLOG_DATA.size + COMMIT.at("end_lsn")
"""Offset of end_lsn in a frame with a Commit message."""

_RANGE: Final = (
    "COPY (SELECT lsn, 0::int8, data FROM pg_logical_slot_get_binary_changes({slot}, {upto}, NULL, {options}))"
    " TO STDOUT (FORMAT binary)"
)
_WHERE: Final = (
    f"SELECT wal.flushed::text, {WITHIN}::text, restart_lsn::text"  # noqa: S608
    f" FROM {WAL_ENDS}, pg_catalog.pg_replication_slots WHERE slot_name = {{slot}}"
)
_ADVANCE: Final = """
SELECT pg_replication_slot_advance(w.slot, w.lsn) FROM (SELECT %s::name AS slot, %s::pg_lsn AS lsn) AS w
WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
                  WHERE s.slot_name = w.slot AND s.confirmed_flush_lsn > w.lsn)
"""
_CANCELLED_SECONDS: Final = 3.0
_U64: Final = Struct("!Q")


@dataclass(frozen=True)
class SlotCopy:
    """A temporary copy, named ``name``, of the replication slot ``slot``. The copy is dropped with ``connection``."""

    connection: ReplicationConnection
    wire: SocketReader
    slot: str
    name: str
    position: Lsn
    publications: Sequence[str]
    options: PluginOptions


class Drain(FrameSource):
    """Reads a backlog from the LSN of the slot's copy on, one range of WAL after another, until :attr:`over` is true.
    During a range, the connection of the copy runs nothing else. An error on it would drop the copy, which is a
    temporary slot. So commands that may fail run on another connection, ``beside``."""

    def __init__(
        self, copy: SlotCopy, beside: psycopg.Connection[Any], limits: RangeLimits, *, goal: Lsn, drain_bytes: int
    ) -> None:
        self.position = copy.position
        """A boundary: :meth:`take` has returned all transactions with a commit below this LSN."""
        self.over = False
        """Whether the drain has ended: the stream would send the rest sooner, or a transaction has been open for so
        long that each further call would read too much WAL again."""
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
        """End of the range that is being read; None between two ranges."""
        self._first = True
        self._refused_at: float | None = None
        """Time since which another process has held the slot; None if the last advance succeeded."""

    @property
    def held(self) -> int:
        return self._wire.held

    def pull(self) -> bool:
        if self._upto is None:
            self._next_range()
        return self._upto is not None and self._wire.pull()

    def take(self) -> FrameBlock:
        """Returns rows as XLogData frames. After the rows of a range, returns a keepalive at the range's end."""
        rows = self._wire.data()
        if not len(rows):
            while (kind := self._wire.other()) is not None:
                if kind == b"Z":
                    return self._ended()
            rows = self._wire.data()
        return self._frames(rows) if len(rows) else rows

    def flushed(self, lsn: Lsn) -> None:
        """Must be called when the log is durable up to ``lsn``. The slot is advanced to this LSN before a later range
        (:attr:`RangeLimits.release_bytes`). During a range, the slot is only advanced to its own position. This decodes
        nothing, but PostgreSQL counts it as a use of the slot (:attr:`RangeLimits.touch_seconds`)."""
        self._flushed = max(self._flushed, lsn)
        now = time.monotonic()
        if now >= self._touch_due:
            self._touch_due = now + self._limits.touch_seconds
            self._advance_to(self._advanced)

    def end(self) -> None:
        """Advances the slot and drops its copy, after the drain. Otherwise the copy would retain WAL during the
        stream."""
        self._advance(1)
        self._connection.execute(f"SELECT pg_drop_replication_slot({literal(self._copy)})")

    def finish(self) -> None:
        """Ends the drain at any time. Cancels the current range, and advances the slot to the durable LSN."""
        with suppress(PgcdcError, OperationalError):
            # If this fails, the slot stays below the log's end. This does no harm, because the receiver skips changes
            # that are already in the log.
            if self._upto is not None:
                self._connection.cancel()
                self._discard_until_ready()
            self._advance(1)

    # Ranges -------------------------------------------------------------------------------------

    def _next_range(self) -> None:
        """Begins the next range unless the drain is over. Called only between ranges."""
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
        """Begins the next range, which ends at ``end`` or below. The more WAL is read again, the larger the range."""
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
        """Advances the slot to the durable LSN if this LSN is at least ``least`` bytes above the slot's position. Never
        moves the slot back."""
        if self._flushed - self._advanced >= least:
            self._advance_to(self._flushed)

    def _advance_to(self, lsn: Lsn) -> None:
        try:
            self._beside.execute(_ADVANCE, [self._slot, str(lsn)])
        except psycopg.Error as error:
            typed = of_exception(error).typed(f"slot {self._slot}")
            # Another process, such as monitoring, may hold the slot for a moment. If it holds the slot for longer, the
            # run must end with an error, because the slot retains WAL as long as it is not advanced.
            self._refused_at = self._refused_at or time.monotonic()
            held = time.monotonic() - self._refused_at
            if not isinstance(typed, SlotActive) or held > self._limits.held_seconds:
                raise typed from None
            return
        self._advanced, self._refused_at = max(self._advanced, lsn), None

    def _where(self) -> tuple[Lsn, Lsn]:
        """Returns the LSN up to which whole records are durable, and the LSN at which the next call begins to read."""
        told, within, restart = self._connection.execute(_WHERE.format(slot=literal(self._copy)))[0]
        flushed = Lsn.parse(told or "")
        whole = Lsn(max(0, flushed - self._limits.unsure_bytes)) if within == "true" else flushed
        return whole, Lsn.parse(restart or "")

    def _discard_until_ready(self) -> None:
        """Reads and drops data until the server is ready for a command. Raises SourceUnavailable after a timeout."""
        deadline = time.monotonic() + _CANCELLED_SECONDS
        while time.monotonic() < deadline:
            self._wire.data()
            try:
                kind = self._wire.other()
            except SourceUnavailable:
                raise
            except PgcdcError:
                # The error of the cancelled command.
                continue
            if kind == b"Z":
                return
            if kind is None and not self._wire.pull():
                self._connection.wait(0.2)
        raise SourceUnavailable(
            f"did not cancel the running query within {_CANCELLED_SECONDS:g} s", thing=self._connection.endpoint
        )

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
