"""A Delta table as its log tells it, read by the numbers of its commits.

Other readers list the log's folder at each look: 0.2 s of CPU time for the 60,000 commits that a table
under steady change takes in a day. Here a look costs what is live, and what came since the last look.
https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import Schema

from pgcdc_assets.core.layout import DELTA_LOG, LAST_CHECKPOINT, checkpoint_name, commit_name
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.vectors import vector_file

_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
"""One file, or one of several parts; the newer form with sidecars is not written here."""
_COMMIT: Final = re.compile(r"(\d{20})\.json")

_FIELDS: Final = (
    "path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector",
    "baseRowId", "defaultRowCommitVersion", "clusteringProvider",
)  # fmt: skip
"""Of an add action. Checkpoints may hold others, made from these: Spark's hold the statistics' values by column."""
_TOLD: Final = (b'{"add"', b'{"remove"', b'{"txn"', b'{"metaData"', b'{"protocol"')
"""How the lines that matter here begin; the others may be long."""

Action = dict[str, Any]


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
    action: Action = field(default_factory=dict, repr=False, compare=False)
    """As the log has it."""


@dataclass(frozen=True)
class DeltaVersion:
    """A table as one of its versions has it."""

    folder: Path
    number: int
    protocol: Action
    metadata: Action
    positions: Mapping[str, int]
    """By application, the version of its last transaction."""
    files: tuple[Added, ...]

    @property
    def configuration(self) -> Mapping[str, str]:
        return dict(self.metadata.get("configuration") or {})

    @property
    def features(self) -> frozenset[str]:
        """That a writer has to know; none for the older protocols, which count them up."""
        return frozenset(self.protocol.get("writerFeatures") or ())

    @cached_property
    def schema(self) -> Schema:
        return Schema.from_json(self.metadata["schemaString"])


@dataclass
class Replay:
    """What a log says, action by action."""

    protocol: Action = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    files: dict[tuple[str, str], Added] = field(default_factory=dict)
    """A file with another deletion vector is another."""

    def play(self, action: Action) -> Added | None:
        """The file that the action adds, if it does."""
        if remove := action.get("remove"):
            self.files.pop(_key(remove), None)
        elif add := action.get("add"):
            added = self.files[_key(add)] = _added(add)
            return added
        elif transaction := action.get("txn"):
            self.positions[transaction["appId"]] = int(transaction["version"])
        self.metadata = action.get("metaData", self.metadata)
        self.protocol = action.get("protocol", self.protocol)
        return None


class DeltaLog:
    """The log of one table; it remembers what it has read, and reads on from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / DELTA_LOG
        self._replay = Replay()
        self._number = -1
        self._version: DeltaVersion | None = None

    def newest(self) -> DeltaVersion | None:
        """The newest version; None where there is no table yet. LakeError where the log does not say."""
        if self._number < 0 or (not self._read_on() and not (self._log / commit_name(self._number)).exists()):
            # Never read, or so long ago that this commit, and so perhaps the next ones, have been cleaned up since.
            self._begin()
        return self._told()

    def at(self, version: int) -> DeltaVersion:
        """LakeError where the log does not hold that version (any more)."""
        self._start(*checkpoint_upto(self._log, version))
        self._play_upto(version)
        told = self._told()
        if told is None:
            raise LakeError(f"has no version {version}", thing=f"Delta table {self.folder}")
        return told

    def _begin(self) -> None:
        hint = _hinted(self._log)
        self._start(*_checkpoint_at(self._log, hint))
        if self._number == hint and self._read_on():
            return
        # Nothing follows the checkpoint that the hint names: is it the end, or is the hint an old one?
        numbers = [int(match[1]) for path in self._log.glob("*.json") if (match := _COMMIT.fullmatch(path.name))]
        last = max(numbers, default=-1)
        begin, parts = checkpoint_upto(self._log, None)
        if max(last, begin) > self._number:
            self._start(begin, parts)
            self._play_upto(last)

    def _start(self, number: int, parts: Iterable[Path]) -> None:
        self._replay, self._number, self._version = Replay(), number, None
        for action in checkpoint_actions(parts):
            self._replay.play(action)

    def _read_on(self) -> bool:
        """Play the commits that follow; whether there was any."""
        before = self._number
        while (self._log / commit_name(self._number + 1)).exists():
            self._play_upto(self._number + 1)
        return self._number > before

    def _play_upto(self, last: int) -> None:
        for number in range(self._number + 1, last + 1):
            for action in commit_actions(self._log, number):
                self._replay.play(action)
            self._number, self._version = number, None

    def _told(self) -> DeltaVersion | None:
        if self._version is None and self._number >= 0:
            replay = self._replay
            if not replay.metadata:
                raise LakeError("has a log that does not tell its columns", thing=f"Delta table {self.folder}")
            self._version = DeltaVersion(self.folder, self._number, replay.protocol, replay.metadata,
                                         dict(replay.positions), tuple(replay.files.values()))  # fmt: skip
        return self._version


