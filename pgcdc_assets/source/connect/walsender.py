"""The replication connection: receives frames and sends status updates.

psycopg has no replication API, but its libpq wrapper has all calls that the protocol needs. PostgreSQL's "Streaming
Replication Protocol" describes the commands. Frames are read by ``readers`` and decoded by ``protocol.frames``.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from psycopg import OperationalError, pq

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError, SourceUnavailable
from pgcdc_assets.protocol.frames import status_update
from pgcdc_assets.protocol.layouts import EPOCH
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect, identifier, literal
from pgcdc_assets.source.connect.failures import ServerError, first_line, result_error
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, PluginOptions, Streaming
from pgcdc_assets.source.connect.readers import FrameReader, LibpqReader, SocketReader
from pgcdc_assets.source.connect.silence import Silence

_MEMORY: Final = "16MB"
"""Our logical_decoding_work_mem: the server begins to send a transaction in progress when its changes have this size.
So at most this much is left to send at the commit. With the server's default, 64MB, that would take a second or two."""
_LITTLE_MEMORY: Final = (
    f"SELECT set_config('logical_decoding_work_mem', '{_MEMORY}', false) "
    f"WHERE pg_size_bytes(current_setting('logical_decoding_work_mem')) > pg_size_bytes('{_MEMORY}')"
)
_POLL_SECONDS = 0.5
"""The longest single wait of a command. Between two waits, signals are handled and ``waiting`` is called."""
_CANCEL_SECONDS = 2.0
_END_SECONDS = 5.0
GSS_ENCRYPTED = "SELECT coalesce((SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()), false)"
_HISTORY_LINE: Final = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)")


@dataclass(frozen=True)
class SystemIdentity:
    """The server's answer to IDENTIFY_SYSTEM, and the database's OID. ``flush_lsn`` may lie inside a WAL record. So it
    can be the LSN up to which a run receives, but it is never stored as the end of a transaction."""

    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    database: str
    database_oid: int


@dataclass(frozen=True)
class CreatedSlot:
    """A new slot. The snapshot shows the transactions with ``commit_lsn`` below ``consistent_point``, and the slot
    sends all later transactions. The snapshot exists until the next command on the connection that created it."""

    consistent_point: Lsn
    snapshot_name: str | None


