"""Connects to the source for SQL with fixed session settings and typed errors, and quotes names and values."""

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
from pgcdc_assets.source.connect.silence import FOR_QUERIES, Patience, Session, Silence

logger = logging.getLogger(__name__)

RV = TypeVar("RV")

APPLICATION = "pgcdc_assets"
"""First part of every application_name. synchronous_standby_names must not match it: each COMMIT on the source would
then wait for pgcdc."""

_SESSION = {
    # With these settings, each value has only one text form. The defaults of server, database and role do not matter.
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    # These decide how the server prints object names (regclass and similar types) and row filters. The text of a row
    # filter is used again in COPY commands.
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    # No time limits, because the session that holds a snapshot is idle in its transaction during the whole copy.
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # The search path decides how regclass and similar types print, and which operators are found. pg_catalog is safe,
    # because ordinary users cannot create functions in it.
    "search_path": "pg_catalog",
    # Roles for reporting often have this setting on, but setup has to create publications.
    "default_transaction_read_only": "off",
}
_TRANSPORT = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    # Without this limit, Linux would notice a vanished peer only after a quarter of an hour. TCP sends no keepalives
    # while sent data is unacknowledged, and we send a status update every five seconds.
    "tcp_user_timeout": "60000",
    "client_encoding": "UTF8",
    # The value is empty, so that a value from a service file is not used.
    "replication": "",
}
"""Connection parameters by which a vanished peer is noticed within a minute. The values of the user's conninfo take
precedence, except for the encoding. TCP does not notice a pooler or tunnel that keeps the connection but forwards
nothing; :mod:`pgcdc_assets.source.connect.silence` does."""
_CANCEL_SECONDS = 1.0

_TRANSACTION_TIMEOUT_SINCE = 170000


