"""Where the frames of a run come from: a backlog through the SQL functions first, then the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.log.start import OPTIONS, Subscription, start_stream
from pgcdc_assets.source.drain import LEAST_BYTES, Drain
from pgcdc_assets.source.replication import ReplicationConnection, literal
from pgcdc_assets.source.slots import check_slot, require_slot
from pgcdc_assets.source.wire import Frames


class Stream(Protocol):
    """What the receiver needs of a connection."""

    @property
    def frames(self) -> Frames:
        """Ask anew for each look: it may be another one."""

    def wait(self, timeout: float) -> bool:
        """Wait for input, so many seconds; whether there is some."""

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """How far we are."""

    def end_stream(self) -> None:
        """Let the slot go."""


class CatchUp:
    """A drain, and behind it the stream of the same connection."""

    def __init__(self, stream: ReplicationConnection, drain: Drain, begin: Callable[[Lsn], object]) -> None:
        self._stream = stream
        self._drain: Drain | None = drain
        self._begin = begin

    @property
    def frames(self) -> Frames:
        if self._drain is not None and self._drain.over:
            position = self._drain.position
            self._drain.end()
            self._drain = None
            self._begin(position)
        return self._drain or self._stream.frames

    def wait(self, timeout: float) -> bool:
        return self._stream.wait(timeout)

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        if self._drain is not None:
            self._drain.flushed(flush)
        else:
            self._stream.send_status(write, flush, apply, reply=reply)

    def end_stream(self) -> None:
        if self._drain is not None:
            self._drain.finish()
        else:
            self._stream.end_stream()


def begin(
    asked: Subscription, transform_lsn: Lsn, *, start_lsn: Lsn | None = None, least: int = LEAST_BYTES
) -> tuple[Stream, Lsn]:
    """Frames from ``transform_lsn`` on (or from ``start_lsn`` below it), and the floor of all reports.

    A backlog of ``least`` bytes of WAL is drained, if the slot is free and stands at the log's end. Raises what
    :func:`start_stream` does.
    """
    drain = None if start_lsn is not None else _drain(asked, transform_lsn, least)
    if drain is None:
        return asked.stream, start_stream(asked, transform_lsn, start_lsn)
    return CatchUp(asked.stream, drain, lambda position: start_stream(asked, position)), transform_lsn


def _drain(asked: Subscription, at: Lsn, least: int) -> Drain | None:
    status, stream = require_slot(asked.conn, asked.slot), asked.stream
    wire = stream.socket()
    if status.active or status.confirmed_flush_lsn != at or status.wal_lsn - at < least or wire is None:
        return None
    check_slot(status, at)
    copy = f"pgcdc_drain_{stream.execute('SELECT pg_backend_pid()')[0][0]}"
    try:
        stream.execute(f"SELECT pg_copy_logical_replication_slot({literal(asked.slot)}, {literal(copy)}, true)")
    except SourceNotReady:
        # No slot to spare.
        return None
    return Drain(stream, wire, asked.slot, copy, at, status.wal_lsn, asked.publications, OPTIONS, least)