class ReplicationConnection:
    """A connection to one walsender. It runs one command at a time, and at most one stream, after the commands."""

    def __init__(self, connection: SourceConnection) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        # The connection stays blocking, because we send only short commands.
        self.pgconn.nonblocking = 0
        self.endpoint = connection.endpoint
        self._socket: SocketReader | None = None
        self._frames: FrameReader | None = None
        self._little_memory = False
        self.parallel = False
        """Whether the stream was started with the option streaming = parallel."""

    @classmethod
    def open(
        cls, conninfo: str, *, application_name: str = f"{APPLICATION}/receive",
        options: Mapping[str, str] | None = None,
    ) -> Self:  # fmt: skip
        """Connects to the conninfo's database. ``options`` are additional session settings."""
        # With wal_sender_timeout = 0, the slot of a client that vanished would stay active for ever.
        settings = {"wal_sender_timeout": "60s", **(options or {})}
        return cls(connect(conninfo, application_name=application_name, options=settings, replication="database"))

    # Commands of replication --------------------------------------------------------------------

    def identify(self) -> SystemIdentity:
        """Runs IDENTIFY_SYSTEM, and reads the OID of the database."""
        system, timeline, flushed, database = self.execute("IDENTIFY_SYSTEM")[0]
        if system is None or timeline is None or flushed is None or database is None:
            raise ProtocolError("IDENTIFY_SYSTEM returned an empty field", thing=self.endpoint)
        oid = self.execute("SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()")[0][0]
        return SystemIdentity(system, int(timeline), Lsn.parse(flushed), database, int(oid or 0))

    def timeline_history(self, timeline: int) -> dict[int, Lsn]:
        """Returns, for each timeline that led to ``timeline``, the LSN at which the server left it."""
        if timeline == 1:
            return {}
        history = self.execute(f"TIMELINE_HISTORY {timeline:d}")[0][1] or ""
        matches = [_HISTORY_LINE.match(line) for line in history.splitlines()]
        return {int(match[1]): Lsn.parse(match[2]) for match in matches if match}

    def create_slot(
        self, name: str, *, temporary: bool = False, two_phase: bool = False, waiting: Callable[[], None] | None = None
    ) -> CreatedSlot:
        """Creates a pgoutput slot with an exported snapshot. The server waits for every open transaction of the cluster
        that has an xid; ``waiting`` is called every half second of this wait. Uses the old option syntax of
        CREATE_REPLICATION_SLOT, which every version understands."""
        kind = "TEMPORARY " if temporary else ""
        command = f"CREATE_REPLICATION_SLOT {identifier(name)} {kind}LOGICAL pgoutput EXPORT_SNAPSHOT"
        if two_phase:
            command += " TWO_PHASE"
        _, point, snapshot_name, _ = self.execute(command, waiting=waiting)[0]
        if point is None:
            raise ProtocolError("CREATE_REPLICATION_SLOT returned no consistent_point", thing=f"slot {name}")
        return CreatedSlot(Lsn.parse(point), snapshot_name)

    def drop_slot(self, name: str) -> None:
        self.execute(f"DROP_REPLICATION_SLOT {identifier(name)} WAIT")

    # The stream -----------------------------------------------------------------------------------

    def start(
        self, slot: str, start_lsn: Lsn, publications: Sequence[str], options: PluginOptions = FIRST_VERSION
    ) -> None:
        """Runs START_REPLICATION with pgoutput. The server never starts below the slot's confirmed_flush_lsn."""
        given = ", ".join(f"{name} {literal(value)}" for name, value in options.given(publications).items())
        command = f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {start_lsn} ({given})"
        self.parallel = options.parallel
        if options.streaming != Streaming.OFF and not self._little_memory:
            # This runs only before the first attempt to start. If the server refused an attempt, our reader of the
            # socket has read the answer instead of libpq, so libpq cannot run a further command.
            self.execute(_LITTLE_MEMORY)
            self._little_memory = True
        reader = self.socket()
        if reader is None:
            self._result(command, None)
            self._frames = LibpqReader(self.pgconn, self.endpoint)
            return
        reader.command(command)
        silence = Silence(SourceConnection.patience, self.endpoint, self.at_work)
        while not reader.begun():
            if self.wait(_POLL_SECONDS):
                silence.heard()
            else:
                silence.listened()
        self._frames = reader

    @property
    def frames(self) -> FrameReader:
        """The reader of the started stream."""
        assert self._frames is not None
        return self._frames

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """Sends a standby status update. The caller ensures that no LSN ever decreases."""
        now = int(time.time() * 1_000_000) - EPOCH
        self.frames.send(status_update(write, flush, apply, now, reply))

    def end_stream(self) -> None:
        """Sends CopyDone, then reads and drops the remaining frames, so that the slot is free when this returns. If the
        server does not answer within five seconds, returns nevertheless. The slot is then free when the server notices
        that the connection is closed."""
        deadline = time.monotonic() + _END_SECONDS
        while not self.frames.finish() and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    # Any command ----------------------------------------------------------------------------------

    def execute(self, command: str, *, waiting: Callable[[], None] | None = None) -> list[tuple[str | None, ...]]:
        """Runs a replication command or simple SQL. Returns the rows of the last result as text. ``waiting`` is called
        every half second until the server answers. Without ``waiting``, long waits are logged."""
        result = self._result(command, waiting)
        columns = range(result.nfields)
        return [tuple(self._text(result.get_value(row, column)) for column in columns) for row in range(result.ntuples)]

    def cancel(self) -> None:
        """Asks the server to cancel the running command."""
        self._connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def at_work(self) -> bool:
        """Asks the server, on another connection, whether this session is active."""
        session = self._connection.session
        return session is not None and session.work() is not None

    # Data ---------------------------------------------------------------------------------------

    def wait(self, timeout: float) -> bool:
        """Waits for input up to ``timeout`` seconds. Returns whether there is input."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(max(timeout, 0) * 1000))

    def socket(self) -> SocketReader | None:
        """Returns a reader of the socket itself; None if the connection is encrypted (TLS, GSSAPI encryption)."""
        if self._socket is None and not self.pgconn.ssl_in_use and self.execute(GSS_ENCRYPTED)[0][0] != "t":
            self._socket = SocketReader(self.pgconn.socket, self.endpoint, self.encoding)
        return self._socket

    @property
    def encoding(self) -> Encoding:
        """See :attr:`SourceConnection.encoding`."""
        return self._connection.encoding

    def close(self) -> None:
        self._connection.close()
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # Helper methods -----------------------------------------------------------------------------

    def _result(self, command: str, waiting: Callable[[], None] | None) -> pq.abc.PGresult:
        last: pq.abc.PGresult | None = None
        failed: ServerError | None = None
        try:
            self.pgconn.send_query(self.encoding.encode(command))
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
            # We were interrupted. The command is cancelled, because a waiting server would not notice that we are gone.
            self._connection.abandon()
            raise
        if failed is not None:
            raise failed.typed(self.endpoint)
        if last is None:
            raise SourceUnavailable("the server returned no result", thing=self.endpoint)
        return last

    def _until_ready(self, waiting: Callable[[], None] | None) -> None:
        connection = self._connection
        silence = Silence(connection.patience, self.endpoint, self.at_work) if waiting else connection.silence()
        while self.pgconn.is_busy():
            if self.wait(_POLL_SECONDS):
                self.pgconn.consume_input()
                silence.heard()
                continue
            silence.listened()
            if waiting is not None:
                waiting()

    def _text(self, value: bytes | None) -> str | None:
        return None if value is None else self.encoding.shown(value)
