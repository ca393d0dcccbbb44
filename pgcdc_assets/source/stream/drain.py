"""WAL through the SQL functions: the frames that a stream would bring, many to a send.

The walsender sends message by message, and that is its limit. ``pg_logical_slot_get_binary_changes``
decodes the same WAL with the same plugin and hands all of it to COPY, which fills the socket. It is
called for one range of WAL after the other on a temporary copy of the slot, so that the slot itself
stays where the log is durable: ``pg_replication_slot_advance`` moves it there.

Each call collects its range on the server (in memory up to ``work_mem``, then in a file) before the
first row comes, and begins to read at the oldest transaction that is open: see :attr:`Drain.over`.

A backlog is drained this way before the stream takes over; where the source takes no replication
connections, all of it comes so (:mod:`pgcdc_assets.source.stream.polling`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
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
from pgcdc_assets.source.connect.libpq import LibpqConnection
from pgcdc_assets.source.connect.quoting import literal, plugin_options
from pgcdc_assets.source.connect.readers import FrameSource, RowReader
from pgcdc_assets.source.positions import FLUSH_LSN, WITHIN

SMALLEST_RANGE: Final = 256 << 20
LARGEST_RANGE: Final = 512 << 20
"""WAL that one call decodes. Each call reads from the slot's restart_lsn on, which moves only where the WAL tells of
running transactions (every 15 s, and at checkpoints) and no further than to the oldest that is open: what was sent
before is read again, at an eighth of the cost, what is still open at its whole cost. So ranges are large, and half
of what is read again at least. A transaction comes whole with the range in which it commits."""
LEAST_BYTES: Final = 32 << 20
"""A smaller backlog than this is streamed: a drain first copies the slot, and the stream brings this much WAL as soon.
"""
UNSURE_BYTES: Final = 1 << 20
"""In front of a flush position inside a record: how far back that record begins at most. The function that decodes
would wait for its end, with all that it has collected: for seconds, if the source has come to rest. A larger record
(of a message, as a rule) is waited for."""
TOUCH_SECONDS: Final = 10.0
"""The slot is touched this often, wherever it stands: one that nobody takes for long is invalidated
(idle_replication_slot_timeout), though a copy of it is at work."""
RELEASE_BYTES: Final = 256 << 20
"""WAL that may be durable in the log while the slot still holds it: to advance reads it once more."""

_MOST_AGAIN: Final = 8
"""Largest ranges' worth of WAL that a call may read again: from there on the calls cost more than the stream."""
_PREAMBLE: Final = 19
"""Bytes of binary COPY before the first row, sent together with it: signature, flags and extension."""
_TRAILER: Final = 2
_SHIFT: Final = 5
"""Row of (lsn, 0::int8, data): count of columns (2), then length (4) and value of each. ``lsn`` lies at byte 6 and
the message at byte 30: from byte 5 on, which is the last of the length of ``lsn`` (FrameKind.ROW), the row reads
as an XLogData frame, whose LSN and message stand at 1 and at 25. So nothing is copied."""
_COMMIT_END: Final = XLOG_DATA.size + COMMIT.at("end_lsn")
"""Where end_lsn stands in a frame that carries a Commit."""

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
_HELD_SECONDS: Final = 30.0
_CANCELLED_SECONDS: Final = 3.0
"""For the end of a call that was cancelled."""
_U64: Final = Struct("!Q")


@dataclass(frozen=True)
class SlotCopy:
    """A temporary copy of ``slot`` that its connection holds, where it stands, and what the plugin is told."""

    connection: LibpqConnection
    slot: str
    name: str
    position: Lsn
    publications: Sequence[str]
    options: Mapping[str, str]


