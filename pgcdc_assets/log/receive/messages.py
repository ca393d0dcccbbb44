"""What the receiver process and its parent say to each other: JSON, one object a line.

The parent writes the settings first (secrets never stand in arguments), then orders. The end of these lines means that
the parent is gone. The receiver writes events, and at last the error that ended it, if one did.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import PgcdcError, ReceiverDied, of_plain
from pgcdc_assets.log.receive.fallback import FALLBACK_SECONDS
from pgcdc_assets.source.connect.pluginoptions import Origins
from pgcdc_assets.source.stream.drain import LEAST_BYTES

SEGMENT_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class ReceiverSettings:
    """What the receiver needs to know before it connects."""

    conninfo: str
    lake: str
    publications: tuple[str, ...]
    batch_bytes: int
    batch_seconds: float
    drain_bytes: int = LEAST_BYTES
    highest: Lsn = ZERO
    """The highest position that the lake holds of any table: a source that stands below is another one."""
    messages: tuple[str, ...] = ()
    """Patterns of the prefixes of logical messages that are asked for."""
    origin: str = Origins.ANY
    streaming: bool = True
    """Whether transactions are asked for while they are in progress."""
    two_phase: bool = False
    """Whether the slot sends transactions at their PREPARE."""
    segment_bytes: int = SEGMENT_BYTES
    """Frames in memory before they are written. Twice this is held at the worst (one being written, one filling), which
    with the libraries' own footprint stays well below 300 MB."""
    fallback_seconds: float = FALLBACK_SECONDS
    """How long transactions are received whole after the server could not decode one in progress."""
    leader: int | None = None
    """The last leader that the log knew of when this receiver's had the lake."""

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
    """Take back a goal that is not reached yet: go on until told otherwise."""
    MARK = "mark"
    """Record the log to ``lsn``, a known boundary, say COMPLETE, and go on."""
    REPORT_APPLY = "report_apply"
    """Every mirror has been brought to ``lsn``: report that to the source as apply."""
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
    """The slot is held; the log stands at ``lsn``."""
    BATCH = "batch"
    """A batch that ends at ``lsn`` is durable and confirmed."""
    POSITION = "position"
    """The log moved to ``lsn`` over WAL that holds nothing for us."""
    COMPLETE = "complete"
    """The log is recorded to the mark ``lsn``, or beyond: every transaction that commits below it is durable."""
    ARRIVED = "arrived"
    """The goal is reached, the log stands at the boundary ``lsn``, and the process ends."""


@dataclass(frozen=True)
class Event:
    """What the receiver says. The counts are those of a batch."""

    name: EventName
    lsn: Lsn
    start: Lsn | None = None
    transactions: int = 0
    rows: int = 0
    bytes: int = 0
    stream_aborts: int = 0
    """How many the run has passed over so far (PostgreSQL 18); with a batch or position."""


def event_line(event: Event) -> bytes:
    return _line(asdict(event))


def error_line(error: PgcdcError) -> bytes:
    """The last line of a receiver that failed."""
    return _line({"error": error.to_plain()})


def heard(line: bytes) -> Event | PgcdcError:
    """What the receiver said in a line."""
    given = json.loads(line)
    if "error" in given:
        return of_plain(given["error"], otherwise=ReceiverDied)
    start, lsn = given.pop("start"), Lsn(given.pop("lsn"))
    return Event(EventName(given.pop("name")), lsn, None if start is None else Lsn(start), **given)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
