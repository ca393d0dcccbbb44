"""Creates the replication slot, reads it by SQL, and checks whether the change log may continue from it. Also reads the
source's current WAL positions. On a standby, each of them is the replay position, and the WAL up to this position is
always flushed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Self

import psycopg

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import CopyBlocked, IdentityMismatch, LogAhead, SlotAhead, SlotLost, SlotMissing, SourceFailed
from pgcdc_assets.source.connect.failures import COPY_ANEW, NEW_LAKE
from pgcdc_assets.source.connect.silence import TELL_SECONDS
from pgcdc_assets.source.connect.walsender import CreatedSlot, ReplicationConnection
from pgcdc_assets.source.slot.blockers import OnWait, log_blockers, transactions

INSERT_LSN: Final = "(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)"
"""SQL: the end of the written WAL, flushed or not. It may include a page header that no record follows."""
FLUSH_LSN: Final = "(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)"
"""SQL: the end of the durable WAL. It may lie inside a record, but only at the end of a page (:data:`WITHIN`)."""
WAL_ENDS: Final = f"(SELECT {FLUSH_LSN} AS flushed, {INSERT_LSN} AS inserted) AS wal"
"""SQL, for a FROM clause: one row with both positions. Each is read once, and the flush position first. If a condition
read them several times, they could move between the condition and its result."""
WITHIN: Final = "(wal.flushed < wal.inserted AND (wal.flushed - '0/0') % current_setting('wal_block_size')::int8 = 0)"
"""SQL: whether the flush position of WAL_ENDS may lie inside a record. A commit flushes WAL up to the end of a record.
Without a commit, the WAL writer flushes only whole pages (XLogBackgroundFlush), and a page may end inside a record."""
_SHORT_HEADER: Final = 24
_LONG_HEADER: Final = 40
"""Bytes of the header of a page, and of the header of a segment file's first page (xlog_internal.h)."""
_SEGMENT: Final = "(SELECT setting::int8 FROM pg_catalog.pg_settings WHERE name = 'wal_segment_size')"
RECORD_END: Final = f"""
(wal.inserted - CASE WHEN (wal.inserted - '0/0') % {_SEGMENT} = {_LONG_HEADER} THEN {_LONG_HEADER}
  WHEN (wal.inserted - '0/0') % current_setting('wal_block_size')::int8 = {_SHORT_HEADER} THEN {_SHORT_HEADER}
  ELSE 0 END)
"""
"""SQL: the end of the last record before the insert position of WAL_ENDS. The flush position always reaches this LSN at
some time. It may never reach the insert position, which can lie after a page header that no record follows."""
PLUGIN = "pgoutput"
LOCK_SECONDS = 600
"""The lock_timeout of slot creation, in seconds. It applies to each transaction for which the creation waits. A nightly
report may take minutes. But a forgotten session must not keep the creation waiting for hours, because the unfinished
slot already retains WAL and dead rows."""
_ATTEMPTS = 3
_TOO_LARGE = "snapshot too large"
"""Part of 'initial slot snapshot too large': more subtransactions are open than a snapshot can list. They may end soon,
so the creation is tried again."""
# Rows are read as JSON, so that one query works on every version. Columns that a version lacks are absent.
_QUERY = f"""
SELECT to_jsonb(s), current_database()::text, age(s.catalog_xmin), age(s.xmin), pg_is_in_recovery(),
       {INSERT_LSN}::text,
       (SELECT to_jsonb(d) FROM pg_catalog.pg_stat_replication_slots d WHERE d.slot_name::text = s.slot_name::text)
FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %s
"""  # noqa: S608  (put together of our own constants)
_IDENTITY = """
SELECT s.system_identifier::text, d.datname::text, d.oid::int8
FROM pg_control_system() s, pg_catalog.pg_database d WHERE d.datname = current_database()
"""


def create_slot(
    connection: ReplicationConnection, conn: psycopg.Connection[Any], name: str, *, temporary: bool,
    two_phase: bool = False, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None,
) -> CreatedSlot:  # fmt: skip
    """Creates a pgoutput slot with an exported snapshot. The server first waits for all open transactions of the
    cluster. During this wait, ``on_wait`` is called every ten seconds with these transactions. After ``lock_seconds``,
    raises CopyBlocked, which names them. The snapshot is always exported, because otherwise servers older than the
    minor releases of August 2024 may let the slot begin inside a transaction."""
    connection.execute(f"SET lock_timeout = {int(lock_seconds * 1000):d}")
    tell = _Teller(conn, on_wait or log_blockers)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return connection.create_slot(name, temporary=temporary, two_phase=two_phase, waiting=tell)
        except CopyBlocked:
            names = ", ".join(str(holder) for holder in transactions(conn)) or "a transaction that has just ended"
            raise CopyBlocked(
                f"was not created within {lock_seconds:g} s, because PostgreSQL waits for all open transactions: "
                f"{names}",
                thing=f"slot {name}", do="end these transactions, then run the command again",
            ) from None  # fmt: skip
        except SourceFailed as error:
            if _TOO_LARGE not in error.what or attempt == _ATTEMPTS:
                raise
            time.sleep(attempt)
    raise AssertionError("unreachable")


