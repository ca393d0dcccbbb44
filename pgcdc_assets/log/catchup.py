"""Where the frames of a run come from: a backlog through the SQL functions first, then the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.log.start import OPTIONS, start_stream
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
    stream: ReplicationConnection,
    conn: psycopg.Connection[Any],
    slot: str,
    publications: Sequence[str],
    transform_lsn: Lsn,
    *,
    start_lsn: Lsn | None = None,
    least: int = LEAST_BYTES,
    keep_waiting: Callable[[], bool] = lambda: True,
) -> tuple[Stream, Lsn]:
    """Frames from ``transform_lsn`` on (or from ``start_lsn`` below it), and the floor of all reports.

    A backlog of ``least`` bytes of WAL is drained, if the slot is free and stands at the log's end. Raises what
    :func:`start_stream` does.
    """

    def started(position: Lsn, at: Lsn | None = None) -> Lsn:
        return start_stream(stream, conn, slot, publications, position, start_lsn=at, keep_waiting=keep_waiting)

    drain = None if start_lsn is not None else _drain(stream, conn, slot, publications, transform_lsn, least)
    if drain is None:
        return stream, started(transform_lsn, start_lsn)
    return CatchUp(stream, drain, started), transform_lsn


def _drain(
    stream: ReplicationConnection, conn: psycopg.Connection[Any], slot: str, publications: Sequence[str], at: Lsn,
    least: int,
) -> Drain | None:
    status = require_slot(conn, slot)
    check_slot(status, at)
    wire = stream.socket()
    if status.active or status.confirmed_flush_lsn != at or status.wal_lsn - at < least or wire is None:
        return None
    copy = f"pgcdc_drain_{stream.execute('SELECT pg_backend_pid()')[0][0]}"
    try:
        stream.execute(f"SELECT pg_copy_logical_replication_slot({literal(slot)}, {literal(copy)}, true)")
    except SourceNotReady:
        # No slot to spare.
        return None
    return Drain(stream, wire, slot, copy, at, status.wal_lsn, publications, OPTIONS, least)
