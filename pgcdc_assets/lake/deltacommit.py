"""Commits that take rows away from a mirror by deletion vectors: delta-rs cannot write these.

One JSON file in the table's log, as the protocol has it, made whole and then linked under its number: a
number that another writer took is never taken twice.
https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deltalake import DeltaTable
from pyroaring import BitMap64

from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.files import FileReport, check_files, check_passed
from pgcdc_assets.lake.references import Added
from pgcdc_assets.lake.vectors import Descriptor, read_vector, write_vectors

FEATURES: Final = frozenset({
    "appendOnly", "changeDataFeed", "columnMapping", "deletionVectors", "domainMetadata", "invariants", "timestampNtz",
})  # fmt: skip
"""Writer features that ask nothing more of these commits."""
_TIGHT: Final = re.compile(r'"tightBounds"\s*:\s*(?:true|false)')
CHECKPOINT_EVERY: Final = 10
"""Commits, as Delta has it: what an apply reads of the log stays short."""


@dataclass(frozen=True)
class Change:
    """What a commit does to a table: files that come, and by file of ``live`` the rows that go."""

    live: Sequence[Added]
    """The table's files in the version that the change was made for."""
    added: Sequence[FileReport]
    gone: Mapping[str, BitMap64]


def commit_change(table: DeltaTable, path: Path, change: Change, transactions: Mapping[str, int],
                  metrics: Mapping[str, int]) -> int:  # fmt: skip
    """Commit on top of the version that ``table`` was opened at; returns the new version.

    ``transactions`` are as for :func:`pgcdc_assets.lake.files.commit`, and so is what is refused;
    ``metrics`` go into the history. Nobody sees the change before it is whole.
    """
    refuse_features(table, path, vectors=True)
    check_passed(table, path, "append", dict(transactions))
    check_files(path, change.added, table.schema())
    now = int(time.time() * 1000)
    return _commit(table, path, [
        {"commitInfo": _info(now, "MERGE", metrics)},
        *({"txn": {"appId": app, "version": int(at), "lastUpdated": now}} for app, at in transactions.items()),
        *_replaced(path, change, now),
        *({"add": _add(report, now)} for report in change.added),
    ])  # fmt: skip


def commit_compaction(table: DeltaTable, path: Path, files: Sequence[Added], report: FileReport | None) -> int:
    """Put one file (None: nothing is left) in the place of ``files``, whose rows it holds; returns the new version."""
    refuse_features(table, path)
    reports = [report] if report is not None else []
    left = sum((file.rows or 0) - file.deleted for file in files)
    if sum(report.rows for report in reports) != left:
        raise LakeError(f"{left} rows were to be written anew", thing=str(path))
    check_files(path, reports, table.schema())
    now = int(time.time() * 1000)
    metrics = {"numRemovedFiles": len(files), "numAddedFiles": len(reports)}
    return _commit(table, path, [
        {"commitInfo": _info(now, "OPTIMIZE", metrics)},
        *({"remove": _remove(file, now, changes=False)} for file in files),
        *({"add": _add(report, now, changes=False)} for report in reports),
    ])  # fmt: skip


def _commit(table: DeltaTable, path: Path, actions: Sequence[dict[str, Any]]) -> int:
    version = int(table.version()) + 1
    _link(path / "_delta_log", version, "".join(json.dumps(action) + "\n" for action in actions))
    if version % CHECKPOINT_EVERY == 0:
        make_checkpoint(DeltaTable(path, version=version), path)
    return version


def make_checkpoint(table: DeltaTable, path: Path) -> None:
    """A checkpoint of the version that ``table`` is opened at."""
    table.create_checkpoint()
    # Hadoop keeps checksums of what Spark wrote, and would find these wrong.
    for name in ("_last_checkpoint", f"{table.version():020}.checkpoint.parquet"):
        (path / "_delta_log" / f".{name}.crc").unlink(missing_ok=True)