class _Teller:
    """A function that is called every half second during the wait, and reports the blocking transactions every
    TELL_SECONDS."""

    def __init__(self, conn: psycopg.Connection[Any], on_wait: OnWait) -> None:
        self._conn = conn
        self._on_wait = on_wait
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= TELL_SECONDS:
            self._last = time.monotonic()
            self._on_wait(transactions(self._conn))


@dataclass(frozen=True)
class Decoded:
    """What the server has decoded for a slot since the slot's statistics were reset (pg_stat_replication_slots)."""

    total_txns: int = 0
    total_bytes: int = 0
    spill_txns: int = 0
    """Transactions larger than ``logical_decoding_work_mem``. The source wrote them to disk and read them again."""
    spill_bytes: int = 0
    stream_txns: int = 0
    """Transactions that were sent while they were in progress."""
    stream_bytes: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        return cls(**{one.name: int(row.get(one.name) or 0) for one in fields(cls)})


@dataclass(frozen=True)
class SlotStatus:
    """The row of a slot in pg_replication_slots. A field is None if it is NULL or the server's version lacks it."""

    name: str
    plugin: str | None
    database: str | None
    connected_to: str
    """The database of our connection. The slot decodes only its own database."""
    temporary: bool
    active: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    wal_lsn: Lsn
    """The server's insert position (a standby's replay position)."""
    wal_status: str | None
    safe_wal_size: int | None
    catalog_xmin_age: int | None
    xmin_age: int | None
    two_phase: bool | None
    conflicting: bool | None
    invalidation_reason: str | None
    inactive_since: datetime | None
    failover: bool | None
    synced: bool | None
    """Whether the slot is a standby's synchronized copy of a primary's slot. False after the standby's promotion, when
    PostgreSQL's column of this name may still be true."""
    decoded: Decoded = Decoded()

    @property
    def lost(self) -> str | None:
        """Why the slot can never be read again; None if it can be read."""
        if self.invalidation_reason:
            return self.invalidation_reason
        if self.conflicting:
            return "conflict with recovery"
        if self.wal_status == "lost" or (self.restart_lsn is None and not self.temporary):
            return "wal_removed"
        return None

    @property
    def thing(self) -> str:
        return f"slot {self.name}"


def slot_status(conn: psycopg.Connection[Any], slot: str) -> SlotStatus | None:
    """Returns the slot's current status; None if the server has no slot of this name."""
    found = conn.execute(_QUERY, [slot]).fetchone()
    if found is None:
        return None
    row, here, catalog_age, xmin_age, on_standby, wal_lsn, decoded = found
    if not on_standby and "synced" in row:
        row["synced"] = False
    since = row.get("inactive_since")
    ours = {
        "name": slot,
        "connected_to": here,
        "wal_lsn": Lsn.parse(wal_lsn),
        "catalog_xmin_age": catalog_age,
        "xmin_age": xmin_age,
        "decoded": Decoded.of(decoded or {}),
        "restart_lsn": _lsn(row.get("restart_lsn")),
        "confirmed_flush_lsn": _lsn(row.get("confirmed_flush_lsn")),
        "inactive_since": datetime.fromisoformat(since) if since else None,
    }
    return SlotStatus(**{field.name: row.get(field.name) for field in fields(SlotStatus)} | ours)


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def require_slot(conn: psycopg.Connection[Any], slot: str) -> SlotStatus:
    status = slot_status(conn, slot)
    if status is None:
        raise SlotMissing("does not exist", thing=f"slot {slot}", do=COPY_ANEW)
    return status


def usable_slot(conn: psycopg.Connection[Any], slot: str, *, two_phase: bool) -> SlotStatus:
    """Returns the slot's status, after all checks that do not need the change log. ``two_phase``: the setting, which
    must be the same as when the slot was created. Raises SlotMissing, IdentityMismatch or SlotLost."""
    status = require_slot(conn, slot)
    check_slot(status, None, two_phase=two_phase)
    return status


