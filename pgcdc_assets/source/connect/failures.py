"""Maps PostgreSQL's errors by SQLSTATE to our error classes and to advice.

Only the primary line of a message is kept, because DETAIL and CONTEXT may contain row values.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import psycopg
from psycopg import pq

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.errors import (
    CopyBlocked,
    EmptyPublication,
    PgcdcError,
    RightLacking,
    SettingsError,
    SlotActive,
    SlotLost,
    SlotMissing,
    SourceFailed,
    SourceNotReady,
    SourceUnavailable,
)

COPY_ANEW = "run `pgcdc teardown`, then `pgcdc setup` and `pgcdc sync`, which copies all tables again"
NEW_LAKE = "run `pgcdc teardown --lake`, then `pgcdc setup` and `pgcdc sync`"
"""The advice if the lake has changes that this source never had. A new copy is not enough, because the lake's LSNs are
higher than the source's."""

_BY_STATE: dict[str, tuple[type[PgcdcError], str | None]] = {
    "55006": (SlotActive, "wait until the process that uses the slot ends, or end that process"),
    "55P03": (CopyBlocked, "end the transaction that holds the lock, then run the command again"),
    "42501": (SourceNotReady, "grant the right that the message names, then run the command again"),
    "53100": (SourceNotReady, "free space on the source, then run the command again"),
    "53200": (SourceNotReady, "give the source more memory, then run the command again"),
    "53400": (SourceNotReady, "raise max_replication_slots on the source and restart it, or drop a slot"),
    "28000": (
        SourceNotReady,
        "allow this user to connect: check that its role exists and may log in, and check pg_hba.conf",
    ),
    "28P01": (SourceNotReady, "check PGPASSWORD, the service file or the passfile"),
    "53300": (
        SourceUnavailable,
        "pgcdc needs 3 connections to follow, during copies 4 more and one for each core of Spark, and 1 for "
        "`status` or the sensor: raise the role's CONNECTION LIMIT or max_connections, or set `spark` to fewer cores, "
        "like local[2]",
    ),
    "57P03": (SourceUnavailable, "wait until the server has started, then run the command again"),
    "3D000": (SourceNotReady, "check the database's name in the setting `source`: if it was renamed, set the new name"),
}
UNREACHED = (
    "check that the server runs, and that host and port in the setting `source` (PGCDC_SOURCE, or pgcdc.yaml) are right"
)
_NO_UTF8 = ("22021", "22P05")
"""SQLSTATEs of bytes that are invalid in the server's encoding, and of a character that UTF8 does not have."""
_UNAVAILABLE_CLASSES = ("08", "57P")
"""Prefixes of SQLSTATE: connection exceptions, and shutdown or crash (57P01 to 57P05)."""

_AT_CONNECT = (
    (re.compile(r"password authentication failed|no password supplied"), "28P01"),
    (re.compile(r"no pg_hba\.conf entry|role .* does not exist|peer authentication failed|not permitted"), "28000"),
    (re.compile(r"database .* does not exist"), "3D000"),
    (re.compile(r"permission denied"), "42501"),
    (re.compile(r"too many connections for|too many clients already|remaining connection slots"), "53300"),
    (re.compile(r"database system is (?:starting up|shutting down|in recovery mode|not .*accepting conn)"), "57P03"),
)
"""libpq's texts for refused connections, each with the SQLSTATE that it stands for. libpq itself does not return the
SQLSTATE of a refused connection. A text in another language matches nothing, and becomes a SourceUnavailable, which is
retried."""

_NO_WALSENDER: tuple[tuple[re.Pattern[str], type[PgcdcError], str], ...] = (
    (
        re.compile(r"must be superuser or replication role|permission denied to start WAL sender"),
        SourceNotReady,
        "run ALTER ROLE ... REPLICATION for the user of `source`; on a managed service, grant its replication role",
    ),
    (
        re.compile(r"exceeds \"?max_wal_senders"),
        SourceUnavailable,
        "raise max_wal_senders on the source and restart it, or end a replication connection that is not needed",
    ),
    (
        re.compile(r'startup parameter\W+replication\b|at or near "(?:IDENTIFY_SYSTEM|CREATE_REPLICATION_SLOT)"'),
        SourceNotReady,
        "set host and port of `source` to those of PostgreSQL: a pooler or proxy accepts no replication connections",
    ),
)
"""Error texts of a source that refuses us a replication connection, each with error class and advice. A pooler refuses
the parameter ``replication``, or drops it; our first replication command then reaches an ordinary session. A lack of
free walsenders is retryable, because the walsender of a killed run may exist for some time."""

_NO_CONNINFO = re.compile(
    r"^(?:connection (?:failed|is bad): )*(?:invalid (?:port number|integer value|\S+ value)|definition of service)"
    r"|Servname not supported"
)
"""libpq's texts for a conninfo field that it cannot use, so that it does not even try to connect."""

_LOST = re.compile(
    r"can no longer (?:get changes|access)|cannot read from logical replication slot|has been invalidated"
)
_UNMAPPED = re.compile(r"could not map file(?:node|number)")
"""The error of PostgreSQL 18 if a slot with two_phase reads a prepared transaction that rewrote a table and was rolled
back since, and that needs more than logical_decoding_work_mem."""
_MORE_MEMORY = (
    "raise logical_decoding_work_mem above the size of the transaction that the slot reads next, with ALTER DATABASE "
    "... SET logical_decoding_work_mem, then run the command again"
)
_SLOT_NAME = re.compile(r'replication slot "([^"]*)"')
_NO_PUBLICATION = re.compile(r'publication "(.*)" does not exist')


