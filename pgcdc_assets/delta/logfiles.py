"""Reads the files of a Delta table's log strictly: incomplete or unknown content is never skipped.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import LAST_CHECKPOINT, Location, commit_name
from pgcdc_assets.errors import LakeError, TornLog
from pgcdc_assets.store import storage

Action = dict[str, Any]

COMMIT: Final = re.compile(r"(\d{20})\.json")
CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
"""Matches a checkpoint of one file, or one of several parts. We do not write the newer form with sidecars."""
ASIDE: Final = "_torn_"
"""Prefix of the names of files that were put aside, in the log's own folder."""
VERSIONED: Final = re.compile(r"\.?(\d{20})\.")
"""Files of a log that belong to a version: commits, checkpoints, and the checksums that Spark keeps beside them."""
ACTIONS: Final = "pgcdcActions"
"""Field of ``commitInfo`` in our commits: how many actions the commit has, including this action. Without it, a commit
that was cut between two lines would look complete."""

ENGINE: Final = "pgcdc_assets"
"""The name of our commits' writer in a table's history."""
_ENDS_LINES: Final = (ENGINE, "Apache-Spark")
_SEPARATES_LINES: Final = "delta-rs"

_NEEDED: Final = {
    "add": ("path", "size"), "remove": ("path",), "txn": ("appId", "version"), "metaData": ("schemaString",),
    "protocol": ("minReaderVersion",),
}  # fmt: skip
"""The actions that define the table, and the fields that each action must have."""
_OTHERS: Final = frozenset({"commitInfo", "cdc", "domainMetadata", "checkpointMetadata", "sidecar"})
"""Actions that say nothing about the rows of the table, and may be present."""


def commit_actions(log: Location, number: int) -> list[Action]:
    """All actions of one commit, in order. LakeError if there is no commit, or if an action is unknown; TornLog if the
    commit is not complete."""
    actions = commit_if_there(log, number)
    if actions is None:
        raise LakeError("lacks a commit that its versions need", thing=str(log / commit_name(number)))
    return actions


def commit_if_there(log: Location, number: int) -> list[Action] | None:
    """Like :func:`commit_actions`, but None if there is no commit."""
    path = log / commit_name(number)
    try:
        content = storage.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    actions = [_action(line, path) for line in content.removesuffix(b"\n").split(b"\n")]
    info = next((action["commitInfo"] for action in actions if "commitInfo" in action), None) or {}
    engine, ended = str(info.get("engineInfo", "")), content.endswith(b"\n")
    # A commit that was cut at a line's end would look complete. An unknown writer may or may not end its last line.
    if (ended and engine.startswith(_SEPARATES_LINES)) or (not ended and engine.startswith(_ENDS_LINES)):
        raise torn(path, "its last line does not end as its writer ends lines")
    if ACTIONS in info and str(info[ACTIONS]) != str(len(actions)):
        raise torn(path, f"it has {len(actions)} actions of {info[ACTIONS]}")
    return actions


def checksum_of(path: Location) -> Location:
    """The checksum that Hadoop writes beside each file, and trusts more than the file itself."""
    return path.with_name(f".{path.name}.crc")


def torn(path: Location, what: str) -> TornLog:
    return TornLog(f"is not whole: {what}", thing=str(path))


def commit_numbers(log: Location) -> list[int]:
    """The versions of the commits in the folder, in order. Lists the folder."""
    return commits_among(entry.name for entry in storage.list_after(log))


def commits_among(names: Iterable[str]) -> list[int]:
    """Like :func:`commit_numbers`, for names that were already listed."""
    return sorted(int(match[1]) for name in names if (match := COMMIT.fullmatch(name)))


def checkpoint_files(log: Location, upto: int | None = None) -> dict[int, list[Location]]:
    """The complete checkpoints at or below a version with all of their parts, newest first. Lists the folder."""
    return checkpoints_among((entry.name for entry in storage.list_after(log)), log, upto)


def checkpoints_among(names: Iterable[str], log: Location, upto: int | None = None) -> dict[int, list[Location]]:
    """Like :func:`checkpoint_files`, for names that were already listed."""
    found: dict[int, list[Location]] = {}
    parts: dict[int, int] = {}
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is not None and (upto is None or int(match[1]) <= upto):
            found.setdefault(int(match[1]), []).append(log / name)
            parts[int(match[1])] = int(match[2] or 1)
    return {number: found[number] for number in sorted(found, reverse=True) if len(found[number]) == parts[number]}


def whole_commits(log: Location, base: int) -> dict[int, list[Action]]:
    """The commits above a version, up to the first torn or missing commit. LakeError for unknown content."""
    found: dict[int, list[Action]] = {}
    number = base + 1
    while True:
        try:
            actions = commit_if_there(log, number)
        except TornLog:
            break
        if actions is None:
            break
        if number == 0 and not {"metaData", "protocol"} <= {name for action in actions for name in action}:
            # A table needs both actions. Spark writes one of them last, and delta-rs writes the other action last.
            break
        found[number] = actions
        number += 1
    return found


def above(log: Location, last: int) -> list[Location]:
    """All files of a log that belong to a version above ``last``. Lists the folder."""
    names = (entry.name for entry in storage.list_after(log))
    return [log / name for name in names if (match := VERSIONED.match(name)) and int(match[1]) > last]


def put_aside(log: Location, paths: Sequence[Location]) -> tuple[str, ...]:
    """Rename files of a log so that no reader takes them for files of the log; the new names are durable. The hint is
    also renamed if its checkpoint does not stay. Returns the former names."""
    names = {path.name for path in paths}
    hint = log / LAST_CHECKPOINT
    if storage.exists(hint) and not _believable(hint, names):
        names.add(hint.name)
    for name in names:
        storage.move(log / name, log / f"{ASIDE}{name}.{uuid.uuid4().hex[:8]}")
    if names:
        storage.settle([log])
    return tuple(sorted(names))


def _believable(hint: Location, aside: set[str]) -> bool:
    """Whether the checkpoint that the hint names stays."""
    try:
        number = int(json.loads(storage.read(hint))["version"])
    except MALFORMED:
        return False
    there = {path.name for path in checkpoint_files(hint.parent, number).get(number, ())}
    return bool(there - aside)


def _action(line: bytes, path: Location) -> Action:
    try:
        action = json.loads(line)
    except MALFORMED:
        raise torn(path, "a line is no JSON") from None
    if not isinstance(action, dict) or len(action) != 1:
        raise torn(path, "a line is no action")
    ((name, body),) = action.items()
    if name not in _NEEDED and name not in _OTHERS:
        raise LakeError(f"has an action that is not known: {name[:40]}", thing=str(path),
                        do="another writer's feature is on; move the table away and copy it anew")  # fmt: skip
    if not isinstance(body, dict) or _lacking(body, _NEEDED.get(name, ())):
        raise torn(path, f"a line of kind {name} lacks what it must say")
    return action


def _lacking(body: Action, needed: Sequence[str]) -> bool:
    return any(body.get(name) is None for name in needed)
