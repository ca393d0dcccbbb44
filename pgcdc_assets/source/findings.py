"""What ``setup`` finds on the source: settings, rights, free places, things that are not replicated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psycopg

from pgcdc_assets.source.connection import APPLICATION, UNCHECKED

Severity = Literal["error", "warning", "info"]

OLDEST_VERSION = 140000
_MINORS_THAT_LOSE = {14: 18, 15: 13, 16: 9, 17: 5}
"""From these minors on (May 2025), ALTER PUBLICATION beside an open writer loses none of its later changes."""
_PLACES = 2
"""Slots and walsenders a run needs: the stream's, and for a while a copy's (of a slot, where it polls)."""
_NAMES_SHOWN = 10

_SERVER = """
SELECT pg_is_in_recovery(), current_setting('wal_level'), current_setting('synchronous_standby_names'),
       current_setting('max_slot_wal_keep_size'), current_setting('idle_replication_slot_timeout', true),
       current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_catalog.pg_replication_slots),
       current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_catalog.pg_stat_replication),
       EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = %s)
"""
# Managed services give replication by membership in a role of their own.
_RIGHTS = """
SELECT r.rolsuper OR r.rolreplication
         OR EXISTS (SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = ANY(%s) AND pg_has_role(g.oid, 'MEMBER')),
       has_database_privilege(current_database(), 'CREATE'), r.rolsuper, r.rolbypassrls, r.rolname::text
FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""
_REPLICATION_ROLES = ["rds_replication", "rds_superuser", "cloudsqlsuperuser", "azure_pg_admin"]

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
_TO_LOCK = "UPDATE, DELETE, TRUNCATE"
"""Any of these lets a role take the SHARE lock of a copy without replication connections; MAINTAIN does from 17 on."""
_MAINTAIN_SINCE = 170000
_TABLE_RIGHTS = """
SELECT c.oid::regclass::text, has_table_privilege(c.oid, 'SELECT'), pg_has_role(c.relowner, 'USAGE'),
       row_security_active(c.oid), c.relispartition OR has_table_privilege(c.oid, %s)
FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s) ORDER BY 1
"""


@dataclass(frozen=True)
class Finding:
    """An ``error`` stops setup; a ``warning`` is a risk; an ``info`` is told once. ``do`` may be empty."""

    severity: Severity
    thing: str
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.thing}: {self.what}" + (f"; {self.do}" if self.do else "")


def server_findings(conn: psycopg.Connection[Any], slot: str, *, replication: bool = True) -> list[Finding]:
    """The server's settings and free places; ``replication``: by replication connections."""
    row = conn.execute(_SERVER, [slot]).fetchone()
    assert row is not None
    recovering, wal_level, standbys, keep, idle, slots, senders, has_slot = row
    return [
        *_version(conn.info.server_version),
        *_encoding(conn.info.parameter_status("server_encoding")),
        *_settings(recovering, wal_level, standbys),
        *_places(slots, senders if replication else _PLACES, has_slot),
        *_bounds(keep, idle),
    ]


def _version(number: int) -> Iterator[Finding]:
    major, minor = divmod(number, 10000)
    if number < OLDEST_VERSION:
        yield Finding("error", "source", f"is PostgreSQL {major}", f"needs {OLDEST_VERSION // 10000} or newer")
    elif minor < _MINORS_THAT_LOSE.get(major, 0):
        yield Finding(
            "warning", "source",
            f"is PostgreSQL {major}.{minor}, which may lose changes of a transaction that is open while its table "
            "is added to a publication", f"update it to {major}.{_MINORS_THAT_LOSE[major]} or newer",
        )  # fmt: skip


def _encoding(name: str | None) -> Iterator[Finding]:
    if name == UNCHECKED:
        yield Finding(
            "warning", "source", f"has server_encoding = {name}: it takes any bytes for text, and a table with a text "
            "that is not UTF-8 is set aside", "find such texts before the first copy, and correct them",
        )  # fmt: skip


def _settings(recovering: bool, wal_level: str, standbys: str) -> Iterator[Finding]:
    if recovering:
        yield Finding("error", "source", "is a standby: publications are made on its primary",
                      "run `pgcdc setup` against the primary")  # fmt: skip
    if wal_level != "logical":
        yield Finding("error", "source", f"has wal_level = {wal_level}",
                      "ALTER SYSTEM SET wal_level = logical, then restart it")  # fmt: skip
    if matches_standby_names(standbys, APPLICATION):
        yield Finding(
            "error", "source",
            f"would wait for us at every COMMIT: synchronous_standby_names = {standbys!r} matches {APPLICATION!r}",
            "name the standbys one by one there",
        )  # fmt: skip