class Ranges(FrameSource):
    """From where the copy stands on, one range of WAL after the other. Its connection runs nothing else meanwhile.

    Any error drops a session's temporary slots: what may fail runs ``beside`` it.
    """

    def __init__(self, copy: SlotCopy, beside: psycopg.Connection[Any]) -> None:
        self.position = copy.position
        """A boundary: all that commits below it has been taken."""
        self._connection = copy.connection
        self._beside = beside
        self._wire: RowReader = copy.connection.rows()
        self._slot, self._copy = copy.slot, copy.name
        told = plugin_options(copy.publications, copy.options)
        self._options = ", ".join(literal(part) for option in told.items() for part in option)
        self._advanced = self._flushed = copy.position
        self._touch_due = 0.0
        self._upto: Lsn | None = None
        """End of the range that is under way."""
        self._first = True
        self._refused_at: float | None = None
        """Since when somebody else has held the slot."""

    @property
    def held(self) -> int:
        return self._wire.held

    @property
    def calling(self) -> bool:
        """Whether a range is under way."""
        return self._upto is not None

    def pull(self) -> bool:
        if self._upto is None:
            self._next_range()
        return self._upto is not None and self._wire.pull()

    def take(self) -> FrameBlock:
        """Rows as XLogData frames; after those of a range a keepalive, whose position is a boundary."""
        rows = self._wire.data()
        if not len(rows):
            while (kind := self._wire.other()) is not None:
                if kind == b"Z":
                    return self._ended()
            rows = self._wire.data()
        return self._frames(rows) if len(rows) else rows

    def flushed(self, lsn: Lsn) -> None:
        """All below is durable: between two ranges the slot is advanced to it. Meanwhile it is touched where it stands,
        which decodes nothing."""
        self._flushed = max(self._flushed, lsn)
        now = time.monotonic()
        if now >= self._touch_due:
            self._touch_due = now + TOUCH_SECONDS
            self._advance_to(self._advanced)

    def finish(self) -> None:
        """End, wherever it stands: the range under way is cancelled, and the slot advanced to what is durable."""
        with suppress(PgcdcError, OperationalError):
            # A slot that stays behind the log is no harm: what comes again is known.
            if self._upto is not None:
                self._connection.cancel()
                self._let_go()
            self._advance(1)

    # Ranges -------------------------------------------------------------------------------------

    @abstractmethod
    def _next_range(self) -> None:
        """No range is under way: begin the next one, if there shall be one now."""

    def _begin(self, restart: Lsn, end: Lsn) -> None:
        """The next range, towards ``end``; as large as what is read again for it makes worth while."""
        size = min(max(SMALLEST_RANGE, (self.position - restart) // 2), LARGEST_RANGE)
        self._upto, self._first = Lsn(min(self.position + size, end)), True
        upto, slot = literal(str(self._upto)), literal(self._copy)
        self._wire.command(_RANGE.format(slot=slot, upto=upto, options=self._options))

    def _ended(self) -> FrameBlock:
        assert self._upto is not None
        self.position, self._upto = max(self.position, self._upto), None
        return self._boundary()

    def _boundary(self) -> FrameBlock:
        return FrameBlock.of([keepalive_frame(self.position)])

    def _advance(self, least: int) -> None:
        """Advance the slot over what is durable, if that is enough WAL. A slot that somebody has advanced further stays
        there."""
        if self._flushed - self._advanced >= least:
            self._advance_to(self._flushed)

    def _advance_to(self, lsn: Lsn) -> None:
        try:
            self._beside.execute(_ADVANCE, [self._slot, str(lsn)])
        except psycopg.Error as error:
            typed = of_exception(error).typed(f"slot {self._slot}")
            # Somebody looks into it, as monitoring may. Whoever stays holds the source's WAL.
            self._refused_at = self._refused_at or time.monotonic()
            if not isinstance(typed, SlotActive) or time.monotonic() - self._refused_at > _HELD_SECONDS:
                raise typed from None
            return
        self._advanced, self._refused_at = max(self._advanced, lsn), None

    def _where(self) -> tuple[Lsn, Lsn, Lsn]:
        """The source's flush position, the end of its whole records below, and where the next call begins to read."""
        told, within, restart = self._connection.execute(_WHERE.format(slot=literal(self._copy)))[0]
        flushed = Lsn.parse(told or "")
        whole = Lsn(max(0, flushed - UNSURE_BYTES)) if within == "true" else flushed
        return flushed, whole, Lsn.parse(restart or "")

    def _let_go(self) -> None:
        """Read and drop until the server is ready for a command. SourceUnavailable if it does not get there."""
        deadline = time.monotonic() + _CANCELLED_SECONDS
        while time.monotonic() < deadline:
            self._wire.data()
            try:
                kind = self._wire.other()
            except SourceUnavailable:
                raise
            except PgcdcError:
                # That the command was cancelled.
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


class Drain(Ranges):
    """A backlog, until :attr:`over`."""

    def __init__(self, copy: SlotCopy, beside: psycopg.Connection[Any], *, goal: Lsn, drain_bytes: int) -> None:
        super().__init__(copy, beside)
        self.over = False
        """So little is left that the stream brings it sooner; or a transaction is open for so long that each
        call would decode the same WAL again."""
        self._goal, self._drain_bytes = goal, drain_bytes

    def end(self) -> None:
        """When it is over: drop the copy, which would hold WAL for as long as the connection lives."""
        self._advance(1)
        self._connection.execute(f"SELECT pg_drop_replication_slot({literal(self._copy)})")

    def _next_range(self) -> None:
        if self.over:
            return
        self._advance(RELEASE_BYTES)
        _, whole, restart = self._where()
        behind = whole - self.position
        little = behind <= 0 or (behind < self._drain_bytes and self.position >= self._goal)
        self.over = little or self.position - restart > _MOST_AGAIN * LARGEST_RANGE
        if not self.over:
            self._begin(restart, whole)
