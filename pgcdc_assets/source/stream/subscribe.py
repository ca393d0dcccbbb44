"""Checks that change log, slot and source belong together. Then begins to read: first a large backlog through SQL
functions (see :mod:`pgcdc_assets.source.stream.drain`), then the stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import psycopg

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import IdentityMismatch, LogAhead, SlotActive, SourceNotReady
from pgcdc_assets.source.connect.connection import literal
from pgcdc_assets.source.connect.failures import NEW_LAKE
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, PluginOptions
from pgcdc_assets.source.connect.readers import FrameSource, SocketReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection, SystemIdentity
from pgcdc_assets.source.slot.slot import check_slot, require_slot
from pgcdc_assets.source.stream.drain import LEAST_BYTES, RANGE_LIMITS, Drain, RangeLimits, SlotCopy

SLOT_PATIENCE_SECONDS = 10.0
"""A slot stays active for a moment (0.3 s was measured) after its holder has disconnected. If the slot is active for
longer, another process holds it."""
_RETRY_SECONDS = 0.1


class FrameStream(Protocol):
    """What the receiver needs of a connection. The stream has it, and so has ``Drain``, which reads a backlog by an SQL
    function first, and then continues as the stream."""

    @property
    def endpoint(self) -> str:
        """The server of the connection, as error texts name it."""

    @property
    def frames(self) -> FrameSource:
        """The source of the frames. Do not store it, because it is replaced by another source when the drain ends."""

    @property
    def parallel(self) -> bool:
        """Whether :attr:`frames` come from a stream with the option streaming = parallel."""

    def wait(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for input. Returns whether there is input."""

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """Reports our positions to the server."""

    def at_work(self) -> bool:
        """Whether another connection sees that the server still works for us, although no frame arrives."""

    def end_stream(self) -> None:
        """Ends the stream or the drain, so that another process can use the slot."""


@dataclass(frozen=True)
class Subscription:
    """What to read from the source: the slot, the publications and pgoutput's options. ``conn``: an SQL connection, to
    check the slot."""

    conn: psycopg.Connection[Any]
    slot: str
    publications: Sequence[str]
    options: PluginOptions = FIRST_VERSION
    keep_waiting: Callable[[], bool] = lambda: True
    """Called repeatedly while another process holds the slot. If it returns False, the wait ends with SlotActive."""


def check_identity(
    stream: ReplicationConnection, log: Identity, log_timeline: int, transform_lsn: Lsn, highest: Lsn = ZERO
) -> SystemIdentity:
    """Checks that the changes in the log and the lake come from this source. Raises IdentityMismatch or LogAhead.
    ``highest``: the highest LSN of any mirror. It may be above the log's end if a table was just copied."""
    source = stream.identify()
    thing = "change log"
    if source.system_identifier != log.system_identifier:
        raise IdentityMismatch(
            f"belongs to system identifier {log.system_identifier}, but the source has {source.system_identifier}",
            thing=thing, do="set `source` to the source of this lake, or set `lake` to a different or new lake",
        )  # fmt: skip
    if not log.is_of_same_database(replace(log, database=source.database, database_oid=source.database_oid)):
        raise IdentityMismatch(
            f"belongs to database {log.database} (OID {log.database_oid}), but the source is database "
            f"{source.database} (OID {source.database_oid})",
            thing=thing, do="set `source` to the source of this lake, or set `lake` to a different or new lake",
        )  # fmt: skip
    end = LakeEnd(transform_lsn, highest)
    _check_timeline(stream, source.timeline, log_timeline, end)
    if end.lsn > source.flush_lsn:
        raise LogAhead(
            f"{end}, ahead of the source's WAL at {source.flush_lsn}: "
            "the source was restored to an earlier time", thing=end.thing, do=NEW_LAKE,
        )  # fmt: skip
    return source


@dataclass(frozen=True)
class LakeEnd:
    """The highest LSN of change log and lake. ``str()`` describes it for error messages."""

    transform_lsn: Lsn
    highest: Lsn

    @property
    def lsn(self) -> Lsn:
        return max(self.transform_lsn, self.highest)

    @property
    def thing(self) -> str:
        return "lake" if self.highest > self.transform_lsn else "change log"

    def __str__(self) -> str:
        if self.highest > self.transform_lsn:
            return f"is at {self.highest} (its change log ends at {self.transform_lsn})"
        return f"ends at {self.transform_lsn}"


