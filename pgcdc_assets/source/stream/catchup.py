"""Gives the frames of a run: first a backlog through the SQL functions, then the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.connect.quoting import literal
from pgcdc_assets.source.connect.readers import FrameSource
from pgcdc_assets.source.connect.socketreader import SocketReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slotstatus import check_slot, require_slot
from pgcdc_assets.source.stream.drain import LEAST_BYTES, RANGE_LIMITS, Drain, RangeLimits, SlotCopy
from pgcdc_assets.source.stream.subscribe import Subscription, start_stream


class FrameStream(Protocol):
    """The interface of a connection that the receiver needs."""

    @property
    def endpoint(self) -> str:
        """The server of the connection, for messages."""

    @property
    def frames(self) -> FrameSource:
        """The source of the frames. Do not store it, because another reader takes over when the drain ends."""

    @property
    def parallel(self) -> bool:
        """Whether :attr:`frames` is a stream with parallel streaming."""

    def wait(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for input. Returns whether there is input."""

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """Reports our positions to the server."""

    def at_work(self) -> bool:
        """Whether the server is at work for us, or has answered a question, although no frame arrives."""

    def end_stream(self) -> None:
        """Releases the slot."""


class CatchUp:
    """A drain, and then the stream on the same connection."""

    def __init__(self, stream: ReplicationConnection, drain: Drain, begin: Callable[[Lsn], object]) -> None:
        self._stream = stream
        self._drain: Drain | None = drain
        self._begin = begin
        self.endpoint = stream.endpoint

    @property
    def frames(self) -> FrameSource:
        if self._drain is not None and self._drain.over:
            position = self._drain.position
            self._drain.end()
            self._drain = None
            self._begin(position)
        return self._drain or self._stream.frames

    @property
    def parallel(self) -> bool:
        return self._drain is None and self._stream.parallel

    def wait(self, timeout: float) -> bool:
        return self._stream.wait(timeout)

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        if self._drain is not None:
            self._drain.flushed(flush)
        else:
            self._stream.send_status(write, flush, apply, reply=reply)

    def at_work(self) -> bool:
        return self._stream.at_work()

    def end_stream(self) -> None:
        if self._drain is not None:
            self._drain.finish()
        else:
            self._stream.end_stream()


def begin(
    asked: Subscription, connection: ReplicationConnection, transform_lsn: Lsn, *, start_lsn: Lsn | None = None,
    drain_bytes: int = LEAST_BYTES, limits: RangeLimits = RANGE_LIMITS,
) -> tuple[FrameStream, Lsn]:  # fmt: skip
    """Returns the frames from ``transform_lsn`` on, and the lowest position that a status update may report.

    With ``start_lsn``, a position below ``transform_lsn``, the frames begin there. A backlog of at least
    ``drain_bytes`` of WAL is drained first, if the slot is free and its position is the end of the log. Then the
    connection streams. Raises the errors of :func:`start_stream`.
    """
    drain = None if start_lsn is not None else _drain(asked, connection, transform_lsn, drain_bytes, limits)
    if drain is None:
        return connection, start_stream(asked, connection, transform_lsn, start_lsn)
    return CatchUp(connection, drain, lambda position: start_stream(asked, connection, position)), transform_lsn


def _drain(
    asked: Subscription, connection: ReplicationConnection, at: Lsn, drain_bytes: int, limits: RangeLimits
) -> Drain | None:
    if asked.options.two_phase:
        # A copy of the slot would send prepared transactions at their commit and not at their PREPARE.
        return None
    status = require_slot(asked.conn, asked.slot)
    if status.active or status.confirmed_flush_lsn != at or status.wal_lsn - at < drain_bytes:
        return None
    wire = connection.socket()
    if wire is None:
        return None
    check_slot(status, at)
    try:
        copy = _copied(asked, connection, wire, at)
    except SourceNotReady:
        # No replication slot is free for the copy.
        return None
    return Drain(copy, asked.conn, limits, goal=status.wal_lsn, drain_bytes=drain_bytes)


def _copied(asked: Subscription, connection: ReplicationConnection, wire: SocketReader, at: Lsn) -> SlotCopy:
    """Copies the slot, whose position must not be above the log's end. Raises the errors of ``check_slot``."""
    name = f"pgcdc_drain_{connection.execute('SELECT pg_backend_pid()')[0][0]}"
    connection.execute(f"SELECT pg_copy_logical_replication_slot({literal(asked.slot)}, {literal(name)}, true)")
    # Checked after the copying. If another process has advanced the slot past the log's end, the copy may be past it
    # too.
    check_slot(require_slot(asked.conn, asked.slot), at)
    position = require_slot(asked.conn, name).confirmed_flush_lsn or at
    return SlotCopy(connection, wire, asked.slot, name, position, asked.publications, asked.options.whole)
