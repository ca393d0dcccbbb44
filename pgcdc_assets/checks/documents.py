"""The JSON documents of commands with ``--json``. The functions that write the documents return these types, and the
schemas in ``docs/json/`` are made from these types. The types for ``verify`` and ``positions`` are in the modules
``report`` and ``positions``.

A program that reads a document must ignore fields that it does not know: later versions may add fields. A field is
removed, or gets another meaning, only with a new major version. LSNs are texts like ``0/16B3748``. Times are ISO 8601
in UTC.
"""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict  # pydantic needs it before Python 3.12, to make the schemas


class DecodedDocument(TypedDict):
    """What the source has decoded for the slot since the slot's statistics were last reset."""

    total_txns: int
    """Decoded transactions."""
    total_bytes: int
    """Bytes of the changes of these transactions."""
    spill_txns: int
    """Transactions whose changes the source wrote to its disk, because they exceeded its memory limit."""
    spill_bytes: int
    """Bytes of the changes that were written to disk."""
    stream_txns: int
    """Transactions that were sent while they were in progress."""
    stream_bytes: int
    """Bytes of the changes that were sent while their transaction was in progress."""


class SlotDocument(TypedDict):
    """The row of the slot in ``pg_replication_slots``. A field is null if the server's version lacks it."""

    name: str
    """The slot, as the setting ``slot`` names it."""
    plugin: str | None
    """The output plugin. Always ``pgoutput`` for a slot of pgcdc."""
    database: str | None
    """The database that the slot decodes."""
    active: bool
    """Whether a process reads the slot."""
    active_pid: int | None
    """The server process that reads the slot."""
    restart_lsn: str | None
    """The server keeps the WAL above this LSN for the slot."""
    confirmed_flush_lsn: str | None
    """The LSN up to which pgcdc has confirmed that changes are durable."""
    wal_status: str | None
    """``reserved``, ``extended``, ``unreserved`` or ``lost``."""
    safe_wal_size: int | None
    """Bytes of WAL that the source may still write before it may invalidate the slot."""
    catalog_xmin_age: int | None
    """Age of ``catalog_xmin`` in transactions. VACUUM must keep catalog rows that younger transactions deleted."""
    xmin_age: int | None
    """Age of ``xmin`` in transactions. VACUUM must keep rows that younger transactions deleted."""
    two_phase: bool | None
    """Whether the slot decodes prepared transactions before they are committed."""
    conflicting: bool | None
    """On a standby: whether the slot was invalidated by a conflict with recovery."""
    invalidation_reason: str | None
    """Why the server invalidated the slot. Null if it is valid."""
    inactive_since: str | None
    """The time since which no process has read the slot."""
    failover: bool | None
    """Whether the server synchronizes the slot to standbys."""
    synced: bool | None
    """Whether this is a standby's copy of a slot."""
    decoded: DecodedDocument


class NoSlotDocument(TypedDict):
    """There is no slot, or the source cannot be reached."""


class OldestDocument(TypedDict):
    """The oldest transaction in progress."""

    xid: int
    """The transaction's ID."""
    lsn: str
    """The LSN at which the first received part of the transaction begins."""
    age_seconds: float
    """Time since the first part of the transaction was received."""


class InProgressDocument(TypedDict):
    """Transactions that have not ended, and of which the receiver has already received a part."""

    transactions: int
    """The number of these transactions."""
    bytes: int
    """Size of the messages of these transactions in the lake."""
    oldest: OldestDocument


class PreparedDocument(TypedDict):
    """A prepared transaction that the lake keeps until COMMIT PREPARED or ROLLBACK PREPARED."""

    gid: str
    """The global transaction identifier that PREPARE TRANSACTION gave."""
    xid: int
    """The transaction's ID."""
    lsn: str
    """The end of the WAL record of PREPARE TRANSACTION."""
    prepared: str
    """When the transaction was prepared."""
    changes: int
    """The number of row changes in the transaction."""


class HoldDocument(TypedDict):
    """A running ``verify`` that has asked the sync for a consistent point at the LSN of its snapshot."""

    by: str
    """The process that runs ``verify``."""
    lsn: str | None
    """The LSN of the snapshot. Null until ``verify`` has taken the snapshot on the source."""


class MessagesDocument(TypedDict):
    """The state of the feed of logical messages. Absent if the setting ``messages`` is not set."""

    replay_lsn: str | None
    """The feed holds all messages at or below this LSN."""
    reason: str | None
    """Why the feed cannot be read."""


class TableDocument(TypedDict):
    """A mirrored table."""

    name: str
    """Schema and name, like ``public.orders``."""
    state: str
    """``waiting``, ``copying``, ``catching_up``, ``streaming`` or ``set_aside``."""
    replay_lsn: str | None
    """The mirror holds all transactions that end at or below this LSN."""
    lag_bytes: int | None
    """Bytes of the source's WAL above ``replay_lsn``, with the changes of all tables."""
    lag_seconds: float | None
    """Age of the oldest transaction that the mirror lacks, or 0. If no sync runs, time since changes were last
    received: the real lag may be smaller. Null if not known."""
    reason: str | None
    """Why the table waits or was set aside, or how its mirror differs from the source."""


class ProblemDocument(TypedDict):
    """A problem. ``code`` is stable; the words are for people."""

    severity: str
    """``error`` or ``warning``."""
    code: str
    """One of the codes on the page Errors."""
    what: str
    """What is wrong, and with which object."""
    do: str
    """What to do."""


