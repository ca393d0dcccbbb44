"""Writes Delta commits to the tables of the lake. delta-rs cannot write deletion vectors, and lists the log again for
each commit.

A commit is one JSON file in the table's log, as Delta's protocol defines. It is created completely or not at all, and
never under a number that another writer has already used.

The content of each file is durable before a commit names the file. Tasks make the content of their data files durable,
this module the content of deletion vectors and commits. The names of the files become durable later, when
:func:`settle` syncs the folders of several tables together.
https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from pyroaring import BitMap64

from pgcdc_assets.core.layout import DELTA_LOG, Location, commit_name
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.datafile import FileReport, check_files
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.delta.logfiles import ACTIONS, ENGINE, Action
from pgcdc_assets.delta.vectors import Descriptor, read_vector, write_vectors
from pgcdc_assets.errors import CommitLost, LakeError
from pgcdc_assets.store import storage

FEATURES: Final = frozenset({
    "appendOnly", "changeDataFeed", "columnMapping", "deletionVectors", "domainMetadata", "invariants", "timestampNtz",
    "typeWidening", "variantType",
})  # fmt: skip
"""The table features that our commits support. A table that requires another feature is not written."""
_TIGHT: Final = re.compile(r'"tightBounds"\s*:\s*(?:true|false)')
_CHECKPOINT_EVERY: Final = 10
"""The number of commits between checkpoints if the table has no property for it. This is Delta's default."""

LEADER: Final = "pgcdc/leader"
"""The application id under which :func:`fence` stores the number of the writer that has taken over the table."""

Mode = Literal["append", "overwrite"]


@dataclass(frozen=True)
class FileChange:
    """The changes of a commit: the files that it adds, and the positions of the rows that it deletes, by the path of
    their file."""

    added: Sequence[FileReport]
    gone: Mapping[str, BitMap64]


def commit_files(table: DeltaVersion, files: Sequence[FileReport], mode: Mode, positions: Mapping[str, int]) -> int:
    """Add the files to the table, or with ``overwrite`` replace all its files, by one commit directly after version
    ``table``. Returns the new version. ``positions``: new versions of Delta app transactions, by application id.

    Raises CommitLost if another writer has committed after version ``table``. Raises LakeError if the table has already
    reached one of the positions, or if a file differs from its report or does not fit the table's columns."""
    _check_passed(table, mode, positions)
    return replace_files(table, table.files if mode == "overwrite" else (), files, positions)


def replace_files(
    table: DeltaVersion, gone: Sequence[Added], files: Sequence[FileReport], positions: Mapping[str, int],
    *, changes: bool = True, optional: Collection[str] = (),
) -> int:  # fmt: skip
    """Like :func:`commit_files`, but removes the files ``gone``, and does not check whether positions rise. Without
    ``changes``, the commit states that no row changes. Files may lack ``optional`` columns, which are then NULL."""
    refuse_features(table)
    now = now_ms()
    metrics = {"numRemovedFiles": len(gone), "numAddedFiles": len(files)}
    info = commit_info(now, "WRITE" if changes else "OPTIMIZE", metrics)
    removed = [{"remove": removal(file, now, changes=changes)} for file in gone]
    return _commit(table, info, positions, removed, files, changes=changes, optional=optional)