def open_delta(folder: Path) -> DeltaVersion | None:
    """The table in its newest version; None where there is none."""
    return DeltaLog(folder).newest()


def commit_actions(log: Path, number: int) -> Iterator[Action]:
    """Of one commit, those that say what the table is. LakeError where there is none."""
    path = log / commit_name(number)
    try:
        with path.open("rb") as file:
            for line in file:
                if line.startswith(_TOLD):
                    yield json.loads(line)
    except FileNotFoundError:
        raise LakeError("lacks a commit that its versions need", thing=str(path)) from None


def checkpoint_actions(parts: Iterable[Path]) -> Iterator[Action]:
    """What a checkpoint stands for; tombstones say nothing here."""
    for path in parts:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=["protocol", "metaData", "txn", *(f"add.{name}" for name in _FIELDS)])
        if "add" not in table.column_names or table["add"].type.get_field_index("path") < 0:
            raise LakeError("has a checkpoint that cannot be read", thing=str(path))
        for name in table.column_names:
            rows = pa.table({name: table[name]}).filter(pc.is_valid(table[name]))
            for row in rows.to_pylist(maps_as_pydicts="strict"):
                yield {name: {key: value for key, value in row[name].items() if value is not None}}


def checkpoint_upto(log: Path, upto: int | None) -> tuple[int, list[Path]]:
    """The newest whole checkpoint at or below a version: its version and files; -1 and none where there is none."""
    found: dict[int, list[Path]] = {}
    parts: dict[int, int] = {}
    for path in log.glob("*.checkpoint*.parquet"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match is not None and (upto is None or int(match[1]) <= upto):
            found.setdefault(int(match[1]), []).append(path)
            parts[int(match[1])] = int(match[2] or 1)
    whole = [version for version, paths in found.items() if len(paths) == parts[version]]
    return (max(whole), found[max(whole)]) if whole else (-1, [])


def _checkpoint_at(log: Path, version: int) -> tuple[int, list[Path]]:
    """The checkpoint of one file that a version has; -1 and none where it has none."""
    path = log / checkpoint_name(version)
    return (version, [path]) if version >= 0 and path.exists() else (-1, [])


def _hinted(log: Path) -> int:
    """The version that the last checkpoint was made of, as the hint beside it says; -1 where it says nothing."""
    try:
        return int(json.loads((log / LAST_CHECKPOINT).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        # It may be half written: a hint, no more.
        return -1


def _key(action: Action) -> tuple[str, str]:
    vector = action.get("deletionVector")
    told = "" if vector is None else f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"
    return str(action["path"]), told


def _added(add: Action) -> Added:
    path = unquote(add["path"])
    if path.startswith("/") or ":/" in path:
        raise LakeError("names a file outside of its folder", thing=f"Delta table with {path}")
    vector, stats = add.get("deletionVector"), add.get("stats")
    rows = json.loads(stats).get("numRecords") if stats else None
    if vector is None:
        return Added(path, add["size"], rows, None, 0, add)
    return Added(path, add["size"], rows, vector_file(vector), vector["cardinality"], add)