def check_slot(status: SlotStatus, transform_lsn: Lsn | None, *, two_phase: bool = False) -> None:
    """Checks that the slot can be read from ``transform_lsn`` on, the end of the change log (None: no log yet).

    ``two_phase``: the setting, which must be the same as when the slot was created. With two_phase, a prepared
    transaction is sent at PREPARE, otherwise at COMMIT PREPARED. So if the setting has changed, a prepared transaction
    may arrive twice or never. Read ``status`` while our walsender holds the slot, because no other process can then
    confirm a position above the log's end. Raises IdentityMismatch, SlotLost, SlotAhead or LogAhead.
    """
    _check_kind(status, two_phase)
    if status.lost:
        raise SlotLost(
            f"was invalidated ({status.lost}): PostgreSQL can no longer send its changes", thing=status.thing,
            do=COPY_ANEW,
        )  # fmt: skip
    if transform_lsn is None:
        return
    if status.confirmed_flush_lsn is not None and status.confirmed_flush_lsn > transform_lsn:
        raise SlotAhead(
            f"was confirmed up to {status.confirmed_flush_lsn}, but the change log ends at {transform_lsn}: "
            "the changes between these LSNs are lost", thing=status.thing, do=COPY_ANEW,
        )  # fmt: skip
    if transform_lsn > status.wal_lsn:
        raise LogAhead(
            f"ends at {transform_lsn}, ahead of the source's WAL at {status.wal_lsn}: "
            "the source was restored to an earlier time", thing="change log", do=NEW_LAKE,
        )  # fmt: skip


def _check_kind(status: SlotStatus, two_phase: bool) -> None:
    if status.plugin != PLUGIN:
        raise IdentityMismatch(
            f"has the output plugin {status.plugin or 'none (it is a physical slot)'}, but pgcdc needs {PLUGIN}",
            thing=status.thing, do="choose another name in the setting `slot`",
        )  # fmt: skip
    if status.database != status.connected_to:
        raise IdentityMismatch(
            f"belongs to database {status.database}, not to {status.connected_to}",
            thing=status.thing, do="choose another name in the setting `slot`",
        )  # fmt: skip
    if bool(status.two_phase) != two_phase:
        raise IdentityMismatch(
            f"was created {'with' if status.two_phase else 'without'} two_phase, but the setting "
            f"`two_phase` is {str(two_phase).lower()}", thing=status.thing,
            do=f"set `two_phase` to {str(not two_phase).lower()}, or choose another name in the setting `slot`",
        )  # fmt: skip
    if status.synced:
        raise IdentityMismatch(
            "is a standby's copy of a slot of the primary, and can be read only after the standby is promoted",
            thing=status.thing, do="set `source` to the primary",
        )  # fmt: skip


def identity(conn: psycopg.Connection[Any], slot: str) -> Identity:
    """Returns the identity of the slot's stream: system identifier, database and slot."""
    ((system_identifier, database, oid),) = conn.execute(_IDENTITY)
    return Identity(system_identifier, database, slot, oid)


# Positions of the source's WAL ------------------------------------------------------------------


def flush_lsn(conn: psycopg.Connection[Any]) -> Lsn:
    """Returns the source's flush position, which is the end of the durable WAL."""
    return Lsn.parse(_row(conn, f"SELECT {FLUSH_LSN}::text")[0])


def boundary(conn: psycopg.Connection[Any]) -> Lsn:
    """Returns an LSN at which a range of the change log may end, because no record crosses it. This is the flush
    position or, if the flush position may lie inside a record, the end of the last written record."""
    found = f"SELECT (CASE WHEN {WITHIN} THEN {RECORD_END} ELSE wal.flushed END)::text FROM {WAL_ENDS}"  # noqa: S608
    return Lsn.parse(_row(conn, found)[0])


class SourceClock:
    """Reads the source's positions on an SQL connection, while the replication connection is busy with the stream."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn

    @cached_property
    def wal_writer_delay(self) -> float:
        """The setting wal_writer_delay in seconds."""
        query = "SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_writer_delay'"
        return float(_row(self._conn, query)[0])

    def positions(self) -> tuple[Lsn, Lsn]:
        """Returns the current insert position and flush position."""
        inserted, flushed = _row(self._conn, f"SELECT {INSERT_LSN}::text, {FLUSH_LSN}::text")
        return Lsn.parse(inserted), Lsn.parse(flushed)


def _row(conn: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    (row,) = conn.execute(query.encode())
    return tuple(row)
