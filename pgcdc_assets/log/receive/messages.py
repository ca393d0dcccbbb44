"""The messages between the receiver process and its parent: JSON, one object per line. The parent writes the settings
(never as arguments, because they contain secrets), then orders. The receiver writes events, and, if an error ends the
receiver, this error as the last line. The end of the parent's lines means that the parent is gone."""

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
    """The highest position of any table in the lake. A source whose position is lower is a different source."""
    messages: tuple[str, ...] = ()
    """Patterns for the prefixes of the logical messages to receive."""
    origin: str = Origins.ANY
    streaming: bool = True
    """Whether to ask for transactions while they are in progress."""
    two_phase: bool = False
    """Whether the slot sends transactions at their PREPARE."""
    segment_bytes: int = SEGMENT_BYTES
    """Bytes of frames in memory before they are written. At most twice as many are held (one segment being written, one
    filling), which stays well below 300 MB with the libraries' own memory."""
    fallback_seconds: float = FALLBACK_SECONDS
    """How long transactions are received whole after the server could not decode a transaction in progress."""
    leader: int | None = None
    """The last leader that the log recorded while this receiver's run held the lake."""

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
    """Cancel a goal that is not reached yet, and continue until the next order."""
    MARK = "mark"
    """Record the log up to ``lsn``, a known boundary, send COMPLETE, and continue."""
    REPORT_APPLY = "report_apply"
    """Every mirror has reached ``lsn``: report this to the source as apply."""
    STOP = "stop"
    """End at a boundary."""


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
    """The slot is active; the log is at ``lsn``."""
    BATCH = "batch"
    """A batch that ends at ``lsn`` is durable and confirmed."""
    POSITION = "position"
    """The log moved to ``lsn``, past WAL that holds nothing for it."""
    COMPLETE = "complete"
    """The log has reached the mark ``lsn``: every transaction that commits below ``lsn`` is durable."""
    ARRIVED = "arrived"
    """The goal is reached, the log is at the boundary ``lsn``, and the process ends."""


@dataclass(frozen=True)
class Event:
    """An event of the receiver, with the counts of a batch."""

    name: EventName
    lsn: Lsn
    start: Lsn | None = None
    transactions: int = 0
    rows: int = 0
    bytes: int = 0
    stream_aborts: int = 0
    """How many Stream Aborts the run has ignored (PostgreSQL 18 sends them). Set for BATCH and POSITION."""


def event_line(event: Event) -> bytes:
    return _line(asdict(event))


def error_line(error: PgcdcError) -> bytes:
    """The last line of a receiver that failed."""
    return _line({"error": error.to_plain()})


def read_line(line: bytes) -> Event | PgcdcError:
    """The event or the error in a line from the receiver."""
    given = json.loads(line)
    if "error" in given:
        return of_plain(given["error"], otherwise=ReceiverDied)
    start, lsn = given.pop("start"), Lsn(given.pop("lsn"))
    return Event(EventName(given.pop("name")), lsn, None if start is None else Lsn(start), **given)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