def _places(slots: int, senders: int, has_slot: bool) -> Iterator[Finding]:
    needed = _PLACES - has_slot
    if slots < needed:
        yield Finding("error", "source", f"has {max(slots, 0)} free replication slots, and {needed} are needed",
                      "raise max_replication_slots and restart it, or drop a slot nobody reads")  # fmt: skip
    if senders < needed:
        yield Finding("error", "source", f"has {max(senders, 0)} free walsenders, and {needed} are needed",
                      "raise max_wal_senders and restart it, or set `replication_connections: false`")  # fmt: skip


def _bounds(keep: str, idle: str | None) -> Iterator[Finding]:
    if keep == "-1":
        yield Finding(
            "warning", "source", "keeps WAL for a slot without bound (max_slot_wal_keep_size = -1): while nobody "
            "reads, it grows up to the disk's size", "set max_slot_wal_keep_size to what the disk can spare",
        )  # fmt: skip
    if idle not in (None, "0"):
        yield Finding("warning", "source", f"invalidates a slot that nobody reads for {idle}",
                      "set idle_replication_slot_timeout above the longest pause between two runs")  # fmt: skip


def rights_findings(
    conn: psycopg.Connection[Any], tables: Sequence[int], *, own_publication: bool, replication: bool = True
) -> list[Finding]:
    """Rights of our role on the server and on these tables (roots and leaves)."""
    row = conn.execute(_RIGHTS, [_REPLICATION_ROLES]).fetchone()
    assert row is not None
    may_replicate, create, superuser, bypass, role = row
    found: list[Finding] = []
    if not may_replicate:
        found.append(Finding("error", f"role {role}", "may not replicate", f'ALTER ROLE "{role}" REPLICATION'))
    if own_publication and not create:
        found.append(Finding("error", f"role {role}", "may not make a publication",
                             f'GRANT CREATE ON DATABASE ... TO "{role}"'))  # fmt: skip
    to_lock = _TO_LOCK + (", MAINTAIN" if conn.info.server_version >= _MAINTAIN_SINCE else "")
    rows = [] if superuser else list(conn.execute(_TABLE_RIGHTS, [to_lock, list(tables)]))
    unread = [name for name, select, *_ in rows if not select]
    foreign = [name for name, _, owner, *_ in rows if not owner]
    hidden = [name for name, *_, security, _ in rows if security and not bypass]
    unlockable = [] if replication else [name for name, *_, lock in rows if not lock]
    if unread:
        found.append(
            Finding("error", named(unread), f"may not be read by role {role}", f'GRANT SELECT ... TO "{role}"')
        )
    if unlockable:
        found.append(Finding("error", named(unlockable), f"may not be locked by role {role}, as a copy without "
                             "replication connections does for a moment",
                             f'GRANT TRUNCATE ... TO "{role}" (or MAINTAIN, from PostgreSQL 17 on)'))  # fmt: skip
    if own_publication and foreign:
        found.append(Finding("error", named(foreign), f"not owned by role {role}, so it cannot publish them",
                             "run this as their owner, or exclude them in the setting `tables`"))  # fmt: skip
    if hidden:
        found.append(Finding("error", named(hidden), f"row-level security hides rows from role {role}",
                             f'ALTER ROLE "{role}" BYPASSRLS, or use the owner'))  # fmt: skip
    return found


def not_replicated(conn: psycopg.Connection[Any]) -> list[Finding]:
    """What logical replication does not carry, one finding a kind."""
    kinds: dict[str, list[str]] = {}
    for kind, name in conn.execute(_NOT_REPLICATED):
        kinds.setdefault(kind, []).append(name)
    return [Finding("info", kind, f"not replicated: {named(names)}") for kind, names in kinds.items()]


def named(names: Sequence[str]) -> str:
    """At most ten names, and how many more."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def matches_standby_names(setting: str, application: str) -> bool:
    """Whether a name in ``[FIRST | ANY n] (a, "b", *)`` matches ours or begins with it, ignoring case.

    Grammar of syncrep_gram.y; our connections' names are ``<application>/<part>``.
    """
    inner = re.fullmatch(r"(?is)\s*(?:(?:first|any)\s+)?\d+\s*\((.*)\)\s*", setting)
    listed = re.findall(r'"((?:[^"]|"")*)"|([^\s,"]+)', inner[1] if inner else setting)
    names = [(quoted.replace('""', '"') or plain).lower() for quoted, plain in listed]
    return "*" in names or any(name.startswith(application.lower()) for name in names)
