"""A connection for direct calls of libpq. The replication connection is based on it.

psycopg itself has no calls for replication commands (:mod:`pgcdc_assets.source.connect.walsender`), nor for data that
we read from the connection ourselves. Commands are sent as text, so this module also quotes names and values.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import ClassVar, Self

from psycopg import OperationalError, pq

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.source.connect.connection import (
    APPLICATION,
    SourceConnection,
    opened,
    session_settings,
    source_conninfo,
)
from pgcdc_assets.source.connect.failures import ServerError, first_line, result_error
from pgcdc_assets.source.connect.readers import SocketReader
from pgcdc_assets.source.connect.silence import Session, Silence

POLL_SECONDS = 0.5
"""The longest single wait of a command, so that signals are handled and ``waiting`` is called between two waits."""
_CANCEL_SECONDS = 2.0
GSS_ENCRYPTED = "SELECT coalesce((SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()), false)"


class LibpqConnection:
    """Runs one command at a time, and reads data directly from the connection."""

    _settings: ClassVar[Mapping[str, str]] = {}
    """Session settings of this class of connections."""
    _parameters: ClassVar[Mapping[str, str]] = {}
    """Connection parameters of this class of connections."""

    def __init__(self, connection: SourceConnection) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        # Blocking, because we send only short commands and nothing polls until they are sent.
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
        """Connects to the conninfo's database. ``options`` are additional session settings."""
        settings = {**cls._settings, **(options or {})}
        full = source_conninfo(conninfo, application_name=application_name, options=settings, **cls._parameters)
        source = opened(conninfo, full)
        connection = cls(source)
        try:
            ((pid, *_),) = connection.execute(session_settings(source, settings))
            source.session = Session(full, int(pid or 0), application_name)
        except BaseException:
            connection.close()
            raise
        return connection

    # Commands -----------------------------------------------------------------------------------

    def execute(self, command: str, *, waiting: Callable[[], None] | None = None) -> list[tuple[str | None, ...]]:
        """Runs a replication command or simple SQL. Returns the rows of the last result as text.

        ``waiting`` is called every half second until the server answers. Without it, long waits are logged.
        """
        result = self._result(command, waiting)
        columns = range(result.nfields)
        return [tuple(self._text(result.get_value(row, column)) for column in columns) for row in range(result.ntuples)]

    def cancel(self) -> None:
        """Asks the server to cancel the running command."""
        self._connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def at_work(self) -> bool:
        """Whether another connection sees the session of this connection at work."""
        session = self._connection.session
        return session is not None and session.work() is not None

    # Data ---------------------------------------------------------------------------------------

    def wait(self, timeout: float) -> bool:
        """Waits for input up to ``timeout`` seconds. Returns whether there is input."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(max(timeout, 0) * 1000))

    def socket(self) -> SocketReader | None:
        """Returns a reader of the socket itself; None if the connection is encrypted (TLS, GSSAPI encryption)."""
        if self._socket is None and not self.pgconn.ssl_in_use and self.execute(GSS_ENCRYPTED)[0][0] != "t":
            self._socket = SocketReader(self.fileno(), self.endpoint, self.encoding)
        return self._socket

    @property
    def encoding(self) -> Encoding:
        """See :attr:`SourceConnection.encoding`."""
        return self._connection.encoding

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
        """Sends one command and waits for its result. Raises an error of the server as a typed exception."""
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

    def _text(self, value: bytes | None) -> str | None:
        return None if value is None else self.encoding.shown(value)


def identifier(name: str) -> str:
    """Quotes a name, both for the replication grammar and for publication_names."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Quotes a text as a literal, with doubled quotes. The replication grammar has no other escape, such as libpq's
    E'...'."""
    return "'" + value.replace("'", "''") + "'"
