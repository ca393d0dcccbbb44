"""Commits to the log: compare-and-set, and on disk before anybody is told.

Neither pyarrow nor delta-rs syncs anything, and delta-rs checks neither transaction versions nor
files. So: segments and their folder are fsynced before the commit, the commit's file and folder
before :meth:`LogWriter.commit` returns; the position must be where the caller thinks it is on the
very handle that commits; and each file is compared with what it claims to be. delta-rs would also
clean up behind a checkpoint that is not on disk: checkpoints are made here, synced, and then cleaned up behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.durable import sync_file, sync_folder
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import DELTA_LOG, LAST_CHECKPOINT, checkpoint_name, commit_name
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.logfiles import ACTIONS
from pgcdc_assets.errors import LogConflict, LogCorrupt
from pgcdc_assets.log.segment import LOG_SCHEMA, SegmentFile

_PROPERTIES = {
    "delta.appendOnly": "true",
    "delta.dataSkippingStatsColumns": "batch_end,relation_id,commit_lsn,kind",
    "delta.autoOptimize.autoCompact": "false",
    # One commit a second makes 86,400 files a day, and each commit lists them; nothing that we need lives in
    # commits alone.
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}

BARE = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""A commit that makes no checkpoint and deletes nothing."""
CHECKPOINT_EVERY = 100
"""Commits."""


def timeline_app_id(identity: Identity) -> str:
    """The app transaction whose version is the timeline of the newest commit."""
    return identity.app_id("timeline")


def start_app_id(identity: Identity) -> str:
    """The app transaction whose version is where the log was cut off by retention."""
    return identity.app_id("log_start")


def create_log(path: Path, identity: Identity, start: Lsn, timeline: int) -> None:
    """Make the empty table, standing at ``start``; durable when this returns."""
    # There already where a process died right here.
    path.mkdir(parents=True, exist_ok=True)
    passed(FaultPoint.LOG_MAKING)
    DeltaTable.create(
        path,
        LOG_SCHEMA,
        configuration={
            **_PROPERTIES,
            "pgcdc.system_identifier": identity.system_identifier,
            "pgcdc.database": identity.database,
            "pgcdc.slot": identity.slot,
            "pgcdc.start_lsn": str(start),
            "pgcdc.format": "1",
        },
        raise_if_key_not_exists=False,
        commit_properties=counted(_transactions(identity, start, timeline), 2),
    )
    passed(FaultPoint.LOG_MADE)
    sync_commits(path, 0, 0)
    for folder in (path, *path.parents[:3]):
        sync_folder(folder)


class LogWriter:
    """The one handle that commits. Used from one thread."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path = path
        self._identity = identity
        self._table = DeltaTable(path)
        # A process killed between its commit and the fsync left its last commit to us.
        self._durable = self._table.version()
        sync_commits(path, self._durable, self._durable)
        self._checkpoint = _hinted(path)

    @property
    def position(self) -> Lsn:
        return Lsn(self._table.transaction_version(self._identity.app_id()) or 0)

    def commit(self, start: Lsn, end: Lsn, timeline: int, files: Sequence[SegmentFile]) -> None:
        """Move the log from ``start`` to ``end`` with the files of one batch, or with none.

        The files lie in the table's folder, fsynced. Raises LogConflict if the log is not at
        ``start`` (another writer); nothing is committed then.
        """
        if files:
            for file in files:
                check_file(self._path / file.path, file)
            sync_folder(self._path)
        self._table.update_incremental()
        if self.position != start:
            raise LogConflict(
                f"stands at {self.position}, not at {start} where this batch begins", thing=str(self._path)
            )
        passed(FaultPoint.BATCH_COMMITTING)
        try:
            self._table.create_write_transaction(
                [add_action(file) for file in files], "append", LOG_SCHEMA, post_commithook_properties=BARE,
                commit_properties=counted(_transactions(self._identity, end, timeline), len(files)),
            )  # fmt: skip
        except CommitFailedError as error:
            raise LogConflict(f"another writer committed: {error}", thing=str(self._path), lsn=start) from None
        passed(FaultPoint.BATCH_COMMITTED)
        self._table.update_incremental()
        # Also what a compaction committed meanwhile and may not have synced yet: this commit stands on it.
        version = self._table.version()
        sync_commits(self._path, self._durable + 1, version)
        self._durable = version
        passed(FaultPoint.BATCH_DURABLE)
        if version - self._checkpoint >= CHECKPOINT_EVERY:
            make_checkpoint(self._path, self._table)
            self._checkpoint = version


def check_file(path: Path, file: SegmentFile) -> None:
    """Size, rows and schema against the file's own footer; LogCorrupt names what differs."""
    try:
        size = path.stat().st_size
        footer = pq.read_metadata(path)
    except (OSError, ValueError) as error:
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(path)) from None
    if size != file.size:
        raise LogCorrupt(f"has {size} bytes instead of {file.size}", thing=str(path))
    if footer.num_rows != file.rows:
        raise LogCorrupt(f"has {footer.num_rows} rows instead of {file.rows}", thing=str(path))
    if not footer.schema.to_arrow_schema().equals(LOG_SCHEMA):
        raise LogCorrupt("has other columns than the log", thing=str(path))


def add_action(file: SegmentFile, *, data_change: bool = True) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=data_change,
        stats=json.dumps(file.stats),
    )


def _transactions(identity: Identity, position: Lsn, timeline: int) -> list[Transaction]:
    return [Transaction(identity.app_id(), int(position)), Transaction(timeline_app_id(identity), timeline)]


def counted(transactions: Sequence[Transaction], others: int) -> CommitProperties:
    """Write into the commit how many actions it has, so that one that was cut short is known from a whole one."""
    count = 1 + len(transactions) + others
    return CommitProperties(custom_metadata={ACTIONS: str(count)}, app_transactions=list(transactions))


def make_checkpoint(path: Path, table: DeltaTable) -> None:
    """Make a durable checkpoint of the table, then delete the commits before it."""
    folder = path / DELTA_LOG
    table.create_checkpoint()
    sync_file(folder / checkpoint_name(table.version()))
    with suppress(FileNotFoundError):
        sync_file(folder / LAST_CHECKPOINT)
    sync_folder(folder)
    table.cleanup_metadata()


def sync_commits(path: Path, first: int, last: int) -> None:
    """fsync the commits ``first`` to ``last`` and their folder."""
    folder = path / DELTA_LOG
    for version in range(first, last + 1):
        sync_file(folder / commit_name(version))
    sync_folder(folder)


def _hinted(path: Path) -> int:
    """The version of the last checkpoint according to the hint file; 0 where there is no hint."""
    try:
        return int(json.loads((path / DELTA_LOG / LAST_CHECKPOINT).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0