def commit_change(
    table: DeltaVersion, change: FileChange, positions: Mapping[str, int], metrics: Mapping[str, int],
    properties: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Commit deleted rows and added files directly after version ``table``. Returns the new version. ``positions`` and
    errors: see :func:`commit_files`. ``metrics``: counts for the table's history. ``properties``: table properties that
    change in the same commit."""
    refuse_features(table, vectors=True)
    _check_passed(table, "append", positions)
    now = now_ms()
    configuration = {**table.configuration, **(properties or {})}
    told = [{"metaData": {**table.metadata, "configuration": configuration}}] if properties else []
    replaced = [*told, *_replaced(table, change.gone, now)]
    return _commit(table, commit_info(now, "MERGE", metrics), positions, replaced, change.added)


def commit_rewritten(table: DeltaVersion, files: Sequence[Added], reports: Sequence[FileReport]) -> int:
    """Replace files by new files that contain the same live rows. Returns the new version. Raises LakeError if the
    numbers of rows differ."""
    left = sum((file.rows or 0) - file.deleted for file in files)
    written = sum(report.rows for report in reports)
    if written != left:
        raise LakeError(
            f"has {left} rows to write to new files, but the new files have {written} rows",
            thing=str(table.folder),
        )
    return replace_files(table, files, reports, {}, changes=False)


def _commit(
    table: DeltaVersion, info: Action, positions: Mapping[str, int], replaced: Sequence[Action],
    files: Sequence[FileReport], *, changes: bool = True, optional: Collection[str] = (),
) -> int:  # fmt: skip
    check_files(table.folder, files, table.schema, optional)
    now = info["timestamp"]
    actions = [
        {"commitInfo": info},
        *transactions(positions, now),
        *replaced,
        *({"add": addition(report, now, changes=changes)} for report in files),
    ]
    return append_commit(table, actions)


def append_commit(table: DeltaVersion, actions: Sequence[Action]) -> int:
    """Write a commit with these actions directly after version ``table``, then a checkpoint if the property
    ``delta.checkpointInterval`` requires it. Returns the new version."""
    version = table.number + 1
    put_commit(table.folder / DELTA_LOG, version, actions)
    if version % int(table.configuration.get("delta.checkpointInterval", _CHECKPOINT_EVERY)) == 0:
        make_checkpoint(table.folder, version)
    return version


def put_commit(log: Location, version: int, actions: Sequence[Action]) -> None:
    """Write commit number ``version`` with these actions, of which the first must be ``commitInfo``. Raises CommitLost
    if a commit with this number exists. The content is durable when this returns; the name is durable after a sync of
    the log's folder. Each commit gets a unique id: if the answer of an object store is lost, the store reads the file
    to see whether it is this commit."""
    actions[0]["commitInfo"] |= {ACTIONS: len(actions), "txnId": str(uuid.uuid4())}
    try:
        storage.create(log / commit_name(version), "".join(json.dumps(action) + "\n" for action in actions).encode())
    except FileExistsError:
        raise CommitLost("another writer committed at the same time", thing=str(log.parent),
                         do="run the command again, and let only one process write to the lake") from None  # fmt: skip


def fence(folder: Location, version: int, leader: int) -> None:
    """Take the next free commit number with a commit that changes nothing. An old writer, which has lost its lease and
    does not know it yet, then cannot commit under this number. ``version``: the newest version that the caller knows.
    If the old writer has committed since then, the next higher number is taken. ``leader``: the number of the new
    writer, which the commit records."""
    while True:
        version += 1
        with suppress(CommitLost):
            now = now_ms()
            actions = [{"commitInfo": commit_info(now, "FENCE", {})}, *transactions({LEADER: leader}, now)]
            put_commit(folder / DELTA_LOG, version, actions)
            return


def transactions(positions: Mapping[str, int], now: int) -> list[Action]:
    return [{"txn": {"appId": app, "version": int(at), "lastUpdated": now}} for app, at in positions.items()]


def _check_passed(table: DeltaVersion, mode: Mode, positions: Mapping[str, int]) -> None:
    """Raise LakeError if a position would become lower, or if an append would leave it the same."""
    for app_id, version in positions.items():
        stands = table.positions.get(app_id)
        if stands is not None and (stands > version or (stands == version and mode == "append")):
            raise LakeError(
                f"already records {stands} for app id {app_id}, and a commit may only raise it, not record {version}",
                thing=str(table.folder),
            )


def now_ms() -> int:
    return int(time.time() * 1000)


def _replaced(table: DeltaVersion, gone: Mapping[str, BitMap64], now: int) -> list[Action]:
    """Make the actions for deleted rows. Each affected file is removed. If it still has live rows, it is added again
    with a larger deletion vector."""
    path = table.folder
    changed = [(file, _larger(path, file, gone[file.path])) for file in table.files if file.path in gone]
    if len(changed) != len(gone):
        raise LakeError("a commit would delete rows of a file that is not part of the table", thing=str(path))
    left = [(file, vector) for file, vector in changed if file.rows is None or len(vector) < file.rows]
    descriptors = write_vectors(path, [vector for _, vector in left]) if left else []
    actions: list[Action] = [{"remove": removal(file, now)} for file, _ in changed]
    for (file, _), descriptor in zip(left, descriptors, strict=True):
        actions.append({"add": _with_vector(file, descriptor)})
    return actions


def _larger(folder: Location, file: Added, gone: BitMap64) -> BitMap64:
    vector = file.action.get("deletionVector")
    before = BitMap64() if vector is None else read_vector(folder, vector)
    if not before.isdisjoint(gone):
        raise LakeError("a commit would delete rows that are already deleted", thing=str(folder / file.path))
    return before | gone


def removal(file: Added, now: int, *, changes: bool = True) -> Action:
    vector = file.action.get("deletionVector")
    told = {name: file.action.get(name) for name in ("path", "partitionValues", "size", "tags")}
    return {
        **{name: value for name, value in told.items() if value is not None},
        "deletionTimestamp": now,
        "dataChange": changes,
        "extendedFileMetadata": True,
        **({} if vector is None else {"deletionVector": vector}),
    }


def _with_vector(file: Added, vector: Descriptor) -> Action:
    kept = {name: value for name, value in file.action.items() if value is not None}
    stats = loosened(file.action.get("stats") or "{}")
    return {**kept, "dataChange": True, "stats": stats, "deletionVector": vector}


def loosened(stats: str) -> str:
    """Mark the bounds in a file's statistics (JSON) as not tight, because the file has lost rows. The JSON is edited as
    text. If it were parsed, a decimal bound would become a float with another value, and readers would skip rows."""
    text, told = _TIGHT.subn('"tightBounds":false', stats)
    if told:
        return text
    body = stats.rstrip().removesuffix("}")
    return f'{body}{"" if body.strip() == "{" else ","}"tightBounds":false}}'


def addition(report: FileReport, now: int, *, changes: bool = True) -> Action:
    return {
        "path": report.path, "partitionValues": {}, "size": report.size, "modificationTime": now,
        "dataChange": changes, "stats": report.stats, **({"tags": dict(report.tags)} if report.tags else {}),
    }  # fmt: skip


def commit_info(now: int, operation: str, metrics: Mapping[str, int]) -> Action:
    return {
        "timestamp": now, "operation": operation, "operationParameters": {}, "isBlindAppend": False,
        "operationMetrics": {name: str(value) for name, value in metrics.items()}, "engineInfo": ENGINE,
    }  # fmt: skip


def refuse_features(table: DeltaVersion, *, vectors: bool = False) -> None:
    """Raise LakeError if our commits do not support all features that the table's protocol requires."""
    reason = unfit(table, vectors=vectors)
    if reason is not None:
        raise LakeError(reason, thing=f"Delta table {table.folder}",
                        do="drop the feature (ALTER TABLE ... DROP FEATURE), or move the Delta table away "
                           "and copy the source table again")  # fmt: skip


def unfit(table: DeltaVersion, *, vectors: bool = True) -> str | None:
    """Why our commits cannot write to this table, because of its features, as text; None if they can. ``vectors``:
    whether the commit may need deletion vectors."""
    odd = sorted(table.features - FEATURES)
    if odd:
        return f"has a table feature that pgcdc cannot write: {', '.join(odd)}"
    return (
        "no longer has the table feature deletionVectors, which pgcdc needs"
        if vectors and "deletionVectors" not in table.features
        else None
    )


def settle(folders: Iterable[Location]) -> None:
    """Make the names of our commits and files in these tables' folders durable. Their content is already durable."""
    storage.settle([place for folder in folders for place in (folder, folder / DELTA_LOG)])