def _check_timeline(stream: ReplicationConnection, now: int, log_timeline: int, end: LakeEnd) -> None:
    """If the source is a promoted standby, checks that log and lake end at or below the fork, which is the LSN at which
    it was promoted. The source lacks the old primary's changes above the fork. If the log has such changes, pgcdc would
    skip the source's own transactions with the same LSNs, because the log seems to contain them."""
    if now == log_timeline:
        return
    if now < log_timeline:
        raise IdentityMismatch(
            f"was written on timeline {log_timeline}, but the source is on the older timeline {now}",
            thing="change log", lsn=end.transform_lsn, do="set `source` to the current primary",
        )  # fmt: skip
    fork = stream.timeline_history(now).get(log_timeline)
    if fork is None or end.lsn > fork:
        left = f"branched off before that, at {fork}" if fork is not None else f"does not descend from {log_timeline}"
        raise IdentityMismatch(
            f"{end} on timeline {log_timeline}, but the source is on timeline {now}, which {left}",
            thing=end.thing, do=NEW_LAKE,
        )  # fmt: skip


def begin(
    asked: Subscription, connection: ReplicationConnection, transform_lsn: Lsn, *, start_lsn: Lsn | None = None,
    drain_bytes: int = LEAST_BYTES, limits: RangeLimits = RANGE_LIMITS,
) -> tuple[FrameStream, Lsn]:  # fmt: skip
    """Begins to read the slot at ``transform_lsn`` or, if given, at ``start_lsn``, which is below ``transform_lsn``.
    Returns the stream, and the lowest LSN that a status update may report. A backlog of at least ``drain_bytes`` of WAL
    is drained before the stream begins, if the slot is free and at the log's end. Raises the errors of
    :func:`start_stream`."""
    drain = None if start_lsn is not None else _drain(asked, connection, transform_lsn, drain_bytes, limits)
    if drain is None:
        return connection, start_stream(asked, connection, transform_lsn, start_lsn)
    return CatchUp(connection, drain, lambda position: start_stream(asked, connection, position)), transform_lsn


class CatchUp:
    """A drain that turns into the stream on the same connection, as soon as the drain has ended."""

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
    """Makes a temporary copy of the slot. Raises the errors of ``check_slot`` if the slot is above the log's end."""
    name = f"pgcdc_drain_{connection.execute('SELECT pg_backend_pid()')[0][0]}"
    connection.execute(f"SELECT pg_copy_logical_replication_slot({literal(asked.slot)}, {literal(name)}, true)")
    # The slot is checked only now, because another process may have advanced it above the log's end before it was
    # copied. The copy would then be above the log's end too, and changes would be lost.
    check_slot(require_slot(asked.conn, asked.slot), at)
    position = require_slot(asked.conn, name).confirmed_flush_lsn or at
    return SlotCopy(connection, wire, asked.slot, name, position, asked.publications, asked.options.whole)


def start_stream(
    asked: Subscription, stream: ReplicationConnection, transform_lsn: Lsn, start_lsn: Lsn | None = None
) -> Lsn:
    """Runs START_REPLICATION at ``transform_lsn``, or at ``start_lsn``, which is below it. Returns the slot's
    ``confirmed_flush_lsn``, the lowest LSN that a status update may report.

    Checks that the slot is not above the log's end, and checks this again after the stream has acquired the slot. From
    that time, no other process can confirm a position. Raises the errors of ``check_slot``, and SlotActive if another
    process keeps the slot.
    """
    check_slot(require_slot(asked.conn, asked.slot), transform_lsn, two_phase=asked.options.two_phase)
    at = start_lsn or transform_lsn
    _patiently(asked, lambda: stream.start(asked.slot, at, asked.publications, asked.options))
    status = require_slot(asked.conn, asked.slot)
    check_slot(status, transform_lsn, two_phase=asked.options.two_phase)
    return status.confirmed_flush_lsn or transform_lsn


def _patiently(asked: Subscription, attempt: Callable[[], None]) -> None:
    """Repeats ``attempt`` until the slot is free. After SLOT_PATIENCE_SECONDS, raises SlotActive, which names the
    process that holds the slot."""
    deadline = time.monotonic() + SLOT_PATIENCE_SECONDS
    while True:
        try:
            return attempt()
        except SlotActive as held:
            if time.monotonic() > deadline or not asked.keep_waiting():
                raise _with_holder(asked.conn, asked.slot, held) from None
            time.sleep(_RETRY_SECONDS)


def _with_holder(conn: psycopg.Connection[Any], slot: str, held: SlotActive) -> SlotActive:
    row = conn.execute(
        "SELECT a.pid, a.application_name, a.client_addr::text FROM pg_replication_slots s "
        "JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = %s", [slot],
    ).fetchone()  # fmt: skip
    if row is None:
        return held
    pid, name, address = row
    where = f" from {address}" if address else ""
    return SlotActive(f"is in use by pid {pid} of the server, application `{name}`{where}", thing=f"slot {slot}")
