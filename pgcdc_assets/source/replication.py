"""The replication connection: frames in, status updates out, at libpq's level.

psycopg has no replication API, but its libpq wrapper has all that the protocol needs. Commands are
those of PostgreSQL's "Streaming Replication Protocol"; frames are read in :mod:`pgcdc_assets.source.wire`
and decoded in :mod:`pgcdc_assets.protocol.frames`.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from psycopg import OperationalError, pq

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError, SourceUnavailable
from pgcdc_assets.protocol.frames import EPOCH, status_update
from pgcdc_assets.source.connection import APPLICATION, redacted, source_conninfo, without_secret
from pgcdc_assets.source.failures import ServerError, first_line, of_refusal, result_error
from pgcdc_assets.source.wire import FrameReader, LibpqReader, SocketReader

_POLL_SECONDS = 0.5
"""How long a command waits at a time, so that signals and ``waiting`` get their turn."""
_TRANSACTION_TIMEOUT_SINCE = 170000
_SENDER_TIMEOUT = "60s"
"""wal_sender_timeout of our own connections: with 0 a vanished client would hold its slot for ever."""
_ENCRYPTED = "SELECT coalesce((SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()), false)"
_HISTORY_LINE = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)")


@dataclass(frozen=True)
class SystemIdentity:
    """IDENTIFY_SYSTEM. ``flush_lsn`` may lie inside a record: a goal, never a boundary."""

    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    database: str


@dataclass(frozen=True)
class TimelineSwitch:
    """The server left ``timeline`` at ``switch_lsn``."""

    timeline: int
    switch_lsn: Lsn


@dataclass(frozen=True)
class CreatedSlot:
    """Snapshot and stream meet at ``consistent_point``; the snapshot lives until the next command."""

    name: str
    consistent_point: Lsn
    snapshot_name: str | None


class ReplicationConnection:
    """One walsender: commands, then at most one stream."""

    def __init__(self, pgconn: pq.abc.PGconn, endpoint: str) -> None:
        self.pgconn = pgconn
        self.endpoint = endpoint
        self._frames: FrameReader | None = None

    @classmethod
    def open(
        cls,
        conninfo: str,
        *,
        application_name: str = f"{APPLICATION}/receive",
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Connect as a walsender to the conninfo's database; ``options`` are more session settings."""
        settings = {"wal_sender_timeout": _SENDER_TIMEOUT, **(options or {})}
        full = source_conninfo(conninfo, application_name=application_name, options=settings, replication="database")
        pgconn = pq.PGconn.connect(full.encode())
        endpoint = redacted(conninfo)
        if pgconn.status != pq.ConnStatus.OK:
            message = without_secret(pgconn.get_error_message(), conninfo)
            pgconn.finish()
            raise of_refusal(message).typed(endpoint)
        connection = cls(pgconn, endpoint)
        if pgconn.server_version >= _TRANSACTION_TIMEOUT_SINCE:
            connection.execute("SET transaction_timeout = 0")
        return connection

    # Commands -----------------------------------------------------------------------------------

    def execute(self, command: str, *, waiting: Callable[[], None] | None = None) -> list[tuple[str | None, ...]]:
        """Run a replication command or simple SQL; the last result's rows as text.

        ``waiting`` is called every half second until the server answers.
        """
        result = self._result(command, waiting)
        columns = range(result.nfields)
        return [tuple(_text(result.get_value(row, column)) for column in columns) for row in range(result.ntuples)]

    def identify(self) -> SystemIdentity:
        system, timeline, flushed, database = self.execute("IDENTIFY_SYSTEM")[0]
        if system is None or timeline is None or flushed is None or database is None:
            raise ProtocolError("IDENTIFY_SYSTEM left a field empty", thing=self.endpoint)
        return SystemIdentity(system, int(timeline), Lsn.parse(flushed), database)

    def timeline_history(self, timeline: int) -> tuple[TimelineSwitch, ...]:
        """The switches that led to ``timeline``, oldest first; none for the first timeline."""
        if timeline == 1:
            return ()
        content = self.execute(f"TIMELINE_HISTORY {timeline:d}")[0][1] or ""
        matches = [_HISTORY_LINE.match(line) for line in content.splitlines()]
        return tuple(TimelineSwitch(int(match[1]), Lsn.parse(match[2])) for match in matches if match)

    def cancel(self) -> None:
        """Ask the server to give up the command under way."""
        self.pgconn.get_cancel().cancel()

    def create_slot(
        self, name: str, *, temporary: bool = False, export: bool = False, waiting: Callable[[], None] | None = None
    ) -> CreatedSlot:
        """CREATE_REPLICATION_SLOT. Waits for every open transaction of the cluster that has an xid.

        The old spelling of the options is understood by every version.
        """
        kind = "TEMPORARY " if temporary else ""
        snapshot = "EXPORT_SNAPSHOT" if export else "NOEXPORT_SNAPSHOT"
        command = f"CREATE_REPLICATION_SLOT {identifier(name)} {kind}LOGICAL pgoutput {snapshot}"
        _, point, snapshot_name, _ = self.execute(command, waiting=waiting)[0]
        if point is None:
            raise ProtocolError("CREATE_REPLICATION_SLOT named no consistent point", thing=f"slot {name}")
        return CreatedSlot(name, Lsn.parse(point), snapshot_name)

    def drop_slot(self, name: str) -> None:
        self.execute(f"DROP_REPLICATION_SLOT {identifier(name)} WAIT")

    def start(
        self, slot: str, start_lsn: Lsn, publications: Sequence[str], *, proto: int = 1,
        options: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """START_REPLICATION with pgoutput. A start below the slot's own position is raised to it, silently."""
        plugin = plugin_options(publications, options or {}, proto=proto)
        given = ", ".join(f"{name} {literal(value)}" for name, value in plugin.items())
        command = f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {start_lsn} ({given})"
        reader = self.socket()
        if reader is None:
            self._result(command, None)
            self._frames = LibpqReader(self.pgconn, self.endpoint)
            return
        reader.command(command)
        while not reader.begun():
            self.wait(_POLL_SECONDS)

    # The stream ---------------------------------------------------------------------------------

    def wait(self, timeout: float) -> bool:
        """Wait for input; whether there is some."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(max(timeout, 0) * 1000))

    @property
    def frames(self) -> FrameReader:
        """Of the stream that has been started."""
        assert self._frames is not None
        return self._frames

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """A standby status update. The caller answers for it that no position ever falls."""
        now = int(time.time() * 1_000_000) - EPOCH
        self.frames.send(status_update(write, flush, apply, now, reply))

    def end_stream(self, *, seconds: float = 5) -> None:
        """CopyDone, and what was under way is read and dropped, so that the slot is free when this returns.

        A server that does not answer in time is left to notice the closed connection.
        """
        deadline = time.monotonic() + seconds
        while not self.frames.finish() and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def socket(self) -> SocketReader | None:
        """The reader of the socket itself; None where it does not carry the protocol (TLS, GSSAPI encryption)."""
        if self._frames is None and not self.pgconn.ssl_in_use and self.execute(_ENCRYPTED)[0][0] != "t":
            self._frames = SocketReader(self.fileno(), self.endpoint)
        return self._frames if isinstance(self._frames, SocketReader) else None

    def fileno(self) -> int:
        return self.pgconn.socket

    @property
    def closed(self) -> bool:
        return self.pgconn.status != pq.ConnStatus.OK

    def close(self) -> None:
        self.pgconn.finish()
        if self._frames is not None:
            self._frames.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Within -------------------------------------------------------------------------------------

    def _result(self, command: str, waiting: Callable[[], None] | None) -> pq.abc.PGresult:
        """Send one command and wait for its result; a server's error comes as the class it means."""
        last: pq.abc.PGresult | None = None
        failed: ServerError | None = None
        try:
            self.pgconn.send_query(command.encode())
            while True:
                self._until_ready(waiting)
                result = self.pgconn.get_result()
                if result is None:
                    break
                if result.status == pq.ExecStatus.COPY_BOTH:
                    return result
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    failed = failed or result_error(result, self.pgconn)
                last = result
        except OperationalError as error:
            raise SourceUnavailable(first_line(str(error)), thing=self.endpoint) from None
        except BaseException:
            # Interrupted while the server waits, where it would not notice that we are gone.
            self._cancel()
            raise
        if failed is not None:
            raise failed.typed(self.endpoint)
        if last is None:
            raise SourceUnavailable("the server gave no answer", thing=self.endpoint)
        return last

    def _cancel(self) -> None:
        with suppress(OperationalError):
            self.cancel()
            while self.pgconn.get_result() is not None:
                pass

    def _until_ready(self, waiting: Callable[[], None] | None) -> None:
        while self.pgconn.is_busy():
            if self.wait(_POLL_SECONDS):
                self.pgconn.consume_input()
            elif waiting is not None:
                waiting()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def plugin_options(publications: Sequence[str], more: Mapping[str, str], *, proto: int = 1) -> dict[str, str]:
    """What pgoutput is told, by START_REPLICATION or by the SQL functions."""
    names = ",".join(identifier(name) for name in publications)
    return {"proto_version": str(proto), "publication_names": names, **more}


def identifier(name: str) -> str:
    """Quoted for the replication grammar and for publication_names alike."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """The replication grammar knows no escape but the doubled quote (so not libpq's E'...')."""
    return "'" + value.replace("'", "''") + "'"
