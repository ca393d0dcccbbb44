"""Positions of the receiver: the LSN at which it must stop, and the LSNs that it reports to the server."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn

DELAYS_UNTIL_FLUSHED = 3
"""After this many times ``wal_writer_delay``, an asynchronous commit is certainly on disk, as PostgreSQL documents for
``synchronous_commit``. So WAL that is still not flushed after this time contains no commit."""


class Endpos:
    """Decides where the receiver must stop. Does not wait or read anything itself.

    ``endpos`` is a goal to reach, never a position to confirm or store. The receiver ends at the last transaction
    boundary at or below ``endpos``.

    | where endpos falls | decided by |
    |---|---|
    | on a commit boundary | ``allows`` is true for this boundary, and false for all later boundaries |
    | between transactions, or in WAL without published changes | ``arrived_at_begin``, ``arrived_at_wal_end`` |
    | inside a transaction (``end_lsn`` > endpos) | ``allows`` is false for its end, so the next run receives it again |
    | inside a record, past a page header, or unflushed | ``arrived_at_wal_end`` with a late flush position |

    In the last case, the receiver needs a flush position that is read late enough: ``DELAYS_UNTIL_FLUSHED *
    wal_writer_delay`` after the source's insert position was first seen at or above the goal. The source may reach the
    goal much later, because the goal may be ahead of its WAL. ``now`` (any monotonic clock) and ``wal_writer_delay``
    are in seconds.
    """

    def __init__(self, lsn: Lsn, *, wal_writer_delay: float) -> None:
        self.lsn = lsn
        self._delay = DELAYS_UNTIL_FLUSHED * wal_writer_delay
        self._inserted_at: float | None = None
        self._late_flush: Lsn | None = None

    def arrived_at_begin(self, final_lsn: int) -> bool:
        """Whether this transaction, and so every later transaction in commit order, ends past endpos."""
        return final_lsn >= self.lsn

    def arrived_at_wal_end(self, wal_end: int) -> bool:
        """Whether a keepalive's ``wal_end`` reaches the goal. All commits below ``wal_end`` have been sent."""
        return wal_end >= self.lsn or (self._late_flush is not None and wal_end >= self._late_flush)

    def allows(self, boundary: int) -> bool:
        """Whether the receiver may end at this boundary, because it is not above endpos."""
        return boundary <= self.lsn

    # The source's own positions, read by SQL while the stream is quiet -------------------------------

    @property
    def flush_wanted(self) -> bool:
        """Whether :meth:`saw_source` must be called again."""
        return self._late_flush is None

    def saw_source(self, inserted: Lsn, flushed: Lsn, now: float) -> None:
        """Record the source's insert and flush positions, read at ``now`` or later."""
        if self._inserted_at is None:
            if inserted >= self.lsn:
                self._inserted_at = now
        elif self._late_flush is None and now > self._inserted_at + self._delay:
            self._late_flush = flushed


class ReportedPositions:
    """The positions of a standby status update. They start at the slot's ``confirmed_flush_lsn`` and never go down.
    ``flush`` is ``transform_lsn``: every transaction up to this LSN is durable in the log. All changes up to ``write``
    have been received, and all changes up to ``apply`` are in every mirror. Only ``flush`` decides which WAL the server
    may remove. Each method that sets a position returns the position after the call."""

    def __init__(self, floor: Lsn) -> None:
        self._write = self._flush = self._apply = floor

    @property
    def write(self) -> Lsn:
        return self._write

    @property
    def flush(self) -> Lsn:
        return self._flush

    @property
    def apply(self) -> Lsn:
        return min(self._apply, self._flush)

    def received(self, lsn: Lsn) -> Lsn:
        self._write = max(self._write, lsn)
        return self._write

    def durable(self, lsn: Lsn) -> Lsn:
        self._flush = max(self._flush, lsn)
        self.received(lsn)
        return self._flush

    def applied(self, lsn: Lsn) -> Lsn:
        """Records that every mirror has reached ``lsn``. The reported position is never above ``flush``."""
        self._apply = max(self._apply, lsn)
        return self.apply
