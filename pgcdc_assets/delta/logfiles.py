"""Reads the commits of a Delta table's log, and lists the log's files. Incomplete or unknown content always raises an
error, because a wrong state of the table would go unnoticed.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import LAST_CHECKPOINT, Location, commit_name
from pgcdc_assets.errors import LakeError, TornLog
from pgcdc_assets.store import storage

Action = dict[str, Any]

COMMIT: Final = re.compile(r"(\d{20})\.json")
CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
"""Matches the file of a checkpoint, or one part of a checkpoint in several files. Checkpoints of Delta's newer form
(version 2, with sidecar files) are not supported."""
ASIDE: Final = "_torn_"
"""Prefix of the new names of files that :func:`put_aside` renames in the log's folder."""
VERSIONED: Final = re.compile(r"\.?(\d{20})\.")
"""Matches the log's files that belong to a version: commits, checkpoints, and the checksum files that Spark writes for
them."""
ACTIONS: Final = "pgcdcActions"
"""A field of ``commitInfo`` in our commits: the number of actions in the commit, including ``commitInfo``. It shows
whether a commit was cut off between two lines by a power cut."""

ENGINE: Final = "pgcdc_assets"
"""The name of this package in ``commitInfo``."""
_ENDS_LINES: Final = (ENGINE, "Apache-Spark")
"""Writers that write a line break after the last line of a commit."""
_SEPARATES_LINES: Final = "delta-rs"
"""A writer that writes no line break after the last line of a commit."""

_NEEDED: Final = {
    "add": ("path", "size"), "remove": ("path",), "txn": ("appId", "version"), "metaData": ("schemaString",),
    "protocol": ("minReaderVersion",),
}  # fmt: skip
"""The actions that define the state of a table, each with the fields that it must have."""
_OTHERS: Final = frozenset({"commitInfo", "cdc", "domainMetadata", "checkpointMetadata", "sidecar"})
"""Other actions that a commit may contain. They do not change the rows of the table."""


def commit_actions(log: Location, number: int) -> list[Action]:
    """All actions of one commit, in order. Raises LakeError if the commit does not exist or contains an unknown action,
    and TornLog if the commit is incomplete."""
    actions = commit_if_there(log, number)
    if actions is None:
        raise LakeError("is missing, but versions of the table need this commit", thing=str(log / commit_name(number)))
    return actions


def commit_if_there(log: Location, number: int) -> list[Action] | None:
    """Like :func:`commit_actions`, but returns None if the commit does not exist."""
    path = log / commit_name(number)
    try:
        content = storage.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    actions = [_action(line, path) for line in content.removesuffix(b"\n").split(b"\n")]
    info = next((action["commitInfo"] for action in actions if "commitInfo" in action), None) or {}
    engine, ended = str(info.get("engineInfo", "")), content.endswith(b"\n")
    # A commit that was cut off at the end of a line looks complete. Only its last character may show the cut, because
    # some writers always write a line break after the last line, and some never do.
    if (ended and engine.startswith(_SEPARATES_LINES)) or (not ended and engine.startswith(_ENDS_LINES)):
        raise torn(path, "its last line is incomplete")
    if ACTIONS in info and str(info[ACTIONS]) != str(len(actions)):
        raise torn(path, f"it has {len(actions)} actions, but its commitInfo counts {info[ACTIONS]}")
    return actions


def checksum_of(path: Location) -> Location:
    """The path of the checksum file that Hadoop writes for a file. Hadoop refuses to read a file that its checksum file
    does not match."""
    return path.with_name(f".{path.name}.crc")


def torn(path: Location, what: str) -> TornLog:
    return TornLog(f"is incomplete: {what}", thing=str(path))


def file_names(log: Location) -> list[str]:
    """The names of all files of the log. Lists the folder."""
    return [entry.name for entry in storage.list_after(log)]


def commits_among(names: Iterable[str]) -> list[int]:
    """The numbers of the commits among these file names, ascending."""
    return sorted(int(match[1]) for name in names if (match := COMMIT.fullmatch(name)))


def checkpoint_files(log: Location, upto: int | None = None) -> dict[int, list[Location]]:
    """The files of each complete checkpoint at or below version ``upto``, by version, the newest checkpoint first. A
    checkpoint is complete if all of its parts exist. Lists the folder."""
    return checkpoints_among(file_names(log), log, upto)


def checkpoints_among(names: Iterable[str], log: Location, upto: int | None = None) -> dict[int, list[Location]]:
    """Like :func:`checkpoint_files`, for file names that were already listed."""
    found: dict[int, list[Location]] = {}
    parts: dict[int, int] = {}
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is not None and (upto is None or int(match[1]) <= upto):
            found.setdefault(int(match[1]), []).append(log / name)
            parts[int(match[1])] = int(match[2] or 1)
    return {number: found[number] for number in sorted(found, reverse=True) if len(found[number]) == parts[number]}


def whole_commits(log: Location, base: int) -> dict[int, list[Action]]:
    """The commits above version ``base``, up to the first commit that is incomplete or missing. Raises LakeError for an
    unknown action."""
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
            # The first commit of a table must have both actions. If it was cut off, one of them may be missing, because
            # Spark writes one of them last, and delta-rs the other.
            break
        found[number] = actions
        number += 1
    return found


def left_above(log: Location, last: int, names: Collection[str]) -> list[Location]:
    """The files that a power cut left above version ``last``, the last complete version. ``names``: the log's files, as
    they were listed before the commits were read.

    If the commit after ``last`` was missing at that time, another process may have made it since then: a program of the
    user, or a receiver whose command was killed, and which confirms the commit to the source. So only files that were
    already listed are returned. If that commit was listed, it is incomplete, and no file above it is valid."""
    if commit_name(last + 1) in names:
        names = file_names(log)
    return [log / name for name in names if (match := VERSIONED.match(name)) and int(match[1]) > last]


def put_aside(log: Location, paths: Sequence[Location]) -> tuple[str, ...]:
    """Rename files of a log, so that readers ignore them. The new names are durable when this returns. The hint file
    ``_last_checkpoint`` is renamed too if it names a checkpoint that is renamed or missing. Returns the old names."""
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
    """Whether the checkpoint that the hint file names exists and is not among the files ``aside``."""
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
        raise torn(path, "a line is not JSON") from None
    if not isinstance(action, dict) or len(action) != 1:
        raise torn(path, "a line is not an action")
    ((name, body),) = action.items()
    if name not in _NEEDED and name not in _OTHERS:
        raise LakeError(f"has an unknown action: {name[:40]}", thing=str(path),
                        do="another program probably enabled a table feature; move the Delta table away, and copy the "
                           "source table again")  # fmt: skip
    if not isinstance(body, dict) or any(body.get(key) is None for key in _NEEDED.get(name, ())):
        raise torn(path, f"its action {name} lacks a required field")
    return action
