"""Delta commits to the log. Each commit is a compare-and-set: it fails unless the log is at the position that the
caller names. Segments and their file names are fsynced before the commit, and the commit is fsynced before
:meth:`LogWriter.commit` returns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from deltalake import Schema

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.formats import FORMAT, FORMAT_PROPERTY, check_format
from pgcdc_assets.core.layout import DELTA_LOG, Layout, Location, commit_name
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.commit import LEADER, fence, replace_files, settle
from pgcdc_assets.delta.datafile import FileReport, opened_parquet
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.delta.log import DeltaLog, DeltaVersion
from pgcdc_assets.delta.logfiles import (
    COMMIT,
    checkpoint_files,
    commits_among,
    file_names,
    left_above,
    put_aside,
    whole_commits,
)
from pgcdc_assets.errors import CommitLost, LakeError, LogConflict, LogCorrupt, SetupNeeded
from pgcdc_assets.log.segment import FILLED_SCHEMA, LOG_SCHEMA, OPTIONAL
from pgcdc_assets.store import storage

_PROPERTIES: Final = {
    "delta.appendOnly": "true",
    "delta.dataSkippingStatsColumns": "relation_id,commit_lsn,kind",
    "delta.autoOptimize.autoCompact": "false",
    "delta.checkpointInterval": "100",
    # One commit a second makes 86,400 commit files a day, and each checkpoint lists the folder. Old commit files can be
    # deleted soon, because the newest version contains all that we need.
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
ATTEMPTS: Final = 10
"""How many times a commit is attempted. An attempt fails if a compaction commits at the same time."""


def timeline_app_id(identity: Identity) -> str:
    """The id of the Delta app transaction whose version is the source's timeline at the newest commit."""
    return identity.app_id("timeline")


def start_app_id(identity: Identity) -> str:
    """The id of the Delta app transaction whose version is the LSN below which retention has deleted the log."""
    return identity.app_id("log_start")


def create_log(path: Location, identity: Identity, start: Lsn, timeline: int) -> None:
    """Create the log as an empty table at LSN ``start``. The table is durable when this returns."""
    passed(FaultPoint.LOG_MAKING)
    properties = {
        **_PROPERTIES,
        "pgcdc.system_identifier": identity.system_identifier,
        "pgcdc.database": identity.database,
        "pgcdc.database_oid": str(identity.database_oid),
        "pgcdc.slot": identity.slot,
        "pgcdc.start_lsn": str(start),
        FORMAT_PROPERTY: FORMAT,
    }
    positions = {identity.app_id(): int(start), timeline_app_id(identity): timeline}
    create_table(path, Schema.from_arrow(LOG_SCHEMA), properties, positions, path.parent.parent)
    passed(FaultPoint.LOG_MADE)


def newest_of(table: DeltaLog) -> DeltaVersion:
    """The log's newest version. Raises SetupNeeded if there is no log, LogCorrupt if it cannot be read, and
    UnknownFormat if it has another format."""
    try:
        version = table.newest()
    except LakeError as error:
        raise LogCorrupt(error.what, thing=error.thing or str(table.folder)) from None
    if version is None:
        raise SetupNeeded("does not exist", thing=f"change log {table.folder}", do="run `pgcdc sync`, which creates it")
    check_format(version.configuration.get(FORMAT_PROPERTY), f"change log {table.folder}")
    return version


def recover_log(path: Location) -> tuple[str, ...]:
    """Rename the commit and checkpoint files that a power cut left incomplete at the end of the Delta log, so that
    readers ignore them. Returns their old names. A position is confirmed to the source only after its Delta commit is
    durable, and no Delta commit begins before the previous Delta commit is durable. So the position of an incomplete
    commit was never confirmed, and the server sends the transactions of this commit again."""
    log = path / DELTA_LOG
    checkpoints = checkpoint_files(log)
    torn = [part for parts in checkpoints.values() for part in parts if not _readable(part)]
    base = max((number for number, parts in checkpoints.items() if not set(parts) & set(torn)), default=-1)
    names = file_names(log)
    numbers = commits_among(names)
    if base < 0 and (numbers or torn) and 0 not in numbers:
        # The beginning of the log is missing, or is an unreadable checkpoint. Opening the log reports this.
        return ()
    last = max(whole_commits(log, base), default=base)
    return put_aside(log, [*left_above(log, last, names), *torn])


def _readable(checkpoint: Location) -> bool:
    try:
        with opened_parquet(checkpoint) as file:
            file.read()
    except (OSError, pa.ArrowException):
        return False
    return True


