"""Which files the versions of a Delta table refer to, from a given version on: read from its log.

VACUUM's own rule goes by the time of removal, and forgets a removal after a week. What readers are
promised goes by versions: a file stays as long as any version from the oldest promised one on refers to
it, deletion vectors included, whatever the clock said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.vectors import vector_file

_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
"""One file, or one of several parts; the newer form with sidecars is not written here."""

_FIELDS: Final = (
    "path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector",
    "baseRowId", "defaultRowCommitVersion", "clusteringProvider",
)  # fmt: skip
"""Of an add action. Checkpoints may hold others, made from these: Spark's hold the statistics' values by column."""


@dataclass(frozen=True)
class Added:
    """A data file as one version has it."""

    path: str
    """Relative to the table's folder."""
    size: int
    rows: int | None
    """None where its statistics do not say."""
    vector: str | None
    """The file that holds its deletion vector."""
    deleted: int
    """Rows that the deletion vector takes away."""
    action: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """As the log has it."""


@dataclass(frozen=True)
class References:
    live: tuple[Added, ...]
    """The files of the newest version."""
    needed: frozenset[str]
    """Of every version asked for: data files and deletion vectors, relative to the table's folder."""


def references(folder: Path, oldest: int, newest: int) -> References:
    """What the versions ``oldest`` to ``newest`` of the table refer to. LakeError where its log does not say."""
    log = folder / "_delta_log"
    begin, parts = _checkpoint(log, oldest)
    held: dict[tuple[str, str], Added] = {}
    for action in _of_checkpoint(parts):
        _apply(held, action)
    needed: set[str] = set() if begin < oldest else _names(held.values())
    for version in range(begin + 1, newest + 1):
        for action in _of_commit(log / f"{version:020}.json"):
            added = _apply(held, action)
            if added is not None and version > oldest:
                needed |= _names([added])
        if version == oldest:
            needed |= _names(held.values())
    return References(tuple(held.values()), frozenset(needed))


def live_files(folder: Path, version: int) -> tuple[Added, ...]:
    """The data files of one version of the table. LakeError where its log does not say."""
    return references(folder, version, version).live


def _apply(held: dict[tuple[str, str], Added], action: dict[str, Any]) -> Added | None:
    """Play one action; the file that it adds. A file with another deletion vector is another."""
    if remove := action.get("remove"):
        held.pop(_key(remove), None)
    if add := action.get("add"):
        added = held[_key(add)] = _added(add)
        return added
    return None


def _key(action: dict[str, Any]) -> tuple[str, str]:
    vector = action.get("deletionVector")
    told = "" if vector is None else f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"
    return str(action["path"]), told


def _added(action: dict[str, Any]) -> Added:
    path = unquote(action["path"])
    if path.startswith("/") or ":/" in path:
        raise LakeError("names a file outside of its folder", thing=f"Delta table with {path}")
    vector, stats = action.get("deletionVector"), action.get("stats")
    rows = json.loads(stats).get("numRecords") if stats else None
    if vector is None:
        return Added(path, action["size"], rows, None, 0, action)
    return Added(path, action["size"], rows, vector_file(vector), vector["cardinality"], action)


def _names(files: Iterable[Added]) -> set[str]:
    return {name for file in files for name in (file.path, file.vector) if name is not None}


def _checkpoint(log: Path, upto: int) -> tuple[int, list[Path]]:
    """The newest whole checkpoint at or below a version: its version and files; -1 and none where there is none."""
    found: dict[int, list[Path]] = {}
    parts: dict[int, int] = {}
    for path in log.glob("*.checkpoint*.parquet"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match is not None and int(match[1]) <= upto:
            found.setdefault(int(match[1]), []).append(path)
            parts[int(match[1])] = int(match[2] or 1)
    whole = [version for version, paths in found.items() if len(paths) == parts[version]]
    return (max(whole), found[max(whole)]) if whole else (-1, [])


def _of_checkpoint(parts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in parts:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=[f"add.{name}" for name in _FIELDS])
        column = table["add"] if "add" in table.column_names else None
        if column is None or column.type.get_field_index("path") < 0:
            raise LakeError("has a checkpoint that cannot be read", thing=str(path))
        table = pa.table({"add": column})
        yield from table.filter(pc.is_valid(table["add"])).to_pylist(maps_as_pydicts="strict")


def _of_commit(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                # Only these two name files; the others may be long.
                if line.startswith((b'{"add"', b'{"remove"')):
                    yield json.loads(line)
    except FileNotFoundError:
        raise LakeError("lacks a commit that its versions need", thing=str(path)) from None
