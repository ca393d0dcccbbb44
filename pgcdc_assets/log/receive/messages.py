"""The messages between the receiver process and its parent: JSON, one object per line. The parent first sends the
settings (not as process arguments, because they contain secrets), and then sends orders. The receiver sends events. If
the receiver fails, its last line is the error. If the parent's lines end, the parent has died."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import PgcdcError, ReceiverDied, of_plain
from pgcdc_assets.source.connect.pluginoptions import Origins
from pgcdc_assets.source.stream.drain import LEAST_BYTES

SEGMENT_BYTES: Final = 16 << 20
"""See :attr:`ReceiverSettings.segment_bytes`."""
FALLBACK_SECONDS: Final = 60.0
"""See :class:`pgcdc_assets.log.receive.connections.Fallback`."""


@dataclass(frozen=True)
class ReceiverSettings:
    """The settings that the receiver needs before it connects."""

    conninfo: str
    lake: str
    publications: tuple[str, ...]
    batch_bytes: int
    batch_seconds: float
    drain_bytes: int = LEAST_BYTES
    highest: Lsn = ZERO
    """The highest LSN of any mirror. If the source's WAL ends below this LSN, the receiver refuses the source."""
    messages: tuple[str, ...] = ()
    """Patterns for the prefixes of the logical messages to receive."""
    origin: str = Origins.ANY
    streaming: bool = True
    """Whether the server is asked to send transactions while they are in progress."""
    two_phase: bool = False
    """Whether the slot sends transactions at their PREPARE."""
    segment_bytes: int = SEGMENT_BYTES
    """Frames are written to a segment when they take this many bytes of memory. At most two segments are in memory: one
    is being written, and the other is being filled. Together with the memory of the libraries, the process uses less
    than 300 MB."""
    fallback_seconds: float = FALLBACK_SECONDS
    """How long streaming is off after the server could not decode a transaction in progress."""
    leader: int | None = None
    """The log's :attr:`ChangeLog.leader`, as the parent read it while it held the lake's lease. If it has changed,
    another process has taken over the lake, and the receiver must not commit."""

    def to_line(self) -> bytes:
        return _line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> ReceiverSettings:
        given = json.loads(line)
        return cls(**{**given, "highest": Lsn(given["highest"]), "publications": tuple(given["publications"]),
                      "messages": tuple(given["messages"])})  # fmt: skip


class OrderName(StrEnum):
    UNTIL = "until"
    """Receive up to ``lsn``, then end."""
    FOLLOW = "follow"
    """Cancel an earlier UNTIL order, if its LSN is not reached yet, and continue to receive."""
    MARK = "mark"
    """Once everything that commits below ``lsn`` has arrived, move the log's position to ``lsn``, and send the event
    COMPLETE. ``lsn`` must not be inside a commit record."""
    REPORT_APPLY = "report_apply"
    """Report ``lsn`` to the source as ``apply_lsn``, because every mirror has reached it."""
    STOP = "stop"
    """End at the last boundary that was received, once everything up to this boundary is durable in the log."""


@dataclass(frozen=True)
class Order:
    name: OrderName
    lsn: Lsn = ZERO

    def to_line(self) -> bytes:
        return _line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        given = json.loads(line)
        return cls(OrderName(given["name"]), Lsn(given["lsn"]))


class EventName(StrEnum):
    STARTED = "started"
    """The receiver uses the slot now. The log is at ``lsn``."""
    BATCH = "batch"
    """A batch that ends at ``lsn`` is durable in the log and confirmed to the source."""
    POSITION = "position"
    """The log's position has moved to ``lsn``. The WAL up to ``lsn`` contained nothing for the log."""
    COMPLETE = "complete"
    """The log has reached the ``lsn`` of a MARK order: every transaction that commits below ``lsn`` is durable."""
    ARRIVED = "arrived"
    """The LSN of an UNTIL order is reached. The log is at the boundary ``lsn``, and the process ends."""


@dataclass(frozen=True)
class Event:
    """An event of the receiver. ``start`` and the counts are set for BATCH."""

    name: EventName
    lsn: Lsn
    start: Lsn | None = None
    transactions: int = 0
    rows: int = 0
    bytes: int = 0
    stream_aborts: int = 0
    """How many Stream Aborts were ignored on this connection, because PostgreSQL 18 sends them for transactions that it
    never sent. Set for BATCH and POSITION."""


def event_line(event: Event) -> bytes:
    return _line(asdict(event))


def error_line(error: PgcdcError) -> bytes:
    """The last line of a receiver that failed."""
    return _line({"error": error.to_plain()})


def read_line(line: bytes) -> Event | PgcdcError:
    """Parses a line from the receiver, which contains an event or an error."""
    given = json.loads(line)
    if "error" in given:
        return of_plain(given["error"], otherwise=ReceiverDied)
    start, lsn = given.pop("start"), Lsn(given.pop("lsn"))
    return Event(EventName(given.pop("name")), lsn, None if start is None else Lsn(start), **given)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
