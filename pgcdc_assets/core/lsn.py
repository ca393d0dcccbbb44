"""WAL positions, and ranges of WAL. Also the receiver's positions: the LSN at which it must stop, and the LSNs that it
reports to the server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from pgcdc_assets.errors import BadRange, RangeGap

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_KEY = re.compile(r"([0-9A-F]{12,16})-([0-9A-F]{12,16})")


class Lsn(int):
    """A 64-bit WAL position: an integer that prints as PostgreSQL prints it (``16/B374D848``)."""

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{value} is not a 64-bit WAL position")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``X/Y``; raises ValueError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an LSN; write an LSN as X/Y in hexadecimal, like 16/B374D848")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    @classmethod
    def of(cls, value: str | int) -> Self:
        """Makes an LSN from the text ``X/Y`` or an integer. Raises ValueError for another text or number, and TypeError
        for any other type."""
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            what = "text like '16/B374D848' or an integer; Lake.at also takes a datetime"
            raise TypeError(f"{value!r} is not an LSN; an LSN is {what}")
        return cls(value)

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"

    def __format__(self, spec: str) -> str:
        return int(self).__format__(spec) if spec else str(self)


ZERO = Lsn(0)
"""InvalidXLogRecPtr: no position."""


@dataclass(frozen=True, order=True)
class LsnRange:
    """A half-open range of WAL whose ends are transaction boundaries. The range contains the transactions with ``start
    < end_lsn <= end``. No boundary lies inside a commit record, so ``start <= commit_lsn < end`` selects the same
    transactions. Filters use this second form, because the message Begin already contains ``commit_lsn``, and
    ``end_lsn`` follows only in the message Commit."""

    start: Lsn
    end: Lsn

    def __post_init__(self) -> None:
        if self.start > self.end:
            raise BadRange(f"LSN range ends at {self.end}, below its start {self.start}")

    @property
    def key(self) -> str:
        """The Dagster partition key: fixed-width hexadecimal, so that text order is LSN order."""
        return f"{self.start:012X}-{self.end:012X}"

    @classmethod
    def from_key(cls, key: str) -> Self:
        match = _KEY.fullmatch(key)
        if match is None:
            raise BadRange(f"{key!r} is not an LSN range; write two LSNs such as 0/15D3F88..0/15D4A10, or a partition "
                           "key such as 0000015D3F88-0000015D4A10")  # fmt: skip
        return cls(Lsn(int(match[1], 16)), Lsn(int(match[2], 16)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``X/Y..X/Y`` or a partition key."""
        start, dots, end = text.partition("..")
        if not dots:
            return cls.from_key(text)
        try:
            return cls(Lsn.parse(start), Lsn.parse(end))
        except ValueError as error:
            raise BadRange(f"{text!r} is not an LSN range: {error}") from None

    def __str__(self) -> str:
        return f"{self.start}..{self.end}"

    def holds_commit(self, commit_lsn: int) -> bool:
        """Whether a transaction belongs to this range, given the start of its commit record."""
        return self.start <= commit_lsn < self.end


def merged(ranges: Iterable[LsnRange]) -> LsnRange:
    """Merges adjacent ranges, given in any order, into one range. Raises RangeGap, with the LSN, if two ranges are not
    adjacent."""
    ordered = sorted(ranges)
    if not ordered:
        raise BadRange(
            "no LSN range was selected",
            do="select at least one partition, and give the lower end of a range of partitions first",
        )
    for left, right in pairwise(ordered):
        if left.end != right.start:
            raise RangeGap(f"LSN ranges are not adjacent: {right} does not begin where {left} ends", lsn=left.end)
    return LsnRange(ordered[0].start, ordered[-1].end)


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