def no_publication(name: str) -> EmptyPublication:
    """Returns the error for a publication that did not exist when some WAL was written. The slot cannot decode this WAL
    with the publication, even if the publication exists again."""
    return EmptyPublication("did not exist for some time since the slot was created: changes of that time are lost",
                            thing=f"publication {name}", do=COPY_ANEW)  # fmt: skip


@dataclass(frozen=True)
class ServerError:
    """An error of the server (ErrorResponse), or an error text of libpq, which has no SQLSTATE."""

    state: str | None
    message: str
    do: str | None = None
    """Advice for the SourceUnavailable error that :meth:`typed` returns if no more specific rule matches."""

    def typed(self, thing: str = "source") -> PgcdcError:
        slot = _SLOT_NAME.search(self.message)
        if slot and (lost := self._slot_error(slot[1])):
            return lost
        if gone := _NO_PUBLICATION.search(self.message):
            return no_publication(gone[1])
        for pattern, kind, advice in _NO_WALSENDER:
            if pattern.search(self.message):
                return kind(f"accepts no replication connection: {self.message}", thing=thing, do=advice)
        if self.state in _BY_STATE:
            kind, do = _BY_STATE[self.state]
            return kind(self.message, thing=thing, do=do)
        if self.state is None or self.state.startswith(_UNAVAILABLE_CLASSES):
            return SourceUnavailable(self.message, thing=thing, do=self.do)
        if self.state == "58P01" and "WAL segment" in self.message:
            return SlotLost(self.message, thing=thing, do=COPY_ANEW)
        if self.state in _NO_UTF8:
            # The server's message is left out, because it quotes bytes of the text.
            return SourceFailed(f"has a text that cannot be converted to UTF8 (SQLSTATE {self.state})", thing=thing,
                                do=f"correct this text; if the WAL already contains it, {COPY_ANEW}")  # fmt: skip
        if "wal_level" in self.message:
            return SourceNotReady(self.message, thing=thing, do="set wal_level = logical on the source and restart it")
        do = _MORE_MEMORY if _UNMAPPED.search(self.message) else None
        return SourceFailed(f"{self.message} (SQLSTATE {self.state})", thing=thing, do=do)

    def of_table(self, table: object) -> PgcdcError:
        """Returns :meth:`typed` for a statement on one table. A missing right then becomes RightLacking, which affects
        only this table."""
        typed = self.typed(f"table {table}")
        return RightLacking(typed.what, thing=typed.thing, do=typed.do) if self.state == "42501" else typed

    def _slot_error(self, slot: str) -> PgcdcError | None:
        thing = f"slot {slot}"
        if self.state == "42704":
            return SlotMissing("does not exist", thing=thing, do=COPY_ANEW)
        if self.state == "55006":
            return SlotActive(self.message, thing=thing, do=_BY_STATE["55006"][1])
        if self.state == "55000" and _LOST.search(self.message):
            return SlotLost("was invalidated: PostgreSQL can no longer send its changes", thing=thing, do=COPY_ANEW)
        return None


class Unusable(ServerError):
    """An error of libpq about the conninfo itself."""

    def typed(self, thing: str = "source") -> PgcdcError:
        return SettingsError(self.message, thing="setting `source`")


def of_exception(error: psycopg.Error) -> ServerError:
    """Converts psycopg's exception, with only the primary line of its message."""
    primary = error.pgresult.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) if error.pgresult else None
    with suppress(UnicodeDecodeError):
        # psycopg decodes texts of SQL_ASCII as ASCII, so we decode the message ourselves.
        if primary:
            return ServerError(error.sqlstate, first_line(primary.decode()))
    return ServerError(error.sqlstate, first_line(error.diag.message_primary or str(error)))


def result_error(result: pq.abc.PGresult, pgconn: pq.abc.PGconn) -> ServerError:
    """Converts a libpq result with status FATAL_ERROR."""
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    primary = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)
    encoding = pgconn.parameter_status(b"client_encoding")
    shown = Encoding.of(encoding.decode() if encoding else None).shown
    text = shown(primary) if primary else pgconn.get_error_message()
    return ServerError(state.decode() if state else None, first_line(text))


_OTHER_SERVER = re.compile(r"(session|server) is (not )?(read-only|in hot standby mode)")
"""Messages of libpq about a server that ``target_session_attrs`` excludes."""


def of_refusal(text: str) -> ServerError:
    """Converts libpq's text about a connection that could not be opened."""
    line = first_line(text)
    if _NO_CONNINFO.search(line):
        return Unusable(None, line)
    if _OTHER_SERVER.search(line):
        return ServerError(
            None, line, "`target_session_attrs` in the setting `source`, or PGTARGETSESSIONATTRS, requires a "
            "different kind of server: remove this option, or set `host` to such a server",
        )  # fmt: skip
    state = next((state for pattern, state in _AT_CONNECT if pattern.search(text)), None)
    return ServerError(state, line, UNREACHED)


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
