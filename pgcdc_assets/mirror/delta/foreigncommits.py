"""Finds the commits by which another writer changed rows of a mirror. Comments, properties, columns that another writer
adds, OPTIMIZE and VACUUM change no row. Any other commit by another writer may make the mirror differ from the source,
although the mirror's LSN does not change. Such a table is reported until it is copied again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from pgcdc_assets.core.layout import DELTA_LOG, Location
from pgcdc_assets.delta.datafile import in_int96, opened_parquet
from pgcdc_assets.delta.logfiles import Action, commit_if_there
from pgcdc_assets.delta.recovery import is_own

_SPARK: Final = "Apache-Spark"
"""The engine that reads INT96 timestamps exactly. Other engines may read nanoseconds, and then write wrong values."""


@dataclass(frozen=True)
class Seen:
    """What a sequence of commits did to a mirror. ``copied``: whether it contains a snapshot copy. ``change``: the
    first change of rows by another writer after the last copy."""

    copied: bool = False
    change: str | None = None


def seen(folder: Location, owner: str, commits: Mapping[int, Sequence[Action]]) -> Seen:
    """Check commits of a mirror for changes by another writer. ``owner`` is :meth:`Identity.app_id`."""
    found = Seen()
    for number in sorted(commits):
        actions = commits[number]
        apps = [str(action["txn"]["appId"]) for action in actions if "txn" in action]
        if any(app.startswith(f"{owner}/snapshot/") for app in apps):
            found = Seen(copied=True)
            continue
        ours = is_own(actions) or any(app.startswith(f"{owner}/") for app in apps)
        if found.change is None and not ours and _changes_rows(folder, actions):
            found = Seen(found.copied, f"another writer changed rows of this mirror (version {number})")
    return found


def change_since(folder: Location, owner: str, version: int) -> str | None:
    """The first change of rows by another writer after a published version. LakeError if a commit is damaged."""
    commits: dict[int, Sequence[Action]] = {}
    number = version + 1
    while (actions := commit_if_there(folder / DELTA_LOG, number)) is not None:
        commits[number] = actions
        number += 1
    return seen(folder, owner, commits).change


def _changes_rows(folder: Location, actions: Sequence[Action]) -> bool:
    added = [action["add"] for action in actions if "add" in action]
    removed = [action["remove"] for action in actions if "remove" in action]
    if any(one.get("dataChange", True) for one in [*added, *removed]):
        return True
    # The commit says that it only moves rows to other files. This may be wrong, so the row counts are compared.
    before, after = ([_file(folder, one) for one in some] for some in (removed, added))
    if None not in before and None not in after and _rows(before) != _rows(after):
        return True
    return not _by_spark(actions) and any(one.int96 for one in before if one is not None)


@dataclass(frozen=True)
class _File:
    rows: int
    int96: bool


def _file(folder: Location, action: dict[str, Any]) -> _File | None:
    """The file of an add or remove action. None if it cannot be read: it was deleted, or its next reader reports the
    error."""
    try:
        with opened_parquet(folder / unquote(action["path"])) as file:
            footer = file.metadata
    except (OSError, pa.ArrowException):
        return None
    vector = action.get("deletionVector") or {}
    return _File(footer.num_rows - int(vector.get("cardinality", 0)), in_int96(footer))


def _rows(files: Sequence[_File | None]) -> int:
    return sum(one.rows for one in files if one is not None)


def _by_spark(actions: Sequence[Action]) -> bool:
    return any(str(action.get("commitInfo", {}).get("engineInfo", "")).startswith(_SPARK) for action in actions)