class FailureDocument(TypedDict):
    """The error that ended an operation."""

    command: str
    """The command that failed, like ``sync``."""
    at: str
    """When the command failed."""
    what: str
    """What happened."""
    thing: str | None
    """The object concerned."""
    lsn: str | None
    """The LSN concerned."""
    do: str
    """What to do."""


class UnderWayDocument(TypedDict):
    """An operation that has begun and not ended."""

    command: str
    """The command that runs, like ``sync``."""
    pid: int
    """The command's process."""
    began: str
    """When the command began."""


class OutcomeDocument(TypedDict):
    """How the last operation of one kind ended."""

    succeeded_at: str | None
    """The end of the last success. For ``follow``: when the mirrors last contained the whole change log."""
    failed: FailureDocument | None
    """The last failure after ``succeeded_at``. Null if there was none."""
    under_way: UnderWayDocument | None


class StatusDocument(TypedDict):
    """What ``pgcdc status --json`` prints."""

    ok: bool
    """Whether there is no problem of severity ``error``. The exit code is then 0, otherwise 1."""
    time: str
    """When the status was read."""
    version: str
    """The version of pgcdc_assets."""
    slot: SlotDocument | NoSlotDocument
    at_work: str | None
    """The process that writes to the lake."""
    transform_lsn: str | None
    """All transactions that end at or below this LSN are durable in the change log."""
    replay_lsn: str | None
    """The lowest ``replay_lsn`` of the followed tables."""
    lag_bytes: int | None
    """Bytes of the source's WAL above ``replay_lsn``."""
    lag_seconds: float | None
    """The largest ``lag_seconds`` of the followed tables."""
    in_progress: InProgressDocument | None
    prepared: list[PreparedDocument]
    hold: HoldDocument | None
    tables: list[TableDocument]
    problems: list[ProblemDocument]
    """What is wrong, errors first."""
    last: dict[str, OutcomeDocument]
    """How the last operation of each kind ended. Kinds: ``sync``, ``repair``, ``backfill``, ``maintenance``,
    ``forgetting``."""
    messages: NotRequired[MessagesDocument]


class CopiedDocument(TypedDict):
    """A table that the run copied."""

    name: str
    """Schema and name."""
    consistent_point: str
    """The copy has the rows as they were at this LSN."""
    rows: int
    """Copied rows."""


class SetAsideDocument(TypedDict):
    """A table that is set aside, or is behind the other tables."""

    name: str
    """Schema and name."""
    reason: str
    """Why the table is set aside, or is behind the other tables."""


class ChangedDocument(TypedDict):
    """A table in whose mirror another writer changed rows."""

    name: str
    """Schema and name."""
    what: str
    """How the other writer changed the mirror's rows."""


class SyncDocument(TypedDict):
    """What ``pgcdc sync --json`` prints."""

    ok: bool
    """Whether ``set_aside``, ``changed`` and ``left`` are empty. The exit code is then 0, otherwise 3."""
    start_lsn: str
    """The lowest ``replay_lsn`` of the mirrors at the run's start."""
    replay_lsn: str
    """The lowest ``replay_lsn`` of the mirrors at the run's end."""
    transform_lsn: str
    """The end of the change log."""
    copied: list[CopiedDocument]
    turns: int
    """How many times new changes were applied to the mirrors."""
    transactions: int
    """Applied transactions."""
    rows: int
    """Row changes of these transactions."""
    stream_aborts: int
    """Stream Abort messages, ignored because the server had sent nothing of these transactions."""
    seconds: float
    """Duration of the run."""
    set_aside: list[SetAsideDocument]
    """Tables that are set aside: their mirrors are no longer updated."""
    changed: list[ChangedDocument]
    """Tables whose mirrors another writer changed."""
    left: list[SetAsideDocument]
    """Tables that wait for a copy, or that no consistent point lists yet."""


class FindingDocument(TypedDict):
    """What ``setup`` found on the source, or on this machine."""

    severity: str
    """``warning`` or ``info``."""
    thing: str
    """The object concerned."""
    what: str
    """What was found."""
    do: str
    """What to do. Empty if nothing must be done."""


class SetupDocument(TypedDict):
    """What ``pgcdc setup --json`` prints."""

    ok: bool
    """Always true. If the source is not ready, the errors go to stderr, and the exit code is 1."""
    created: list[str]
    """What was created on the source, like ``slot pgcdc``."""
    tables: list[str]
    """The published tables."""
    copy_bytes: int
    """Bytes on the source's disk that a copy of all tables reads."""
    findings: list[FindingDocument]


class MirrorFailureDocument(TypedDict):
    """A mirror that could not be maintained."""

    name: str
    """Schema and name of the table."""
    error: str
    """What happened, and what to do."""


class MaintainDocument(TypedDict):
    """What ``pgcdc maintain --json`` prints."""

    ok: bool
    """Whether no mirror failed. The exit code is then 0, otherwise 1."""
    log_start: str
    """The LSN at which the change log begins after the maintenance."""
    oldest_point: str | None
    """The lowest LSN that ``Lake.at`` can read."""
    log_files: int
    """Deleted files of the change log."""
    feed_files: int
    """Files of change feeds that were deleted, or replaced by a merged file."""
    points: int
    """Deleted consistent points."""
    optimized: list[str]
    """Tables whose small files were merged."""
    vacuumed: list[str]
    """Tables whose mirrors had unneeded files, which were deleted."""
    deleted_files: int
    """Deleted files of mirrors."""
    deleted_bytes: int
    """Size of the deleted files of mirrors."""
    runs: int
    """Deleted runs of Dagster."""
    left: list[str]
    """Tables that this maintenance did not reach. The next maintenance handles them."""
    failed: list[MirrorFailureDocument]
    seconds: float
    """Duration of the maintenance."""
