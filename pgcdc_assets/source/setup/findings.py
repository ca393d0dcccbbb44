"""Findings of ``setup`` on the server: settings, free slots and walsenders, network path, objects not replicated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, Literal

import psycopg

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.connect.connection import APPLICATION
from pgcdc_assets.source.connect.pluginoptions import PluginOptions
from pgcdc_assets.source.connect.walsender import GSS_ENCRYPTED

Severity = Literal["error", "warning", "info"]

OLDEST_VERSION = 140000
_MINORS_THAT_LOSE = {14: 18, 15: 13, 16: 9, 17: 5}
"""The first minor release, by major version, in which ALTER PUBLICATION is safe (May 2025). Older releases may lose
later changes of a transaction that is open during ALTER PUBLICATION."""
_PLACES = 2
"""The number of slots, and of walsenders, that a run needs: one for the stream, and temporarily one for a copy."""
_NAMES_SHOWN = 10

_SERVER = """
SELECT pg_is_in_recovery(), w.setting, w.pending_restart, current_setting('synchronous_standby_names'),
       current_setting('max_slot_wal_keep_size'), current_setting('idle_replication_slot_timeout', true),
       current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_catalog.pg_replication_slots),
       current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_catalog.pg_stat_replication),
       EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = %s)
FROM pg_catalog.pg_settings w WHERE w.name = 'wal_level'
"""
_NOT_REPLICATED = """
SELECT CASE WHEN c.relkind = 'f' THEN 'foreign tables' WHEN c.relkind = 'm' THEN 'materialised views'
            WHEN c.relkind = 'S' THEN 'sequences' ELSE 'unlogged tables' END,
       n.nspname || '.' || c.relname
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
  AND (c.relkind IN ('f', 'm', 'S') OR (c.relkind = 'r' AND c.relpersistence = 'u'))
UNION ALL
SELECT 'large objects', count(*)::text FROM pg_catalog.pg_largeobject_metadata HAVING count(*) > 0
ORDER BY 1, 2
"""


@dataclass(frozen=True)
class Finding:
    """Something on the source that the operator should know. An ``error`` stops setup, and a ``warning`` and an
    ``info`` do not. ``do``: advice; may be empty. ``sql``: statements that fix the finding, ready to run."""

    severity: Severity
    thing: str
    what: str
    do: str = ""
    sql: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"{self.thing}: {self.what}", *([self.do] if self.do else []), *self._sql()])

    @property
    def lines(self) -> list[str]:
        """The finding as lines of text. Each SQL statement has a separate line."""
        told = replace(self, sql=())
        return [str(told), *(f"  {statement}" for statement in self._sql())]

    def _sql(self) -> list[str]:
        more = len(self.sql) - _NAMES_SHOWN
        rest = [f"-- and {more} more; `pgcdc setup --sql` prints all"] if more > 0 else []
        return [*self.sql[:_NAMES_SHOWN], *rest]


def server_findings(conn: psycopg.Connection[Any], slot: str, *, two_phase: bool = False) -> list[Finding]:
    """Returns findings on the server's settings and its free slots and walsenders."""
    ((recovering, wal_level, pending, standbys, keep, idle, slots, senders, has_slot),) = conn.execute(_SERVER, [slot])
    return [
        *_version(conn.info.server_version),
        *(_two_phase(conn.info.server_version) if two_phase else ()),
        *_encoding(conn.info.parameter_status("server_encoding")),
        *_settings(recovering, wal_level, pending, standbys),
        *_places(slots, senders, has_slot),
        *_bounds(keep, idle),
    ]


def _version(number: int) -> Iterator[Finding]:
    major, minor = divmod(number, 10000)
    if number < OLDEST_VERSION:
        yield Finding("error", "source", f"is PostgreSQL {major}", f"use PostgreSQL {OLDEST_VERSION // 10000} or newer")
    elif minor < _MINORS_THAT_LOSE.get(major, 0):
        yield Finding(
            "warning", "source",
            f"is PostgreSQL {major}.{minor}, which may lose changes of a transaction that is open while a table that "
            "it changes is added to a publication", f"update it to {major}.{_MINORS_THAT_LOSE[major]} or newer",
        )  # fmt: skip