class SourceConnection(psycopg.Connection[tuple[Any, ...]]):
    """A psycopg connection that raises SourceUnavailable if it is lost, or if the server sends nothing for a minute and
    our session on the server is not active. While this session is active, a query may take any time, and ``on_wait`` is
    called every ten seconds."""

    patience: ClassVar[Patience] = FOR_QUERIES
    endpoint: str = "source"
    """The server's address as log and error messages show it: see :func:`redacted`."""
    session: Session | None = None
    """The session on the server; None until the server has sent its pid."""
    on_wait: Callable[[str], None] | None = None
    """Called during a long wait, with a text that says what our session on the server does, such as which lock it waits
    for. If None, the text is logged."""
    encoding: Encoding = UTF8
    """The encoding of all texts: the server's encoding. If we requested UTF8, the server would end the stream, copy or
    query at the first text that it cannot convert. In the server's own encoding, the server sends such a text
    unchanged, and only the table with this text is affected."""

    def execute(
        self, query: Any, params: Params | None = None, *, prepare: bool | None = None, binary: bool = False
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        if self.closed:
            raise SourceUnavailable("the connection was lost", thing=self.endpoint)
        if self.encoding.name != UTF8.name:
            query = self._encoded(query)
        return super().execute(query, params, prepare=prepare, binary=binary)

    def speak(self) -> None:
        """Makes psycopg use the server's encoding, and accept texts with bytes that are invalid in this encoding."""
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
            # The server sent nothing for too long, or the wait was interrupted. Nobody will read the answer, so the
            # connection is closed.
            self.abandon()
            raise

    def silence(self) -> Silence:
        """Starts a count of the seconds in which the server sends nothing while we wait for one answer."""
        return Silence(self.patience, self.endpoint, self._at_work)

    def abandon(self) -> None:
        """Cancels the running command and closes the connection."""
        with suppress(psycopg.Error):
            self.cancel_safe(timeout=_CANCEL_SECONDS)
        self.close()

    def _listening(self, gen: PQGen[RV]) -> PQGen[RV]:
        """Passes values between ``gen`` and psycopg's wait loop, and counts how long the server sends nothing."""
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
            (self.on_wait or log_waiting)(f"pgcdc's session {work}")
        return work is not None


def log_waiting(what: str) -> None:
    logger.warning("waiting for the source: %s", what)


def session_options(**more: str) -> str:
    """Returns the start-up options ``-c name=value ...`` of every connection. ``more`` takes precedence."""
    return " ".join(f"-c {name}={_escaped(value)}" for name, value in {**_SESSION, **more}.items())


def source_conninfo(conninfo: str, *, application_name: str, options: Mapping[str, str] | None = None) -> str:
    """Returns ``conninfo`` with our session settings added after the user's ``options``, so that ours take precedence.
    Raises SettingsError if the conninfo cannot be parsed."""
    given = parsed(conninfo)
    ours = session_options(**(options or {}))
    own = str(given.get("options") or "")
    merged = {k: v for k, v in _TRANSPORT.items() if k not in given or k == "client_encoding"}
    merged["options"] = f"{own} {ours}".strip()
    merged["application_name"] = application_name
    return make_conninfo("", **{**given, **merged})


def connect(
    conninfo: str, *, application_name: str = APPLICATION, row_security: bool = True,
    options: Mapping[str, str] | None = None, **kwargs: Any,
) -> SourceConnection:  # fmt: skip
    """Opens an autocommit connection with the settings of _SESSION. Copies set ``row_security=False``, so that the
    server raises an error if a policy would hide rows. Raises SourceUnavailable, or SourceNotReady if the server
    refuses the connection."""
    extra = dict(options or {})
    if not row_security:
        extra["row_security"] = "off"
    full = source_conninfo(conninfo, application_name=application_name, options=extra)
    conn = _opened(conninfo, full, **{"autocommit": True, **kwargs})
    try:
        ((pid, *_),) = conn.execute(_session_settings(conn, extra).encode())
    except BaseException:
        conn.close()
        raise
    conn.session = Session(full, pid, application_name)
    return conn


def _opened(conninfo: str, full: str, **kwargs: Any) -> SourceConnection:
    try:
        conn = SourceConnection.connect(full, **kwargs)
    except psycopg.OperationalError as error:
        raise of_refusal(without_secret(str(error), conninfo)).typed(redacted(conninfo)) from None
    except ProgrammingError as error:
        raise SettingsError(without_secret(str(error), conninfo), thing="setting `source`") from None
    conn.endpoint = redacted(conninfo)
    conn.speak()
    return conn


def _session_settings(conn: SourceConnection, more: Mapping[str, str]) -> str:
    """Returns a statement that sets all session settings again, because a pooler may drop the start-up options. Its
    first column is the session's pid, because the pid that libpq gets from a pooler is wrong."""
    late = {"client_encoding": conn.encoding.name}
    # Servers before 17 have no transaction_timeout, and would refuse a connection that names it at start-up.
    if conn.info.server_version >= _TRANSACTION_TIMEOUT_SINCE:
        late["transaction_timeout"] = "0"
    calls = [f"set_config('{name}', {literal(value)}, false)" for name, value in {**_SESSION, **more, **late}.items()]
    return f"SELECT pg_backend_pid(), {', '.join(calls)}"


def encoding_of(conn: psycopg.Connection[Any]) -> Encoding:
    """Returns the encoding of the texts that a connection receives."""
    return Encoding.of(conn.info.parameter_status("client_encoding"))


def parsed(conninfo: str) -> dict[str, Any]:
    """Returns the conninfo's fields. Raises SettingsError, because libpq's error would quote the password."""
    try:
        return dict(conninfo_to_dict(conninfo))
    except (ProgrammingError, UnicodeError):
        raise SettingsError(NO_SOURCE, thing="setting `source`", do=SOURCE_FORM) from None


def redacted(conninfo: str) -> str:
    """Returns the server that a conninfo names, for error texts and log lines: ``user@host:port/dbname``, without
    secrets."""
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
    """Returns ``text`` with every secret of the conninfo replaced by ``***``, because a library may quote it."""
    for name, value in parsed(conninfo).items():
        if value and is_secret(name):
            text = text.replace(str(value), "***")
    return text


def _escaped(value: str) -> str:
    """Escapes blanks and backslashes with a backslash, as the options field needs (PostgreSQL's pg_split_opts)."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def identifier(name: str) -> str:
    """Quotes a name, for the replication grammar and for publication_names."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Quotes a text as a literal with doubled quotes, the only escape of the replication grammar (it has no E'...')."""
    return "'" + value.replace("'", "''") + "'"