class LogWriter:
    """Commits batches and new positions to the log. Used from one thread."""

    def __init__(self, path: Location, identity: Identity, leader: int | None = None) -> None:
        """``leader``: the log's :attr:`ChangeLog.leader`, as the sync read it while it held the lake's lease. If the
        log now has another leader, a process has taken over the lake since then, and this raises LogConflict."""
        self._path = path
        self._identity = identity
        # The list of files is not read, so that the receiver's memory does not grow with the log.
        self._table = DeltaLog(path, with_files=False)
        version = newest_of(self._table)
        self._leader = leader
        self._refuse_others(version)
        # An earlier process may have been killed between its last commit and the fsync of this commit. So fsync it now.
        storage.settle([path / DELTA_LOG / commit_name(version.number)])
        settle([path])

    @property
    def position(self) -> Lsn:
        return self._position(newest_of(self._table))

    def commit(self, start: Lsn, end: Lsn, timeline: int, files: Sequence[FileReport]) -> None:
        """Move the log's position from ``start`` to ``end`` by one Delta commit, which adds the files of one batch or
        no files. The files must be in the table's folder, with their content fsynced. Raises LogConflict, and commits
        nothing, if the log is not at ``start``, or if another process has taken over the lake."""
        if files:
            storage.settle([self._path])
        for _ in range(ATTEMPTS):
            version = newest_of(self._table)
            if (stands := self._position(version)) != start:
                raise LogConflict(f"ends at {stands}, but the batch to commit begins at {start}", thing=str(self._path))
            self._refuse_others(version)
            passed(FaultPoint.BATCH_COMMITTING)
            try:
                replace_files(version, (), files, self._positions(version, end, timeline), optional=OPTIONAL)
                break
            except CommitLost:
                continue
            except LakeError as error:
                raise LogCorrupt(error.what, thing=error.thing) from None
        else:
            raise LogConflict(
                "each attempt to commit failed, because another writer committed first",
                thing=str(self._path),
                lsn=start,
            )
        passed(FaultPoint.BATCH_COMMITTED)
        # If a compaction has committed just before, this also fsyncs the file name of its commit.
        settle([self._path])
        passed(FaultPoint.BATCH_DURABLE)

    def _refuse_others(self, version: DeltaVersion) -> None:
        if version.positions.get(LEADER) != self._leader:
            stands = self._position(version)
            raise LogConflict(
                "is now held by another writer, because this process did not renew its lease in time",
                thing=str(self._path),
                lsn=stands,
            )

    def _position(self, version: DeltaVersion) -> Lsn:
        return Lsn(version.positions.get(self._identity.app_id(), 0))

    def _positions(self, version: DeltaVersion, end: Lsn, timeline: int) -> dict[str, int]:
        moved = {self._identity.app_id(): int(end)}
        app_id = timeline_app_id(self._identity)
        return moved if version.positions.get(app_id) == timeline else {**moved, app_id: timeline}


def check_file(path: Location, size: int, rows: int) -> None:
    """Check a segment's size, number of rows and schema against the file and its Parquet footer. Raises LogCorrupt,
    which names the difference."""
    try:
        found = storage.head(path)
        with opened_parquet(path) as file:
            footer = file.metadata
    except (OSError, ValueError, pa.ArrowException) as error:
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(path)) from None
    if found is None or found.size != size:
        raise LogCorrupt(
            f"has {found.size if found else 0} bytes, but its Delta commit records {size}", thing=str(path)
        )
    if footer.num_rows != rows:
        raise LogCorrupt(f"has {footer.num_rows} rows, but its Delta commit records {rows}", thing=str(path))
    schema = footer.schema.to_arrow_schema()
    if not schema.equals(LOG_SCHEMA if OPTIONAL & set(schema.names) else FILLED_SCHEMA):
        raise LogCorrupt("does not have the columns of the change log", thing=str(path))


_log = logging.getLogger(__name__)


def shut_out(layout: Layout, leader: int) -> None:
    """Prevent later commits of a writer that has lost the lake's lease. Called by the new leader, which is the process
    that has taken over the lease. ``leader``, its number, is higher than the numbers of all earlier leaders.

    The old writer may have been suspended or cut off, and may not know that it has lost the lease. Its next commit to a
    table claims the number after the newest version that it has seen, and fails if a commit with that number exists. So
    the new leader makes an empty commit on each table, beginning with the change log, before it writes anything else.
    After a failed commit, the old writer checks who holds the lease, and stops. The old writer's receiver does not hold
    the lease, but finds the new leader's number in the log, and stops too.
    """
    tables = _newest(layout.root)
    _log.warning(
        "the process that last wrote to this lake did not release it; if it still runs, it can no longer commit to the "
        "lake's %d tables",
        len(tables),
    )
    for folder in sorted(tables, key=lambda folder: folder != layout.change_log):
        fence(folder, tables[folder], leader)


def _newest(root: Location) -> dict[Location, int]:
    """Maps each Delta table under ``root`` to its newest version."""
    found: dict[Location, int] = {}
    for entry in storage.walk(root, hidden=True):
        folder, _, name = entry.name.rpartition(f"/{DELTA_LOG}/")
        if folder and (commit := COMMIT.fullmatch(name)):
            table = root / folder
            found[table] = max(found.get(table, -1), int(commit[1]))
    return found