def _two_phase(number: int) -> Iterator[Finding]:
    try:
        PluginOptions.of(number // 10000, two_phase=True)
    except SourceNotReady as error:
        yield Finding("error", "source", error.what, error.do or "")


def _encoding(name: str | None) -> Iterator[Finding]:
    if name == "SQL_ASCII":
        yield Finding(
            "warning", "source", f"has server_encoding = {name}, which accepts any bytes: if a table has a text that "
            "is not UTF-8, pgcdc stops following the table",
            "find such texts before the first copy, and correct them",
        )  # fmt: skip
    elif name and Encoding.of(name).name != name:
        yield Finding(
            "warning", "source", f"has server_encoding = {name}, which the server converts to UTF8: if it cannot "
            "convert a text, replication of all tables stops",
            "find such texts before the first copy, and correct them",
        )  # fmt: skip


def _settings(recovering: bool, wal_level: str, pending: bool, standbys: str) -> Iterator[Finding]:
    if recovering:
        yield Finding("error", "source", "is a standby, on which no publication can be created",
                      "set `source` to its primary, and run `pgcdc setup` again")  # fmt: skip
    if wal_level != "logical" and pending:
        yield Finding("error", "source", f"has wal_level = {wal_level}; a new value is set, but needs a restart",
                      "restart the server")  # fmt: skip
    elif wal_level != "logical":
        yield Finding("error", "source", f"has wal_level = {wal_level}, but logical replication needs wal_level = "
                      "logical", "run this, then restart the server",
                      ("ALTER SYSTEM SET wal_level = logical;",))  # fmt: skip
    if matches_standby_names(standbys, APPLICATION):
        yield Finding(
            "error", "source",
            f"would wait for pgcdc at every COMMIT: synchronous_standby_names = {standbys!r} matches pgcdc's "
            f"application_name {APPLICATION!r}",
            "list each standby by name in synchronous_standby_names",
        )  # fmt: skip


def _places(slots: int, senders: int, has_slot: bool) -> Iterator[Finding]:
    needed = _PLACES - has_slot
    if slots < needed:
        yield Finding("error", "source", f"has {max(slots, 0)} free replication slots, but {needed} are needed",
                      "raise max_replication_slots and restart the server, or drop an unused slot")  # fmt: skip
    if senders < needed:
        yield Finding("error", "source", f"has {max(senders, 0)} free walsenders, but {needed} are needed",
                      "raise max_wal_senders and restart the server")  # fmt: skip


def _bounds(keep: str, idle: str | None) -> Iterator[Finding]:
    if keep == "-1":
        yield Finding(
            "warning", "source", "keeps WAL for a slot without a limit (max_slot_wal_keep_size = -1): while "
            "no sync runs, WAL may fill the disk", "set max_slot_wal_keep_size to a size that the disk has room for",
        )  # fmt: skip
    if idle not in (None, "0"):
        yield Finding("warning", "source", f"invalidates a slot that is not read for {idle}",
                      "set idle_replication_slot_timeout above the longest pause between two runs")  # fmt: skip


def not_replicated(conn: psycopg.Connection[Any]) -> list[Finding]:
    """Returns a finding for each kind of object that logical replication does not replicate."""
    kinds: dict[str, list[str]] = {}
    for kind, name in conn.execute(_NOT_REPLICATED):
        kinds.setdefault(kind, []).append(name)
    return [Finding("info", kind, f"not replicated: {named(names)}") for kind, names in kinds.items()]


def named(names: Sequence[str]) -> str:
    """Returns at most ten of the names, and the number of the other names."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def matches_standby_names(setting: str, application: str) -> bool:
    """Whether synchronous_standby_names, such as ``[FIRST | ANY n] (a, "b", *)``, may match one of our connections,
    which are named ``<application>/<part>``: a name in the setting is ``*`` or begins with ``application``, ignoring
    case. The grammar is in syncrep_gram.y."""
    inner = re.fullmatch(r"(?is)\s*(?:(?:first|any)\s+)?\d+\s*\((.*)\)\s*", setting)
    listed = re.findall(r'"((?:[^"]|"")*)"|([^\s,"]+)', inner[1] if inner else setting)
    names = [(quoted.replace('""', '"') or plain).lower() for quoted, plain in listed]
    return "*" in names or any(name.startswith(application.lower()) for name in names)


_CHECKED: Final = "verify-full"
"""The only ``sslmode`` with which libpq checks that the server's certificate is valid and belongs to the host."""
_DO: Final = f"add `sslmode={_CHECKED}` to `source`, and `sslrootcert` with the file of its CA certificate"


def transport_findings(conn: psycopg.Connection[Any]) -> list[Finding]:
    """Returns a warning if the source is another machine and the connection is not encrypted, or does not check the
    server's certificate."""
    sslmode = next((option.val or b"" for option in conn.pgconn.info if option.keyword == b"sslmode"), b"").decode()
    # With GSSAPI encryption the certificate does not matter: only the host that the Kerberos ticket names can decrypt.
    gss = conn.execute(GSS_ENCRYPTED).fetchone() == (True,)
    said = exposed(conn.info.host, conn.info.hostaddr, sslmode, tls=bool(conn.pgconn.ssl_in_use), gss=gss)
    return [Finding("warning", "source", said, _DO)] if said else []


def exposed(host: str, address: str, sslmode: str, *, tls: bool, gss: bool = False) -> str | None:
    """Describes how others on the network could read or change the connection to ``host``; None if they cannot.
    ``address``: the numeric address of the connection; empty for a local socket."""
    if not address or _loopback(address) or gss or (tls and sslmode == _CHECKED):
        return None
    if not tls:
        return f"is reached at {host} without encryption: others on the network can read and change all rows"
    return f"is reached at {host} with sslmode={sslmode}, which does not check the identity of the server"


def _loopback(address: str) -> bool:
    # A link-local address may end with the name of its interface.
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback


def identity_full(table: str, *, partitioned: bool) -> str:
    """Advice on how a table gets REPLICA IDENTITY FULL. Partitions do not inherit the replica identity of their
    root."""
    if partitioned:
        return "set REPLICA IDENTITY FULL on each of its partitions"
    return f"ALTER TABLE {table} REPLICA IDENTITY FULL"
