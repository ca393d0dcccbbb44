"""A connection at libpq's level, because psycopg has no calls for replication commands and for data that we read
ourselves.

It is a walsender (:mod:`pgcdc_assets.source.connect.walsender`), or an ordinary session where the source
takes no replication connections (:mod:`pgcdc_assets.source.connect.plainsession`).
"""

from __future__ import annotations

import re
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

from psycopg import OperationalError, pq

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.source.connect.connection import (
    APPLICATION,
    UNCHECKED,
    SourceConnection,
    opened,
    session_settings,
    source_conninfo,
)
from pgcdc_assets.source.connect.failures import ServerError, first_line, result_error
from pgcdc_assets.source.connect.readers import LibpqRows, RowReader
from pgcdc_assets.source.connect.silence import Session, Silence
from pgcdc_assets.source.connect.socketreader import SocketReader

POLL_SECONDS = 0.5
"""How long a command waits at a time, so that signals and ``waiting`` get their turn."""
_CANCEL_SECONDS = 2.0
_ENCRYPTED = "SELECT coalesce((SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()), false)"
_HISTORY_LINE = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)")


@dataclass(frozen=True)
class SystemIdentity:
    """Which server it is. ``flush_lsn`` may lie inside a record: a goal, never a boundary."""

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


class LibpqConnection(ABC):
    """Runs commands one by one, and reads data off the connection itself."""

    _settings: ClassVar[Mapping[str, str]] = {}
    """Session settings of this kind of connection."""
    _parameters: ClassVar[Mapping[str, str]] = {}
    """Connection parameters of this kind of connection."""

    def __init__(self, connection: SourceConnection) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        # Blocking, because what we send is short and nothing polls for its being sent.
        self.pgconn.nonblocking = 0
        self.endpoint = connection.endpoint
        self._socket: SocketReader | None = None

    @classmethod
    def open(
        cls,
        conninfo: str,
        *,
        application_name: str = f"{APPLICATION}/receive",
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Connect to the conninfo's database; ``options`` are additional session settings."""
        settings = {**cls._settings, **(options or {})}
        full = source_conninfo(conninfo, application_name=application_name, options=settings, **cls._parameters)
        source = opened(conninfo, full)
        connection = cls(source)
        try:
            ((pid, *_),) = connection.execute(session_settings(connection.pgconn.server_version, settings))
            source.session = Session(full, int(pid or 0), application_name)
            if connection.pgconn.parameter_status(b"server_encoding") == UNCHECKED.encode():
                connection.execute(f"SET client_encoding = '{UNCHECKED}'")
        except BaseException:
            connection.close()
            raise
        return connection

    # What the two kinds do each in their way ---------------------------------------------------------

    @abstractmethod
    def identify(self) -> SystemIdentity:
        """Which server this is, and where its WAL stands."""

    def timeline_history(self, timeline: int) -> tuple[TimelineSwitch, ...]:
        """The switches that led to ``timeline``, oldest first; none for the first timeline."""
        if timeline == 1:
            return ()
        matches = [_HISTORY_LINE.match(line) for line in self._history(timeline).splitlines()]
        return tuple(TimelineSwitch(int(match[1]), Lsn.parse(match[2])) for match in matches if match)

    @abstractmethod
    def _history(self, timeline: int) -> str:
        """The text of a timeline's history file."""

    @abstractmethod
    def create_slot(
        self, name: str, *, temporary: bool = False, export: bool = False, two_phase: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> CreatedSlot:  # fmt: skip
        """A pgoutput slot. Waits for every open transaction of the cluster that has an xid."""

    # Commands -----------------------------------------------------------------------------------

    def execute(self, command: str, *, waiting: Callable[[], None] | None = None) -> list[tuple[str | None, ...]]:
        """Run a replication command or simple SQL; returns the last result's rows as text.

        ``waiting`` is called every half second until the server answers; without it, long waits are logged.
        """
        result = self._result(command, waiting)
        columns = range(result.nfields)
        return [tuple(_text(result.get_value(row, column)) for column in columns) for row in range(result.ntuples)]

    def cancel(self) -> None:
        """Ask the server to give up the command under way."""
        self._connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def at_work(self) -> bool:
        """Whether another connection finds this one's session at work."""
        session = self._connection.session
        return session is not None and session.work() is not None

    # Data ---------------------------------------------------------------------------------------

    def wait(self, timeout: float) -> bool:
        """Wait for input; returns whether there is some."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(max(timeout, 0) * 1000))

    def socket(self) -> SocketReader | None:
        """The reader of the socket itself; None where it does not carry the protocol (TLS, GSSAPI encryption)."""
        if self._socket is None and not self.pgconn.ssl_in_use and self.execute(_ENCRYPTED)[0][0] != "t":
            self._socket = SocketReader(self.fileno(), self.endpoint)
        return self._socket

    def rows(self) -> RowReader:
        """The reader of COPY TO STDOUT."""
        return self.socket() or LibpqRows(self.pgconn, self.endpoint)

    def fileno(self) -> int:
        return self.pgconn.socket

    @property
    def closed(self) -> bool:
        return self.pgconn.status != pq.ConnStatus.OK

    def close(self) -> None:
        self._connection.close()
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Within -------------------------------------------------------------------------------------

    def _result(self, command: str, waiting: Callable[[], None] | None) -> pq.abc.PGresult:
        """Send one command and wait for its result; raises a server's error as the class that it means."""
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
            # Interrupted: a server that is waiting would not notice that we are gone.
            self._connection.abandon()
            raise
        if failed is not None:
            raise failed.typed(self.endpoint)
        if last is None:
            raise SourceUnavailable("the server gave no answer", thing=self.endpoint)
        return last

    def _until_ready(self, waiting: Callable[[], None] | None) -> None:
        connection = self._connection
        silence = Silence(connection.patience, self.endpoint, self.at_work) if waiting else connection.silence()
        while self.pgconn.is_busy():
            if self.wait(POLL_SECONDS):
                self.pgconn.consume_input()
                silence.heard()
                continue
            silence.listened()
            if waiting is not None:
                waiting()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