def _replaced(path: Path, change: Change, now: int) -> list[dict[str, Any]]:
    """Each file that loses rows goes, and comes again with a larger vector, unless nothing of it is left."""
    changed = [(file, _larger(path, file, change.gone[file.path])) for file in change.live if file.path in change.gone]
    if len(changed) != len(change.gone):
        raise LakeError("rows of a file go that is none of the table's", thing=str(path))
    left = [(file, vector) for file, vector in changed if file.rows is None or len(vector) < file.rows]
    descriptors = write_vectors(path, [vector for _, vector in left]) if left else []
    actions: list[dict[str, Any]] = [{"remove": _remove(file, now)} for file, _ in changed]
    for (file, _), descriptor in zip(left, descriptors, strict=True):
        actions.append({"add": _with_vector(file, descriptor)})
    return actions


def _larger(path: Path, file: Added, gone: BitMap64) -> BitMap64:
    vector = file.action.get("deletionVector")
    before = BitMap64() if vector is None else read_vector(path, vector)
    if not before.isdisjoint(gone):
        raise LakeError("rows go that are gone", thing=str(path / file.path))
    return before | gone


def _remove(file: Added, now: int, *, changes: bool = True) -> dict[str, Any]:
    vector = file.action.get("deletionVector")
    told = {name: file.action.get(name) for name in ("path", "partitionValues", "size", "tags")}
    return {
        **{name: value for name, value in told.items() if value is not None},
        "deletionTimestamp": now,
        "dataChange": changes,
        "extendedFileMetadata": True,
        **({} if vector is None else {"deletionVector": vector}),
    }


def _with_vector(file: Added, vector: Descriptor) -> dict[str, Any]:
    kept = {name: value for name, value in file.action.items() if value is not None}
    stats = loosened(file.action.get("stats") or "{}")
    return {**kept, "dataChange": True, "stats": stats, "deletionVector": vector}


def loosened(stats: str) -> str:
    """Statistics of a file that loses rows: bounds stay true of fewer, but need not be met by any.

    As text: a decimal that went through a float would be another bound, and hide rows.
    """
    text, told = _TIGHT.subn('"tightBounds":false', stats)
    if told:
        return text
    body = stats.rstrip().removesuffix("}")
    return f'{body}{"" if body.strip() == "{" else ","}"tightBounds":false}}'


def _add(report: FileReport, now: int, *, changes: bool = True) -> dict[str, Any]:
    return {
        "path": report.path, "partitionValues": {}, "size": report.size, "modificationTime": now,
        "dataChange": changes, "stats": report.stats,
    }  # fmt: skip


def _info(now: int, operation: str, metrics: Mapping[str, int]) -> dict[str, Any]:
    return {
        "timestamp": now, "operation": operation, "operationParameters": {}, "isBlindAppend": False,
        "operationMetrics": {name: str(value) for name, value in metrics.items()}, "engineInfo": "pgcdc_assets",
    }  # fmt: skip


def refuse_features(table: DeltaTable, path: Path, *, vectors: bool = False) -> None:
    """LakeError where a commit of ours cannot be one that the table's protocol asks for."""
    reason = unfit(table, vectors=vectors)
    if reason is not None:
        raise LakeError(reason, thing=f"mirror {path}", do="drop the feature (ALTER TABLE ... DROP FEATURE), "
                        "or copy the table anew")  # fmt: skip


def unfit(table: DeltaTable, *, vectors: bool = True) -> str | None:
    """Why changes cannot be applied to the table, in words: what its features ask for, or do not allow."""
    features = set(table.protocol().writer_features or ())
    odd = sorted(features - FEATURES)
    if odd:
        return f"has a feature that changes cannot be applied to: {', '.join(odd)}"
    return "has no deletion vectors any more" if vectors and "deletionVectors" not in features else None


def _link(log: Path, version: int, text: str) -> None:
    """Put the commit under its number, whole or not at all."""
    staged = log / f"_commit_{uuid.uuid4()}.json.tmp"
    staged.write_text(text)
    try:
        os.link(staged, log / f"{version:020}.json")
    except FileExistsError:
        raise LakeError("another writer committed at the same time", thing=str(log.parent),
                        do="let one process write to the lake") from None  # fmt: skip
    finally:
        with suppress(FileNotFoundError):
            staged.unlink()
