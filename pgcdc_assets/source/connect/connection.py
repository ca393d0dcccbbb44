"""Connections to the source: the same session settings everywhere, typed errors, no secrets in messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import psycopg
from psycopg import ProgrammingError, sql, waiting
from psycopg.abc import Buffer, Params, PQGen
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import StrDumperUnknown

from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.errors import SettingsError, SourceUnavailable
from pgcdc_assets.projectfile import NO_SOURCE, SOURCE_FORM, is_secret
from pgcdc_assets.source.connect.failures import of_exception, of_refusal
from pgcdc_assets.source.connect.quoting import literal
from pgcdc_assets.source.connect.silence import FOR_QUERIES, Patience, Session, Silence

logger = logging.getLogger(__name__)

RV = TypeVar("RV")

APPLICATION = "pgcdc_assets"
"""First part of every application_name. Distinctive on purpose: where synchronous_standby_names
matches it, each COMMIT on the source waits for us."""

_SESSION = {
    # One text form of every value, whatever the server's, database's or role's defaults are.
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    # Names of objects (regclass and its kin), and the text of row filters, which a copy's query repeats.
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    # A snapshot's holder sits idle in its transaction for as long as the copy takes.
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # The search path decides how regclass and its like print, and which operators are found: all connections have one
    # path, on which nobody can put a function.
    "search_path": "pg_catalog",
    # Reporting roles often have it on, and setup makes publications.
    "default_transaction_read_only": "off",
}
_TRANSPORT = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    # While sent data is unacknowledged (a status goes out every five seconds) keepalives do not count, and Linux would
    # retry for a quarter of an hour.
    "tcp_user_timeout": "60000",
    "client_encoding": "UTF8",
    # Empty, so that a service file's does not come in.
    "replication": "",
}
"""A peer that vanished is noticed within a minute; :mod:`pgcdc_assets.source.connect.silence` notices a dead path that
keeps TCP alive. The conninfo's own values win, except for the encoding."""
_CANCEL_SECONDS = 1.0
"""How long to ask the server to give up a query that nobody waits for any more."""

_TRANSACTION_TIMEOUT_SINCE = 170000


