"""Brings the frames of a run: first a backlog through the SQL functions, then the stream; or all by polling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.connect.libpq import LibpqConnection
from pgcdc_assets.source.connect.quoting import literal
from pgcdc_assets.source.connect.readers import FrameSource
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slotstatus import check_slot, require_slot
from pgcdc_assets.source.stream.drain import LEAST_BYTES, RANGE_LIMITS, Drain, RangeLimits, SlotCopy
from pgcdc_assets.source.stream.polling import Polling
from pgcdc_assets.source.stream.subscribe import Subscription, free_slot, start_stream


class FrameStream(Protocol):
    """What the receiver needs of a connection."""

    @property
    def endpoint(self) -> str:
        """Where the connection leads, for messages."""

    @property
    def frames(self) -> FrameSource:
        """Read this each time: the reader changes when the drain ends."""

    @property
    def parallel(self) -> bool:
        """Whether :attr:`frames` are those of a stream whose streaming is parallel."""

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for input; returns whether there is some."""

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """Report our positions."""

    def at_work(self) -> bool:
        """Whether the server is seen to be at work for us, or has answered a question, though no frame comes."""

    def end_stream(self) -> None:
        """Release the slot."""


class CatchUp:
    """A drain, followed by the stream of the same connection."""

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


class Polled:
    """Frames by the SQL functions alone."""

    parallel = False

    def __init__(self, connection: LibpqConnection, polling: Polling) -> None:
        self._connection = connection
        self.frames = polling
        self.endpoint = connection.endpoint

    def wait(self, timeout: float) -> bool:
        return self._connection.wait(timeout)

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        self.frames.flushed(flush)
        if reply:
            self.frames.ask()

    def at_work(self) -> bool:
        if self.frames.calling:
            return self._connection.at_work()
        # Between two calls the server has nothing to work on: that it answers is what counts.
        self._connection.execute("SELECT 1")
        return True

    def end_stream(self) -> None:
        self.frames.finish()


def begin(
    asked: Subscription, connection: LibpqConnection, transform_lsn: Lsn, *, start_lsn: Lsn | None = None,
    drain_bytes: int = LEAST_BYTES, limits: RangeLimits = RANGE_LIMITS,
) -> tuple[FrameStream, Lsn]:  # fmt: skip
    """Frames from ``transform_lsn`` on (or from ``start_lsn`` below it), and the floor of all reports.

    A replication connection streams them, after it has drained a backlog of ``drain_bytes`` of WAL or more if the slot
    is free and stands at the log's end. Any other connection polls, from where the slot stands. Raises what
    :func:`start_stream` raises, and SourceNotReady if there is no slot to spare for polling.
    """
    if not isinstance(connection, ReplicationConnection):
        return _polled(asked, connection, transform_lsn, limits)
    drain = None if start_lsn is not None else _drain(asked, connection, transform_lsn, drain_bytes, limits)
    if drain is None:
        return connection, start_stream(asked, connection, transform_lsn, start_lsn)
    return CatchUp(connection, drain, lambda position: start_stream(asked, connection, position)), transform_lsn


def _drain(
    asked: Subscription, connection: ReplicationConnection, at: Lsn, drain_bytes: int, limits: RangeLimits
) -> Drain | None:
    if asked.options.two_phase:
        # A copy of the slot would send prepared transactions at their commit.
        return None
    status = require_slot(asked.conn, asked.slot)
    if status.active or status.confirmed_flush_lsn != at or status.wal_lsn - at < drain_bytes:
        return None
    if connection.socket() is None:
        return None
    check_slot(status, at)
    try:
        copy = _copied(asked, connection, at)
    except SourceNotReady:
        # No slot to spare.
        return None
    return Drain(copy, asked.conn, limits, goal=status.wal_lsn, drain_bytes=drain_bytes)


def _polled(asked: Subscription, connection: LibpqConnection, at: Lsn, limits: RangeLimits) -> tuple[FrameStream, Lsn]:
    check_slot(free_slot(asked), at)
    copy = _copied(asked, connection, at)
    return Polled(connection, Polling(copy, asked.conn, limits)), copy.position


def _copied(asked: Subscription, connection: LibpqConnection, at: Lsn) -> SlotCopy:
    """Copy the slot, which must stand no further than the log. Raises what ``check_slot`` raises."""
    name = f"pgcdc_drain_{connection.execute('SELECT pg_backend_pid()')[0][0]}"
    connection.execute(f"SELECT pg_copy_logical_replication_slot({literal(asked.slot)}, {literal(name)}, true)")
    # Checked after the copying: if somebody advanced the slot past the log meanwhile, its copy may be past it too.
    check_slot(require_slot(asked.conn, asked.slot), at)
    position = require_slot(asked.conn, name).confirmed_flush_lsn or at
    return SlotCopy(connection, asked.slot, name, position, asked.publications, asked.options.whole)