class SourceConnection(psycopg.Connection[tuple[Any, ...]]):
    """A psycopg connection that raises SourceUnavailable wherever its loss is noticed; silence counts as loss.

    A query may take any time as long as its session is seen to be at work; ``on_wait`` is called every ten seconds.
    """

    patience: ClassVar[Patience] = FOR_QUERIES
    endpoint: str = "source"
    """Where the connection leads, for messages: see :func:`redacted`."""
    session: Session | None = None
    """The session on the server; None until the server has named it."""
    on_wait: Callable[[str], None] | None = None
    """Called with what a long wait is for; if None, that is logged."""
    encoding: Encoding = UTF8
    """The encoding of all texts: the server's own. A server that is asked for UTF8 ends a stream, a copy or a query at
    the first text that has none; in its own encoding, a bad text affects its table alone."""

    def execute(
        self, query: Any, params: Params | None = None, *, prepare: bool | None = None, binary: bool = False
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        if self.closed:
            raise SourceUnavailable("the connection was lost", thing=self.endpoint)
        if self.encoding.name != UTF8.name:
            query = self._encoded(query)
        return super().execute(query, params, prepare=prepare, binary=binary)

    def speak(self) -> None:
        """Use the server's encoding, in which :func:`session_settings` has the session answer. psycopg would refuse a
        text with a byte that is none."""
        self.encoding = encoding = Encoding.of(self.info.parameter_status("server_encoding"))
        if encoding.name == UTF8.name:
            return

        class Texts(Loader):
            def load(self, data: Buffer) -> str:
                return encoding.shown(bytes(data))

        class Strings(StrDumperUnknown):
            def dump(self, obj: str) -> bytes:
                return encoding.encode(obj)

        for name in ("text", "name", "varchar", "bpchar", 0):
            self.adapters.register_loader(name, Texts)
        self.adapters.register_dumper(str, Strings)

    def _encoded(self, query: Any) -> Any:
        if isinstance(query, sql.Composable):
            query = query.as_string(None)
        return self.encoding.encode(query.decode() if isinstance(query, bytes) else query)

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        try:
            return waiting.wait(self._listening(gen), self.pgconn.socket, interval=interval, timeout=timeout)
        except psycopg.OperationalError as error:
            typed = of_exception(error).typed(self.endpoint)
            if isinstance(typed, SourceUnavailable) or self.closed:
                raise SourceUnavailable(typed.what, thing=self.endpoint) from None
            raise
        except psycopg.Error:
            raise
        except BaseException:
            # The server was silent, or the wait was interrupted: nobody will read the answer, so the connection cannot
            # be used for another query.
            self.abandon()
            raise

    def silence(self) -> Silence:
        """A new count of silence, for one answer on this connection, whoever reads it."""
        return Silence(self.patience, self.endpoint, self._at_work)

    def abandon(self) -> None:
        """Give up the command under way, and the connection with it."""
        with suppress(psycopg.Error):
            self.cancel_safe(timeout=_CANCEL_SECONDS)
        self.close()

    def _listening(self, gen: PQGen[RV]) -> PQGen[RV]:
        """Passes values between ``gen`` and psycopg's wait loop, and counts the waits in which the server sent
        nothing."""
        silence = self.silence()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    silence.heard()
                else:
                    silence.listened()
                wanted = gen.send(ready)
        except StopIteration as end:
            result: RV = end.value
            return result

    def _at_work(self) -> bool:
        work = self.session.work() if self.session else None
        if work is not None:
            (self.on_wait or log_waiting)(f"for a session {work}")
        return work is not None


def log_waiting(what: str) -> None:
    logger.warning("the source keeps us waiting: %s", what)


def session_options(**more: str) -> str:
    """The start-up option string ``-c name=value ...`` of every connection; ``more`` wins."""
    return " ".join(f"-c {name}={_escaped(value)}" for name, value in {**_SESSION, **more}.items())


def source_conninfo(conninfo: str, *, application_name: str, options: dict[str, str] | None = None, **more: str) -> str:
    """``conninfo`` with our session settings after the user's own; SettingsError if it is not a conninfo."""
    given = parsed(conninfo)
    ours = session_options(**(options or {}))
    own = str(given.get("options") or "")
    merged = {**{k: v for k, v in _TRANSPORT.items() if k not in given or k == "client_encoding"}, **more}
    merged["options"] = f"{own} {ours}".strip()
    merged["application_name"] = application_name
    return make_conninfo("", **{**given, **merged})


def connect(
    conninfo: str, *, application_name: str = APPLICATION, row_security: bool = True,
    options: dict[str, str] | None = None, **kwargs: Any,
) -> SourceConnection:  # fmt: skip
    """An autocommit connection with the session settings above.

    ``row_security=False`` is for copying: a policy that would hide rows is then an error, not a
    shorter table. Raises SourceUnavailable, or SourceNotReady where the server refuses us.
    """
    extra = dict(options or {})
    if not row_security:
        extra["row_security"] = "off"
    full = source_conninfo(conninfo, application_name=application_name, options=extra)
    conn = opened(conninfo, full, **{"autocommit": True, **kwargs})
    row = conn.execute(session_settings(conn, extra).encode()).fetchone()
    assert row is not None
    conn.session = Session(full, row[0], application_name)
    return conn


def opened(conninfo: str, full: str, **kwargs: Any) -> SourceConnection:
    """A connection by ``full``, which was made from ``conninfo``; interruptible at any time. Raises what
    :func:`connect` raises."""
    try:
        conn = SourceConnection.connect(full, **kwargs)
    except psycopg.OperationalError as error:
        raise of_refusal(without_secret(str(error), conninfo)).typed(redacted(conninfo)) from None
    except ProgrammingError as error:
        raise SettingsError(without_secret(str(error), conninfo), thing="setting `source`") from None
    conn.endpoint = redacted(conninfo)
    conn.speak()
    return conn


def session_settings(conn: SourceConnection, more: Mapping[str, str]) -> str:
    """A statement that makes all session settings again, because a pooler may drop the start-up option string. Its
    first column is the session's pid, which a pooler does not know either."""
    late = {"client_encoding": conn.encoding.name}
    # Servers before 17 do not know transaction_timeout, and would refuse a connection that names it at start-up.
    if conn.info.server_version >= _TRANSACTION_TIMEOUT_SINCE:
        late["transaction_timeout"] = "0"
    calls = [f"set_config('{name}', {literal(value)}, false)" for name, value in {**_SESSION, **more, **late}.items()]
    return f"SELECT pg_backend_pid(), {', '.join(calls)}"


def encoding_of(conn: psycopg.Connection[Any]) -> Encoding:
    """The encoding in which a connection gets its texts."""
    return Encoding.of(conn.info.parameter_status("client_encoding"))


def parsed(conninfo: str) -> dict[str, Any]:
    """The conninfo's fields. Raises our own error, because libpq's would quote the text, password and all."""
    try:
        return dict(conninfo_to_dict(conninfo))
    except (ProgrammingError, UnicodeError):
        raise SettingsError(NO_SOURCE, thing="setting `source`", do=SOURCE_FORM) from None


def redacted(conninfo: str) -> str:
    """Where a conninfo leads, for messages: ``user@host:port/dbname``, without any secret."""
    try:
        given = conninfo_to_dict(conninfo)
    except ProgrammingError:
        return "source"
    if given.get("service") and not given.get("host"):
        return f"service {given['service']}"
    host = str(given.get("host") or given.get("hostaddr") or "local socket")
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    database = f"/{given['dbname']}" if given.get("dbname") else ""
    return f"{user}{host}{port}{database}"


def without_secret(text: str, conninfo: str) -> str:
    """``text`` with every secret of the conninfo blotted out, should a library ever quote one."""
    for name, value in parsed(conninfo).items():
        if value and is_secret(name):
            text = text.replace(str(value), "***")
    return text


def _escaped(value: str) -> str:
    """The value for the options field: with a backslash before blanks and backslashes (PostgreSQL's pg_split_opts)."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
