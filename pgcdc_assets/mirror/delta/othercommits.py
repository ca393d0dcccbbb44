"""Says in words which commits of other writers changed a mirror's rows.

Comments, properties, columns of their own, OPTIMIZE and VACUUM leave the rows as they were. Anything else makes the
mirror differ from the source in a way that no position shows: it is reported until the table is copied anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.datafile import in_int96, opened_parquet
from pgcdc_assets.delta.log import open_delta
from pgcdc_assets.delta.logfiles import Action, commit_if_there
from pgcdc_assets.delta.recovery import is_own
from pgcdc_assets.errors import LakeError
from pgcdc_assets.store import storage

_LONGEST: Final = 60
"""At most this many characters of another writer's name are reported, and of its operation."""
_NANOSECONDS: Final = "delta-rs"
"""The engine that reads INT96 as nanoseconds, and writes what it read."""


@dataclass(frozen=True)
class Seen:
    """The effect of a sequence of commits. ``copied``: a copy is among them, and ``change`` came after it."""

    copied: bool = False
    change: str | None = None


def seen(folder: Location, owner: str, commits: Mapping[int, Sequence[Action]]) -> Seen:
    """Look at commits of a mirror; ``owner`` is :meth:`Identity.app_id`. The first change after a copy is reported."""
    found = Seen()
    for number in sorted(commits):
        actions = commits[number]
        apps = [str(action["txn"]["appId"]) for action in actions if "txn" in action]
        if any(app.startswith(f"{owner}/snapshot/") for app in apps):
            found = Seen(copied=True)
        elif found.change is None and not is_own(actions) and not any(app.startswith(f"{owner}/") for app in apps):
            did = _did(folder, actions)
            found = Seen(found.copied, did and f"{_who(actions)} {did} (version {number})")
    return found


def change_since(folder: Location, owner: str, version: int) -> str | None:
    """What others did to the mirror after a published version. LakeError if its log does not say."""
    commits: dict[int, Sequence[Action]] = {}
    number = version + 1
    while (actions := commit_if_there(folder / DELTA_LOG, number)) is not None:
        commits[number] = actions
        number += 1
    return seen(folder, owner, commits).change


def _did(folder: Location, actions: Sequence[Action]) -> str | None:
    """What a commit of another writer did to the rows; None if they are the same as before."""
    added = [action["add"] for action in actions if "add" in action]
    removed = [action["remove"] for action in actions if "remove" in action]
    if any(one.get("dataChange", True) for one in [*added, *removed]):
        return "changed its rows"
    if removed:
        # The commit says that it moves rows to other files and changes none. Their number shows whether it does.
        before, after = ([_file(folder, one) for one in some] for some in (removed, added))
        held, holds = _sum(before), _sum(after)
        if held is not None and holds is not None and held != holds:
            return f"made {holds} rows of {held}"
        if _engine(actions).startswith(_NANOSECONDS) and any(one.int96 for one in before):
            return "wrote timestamps anew that it reads wrong before 1678 and after 2261"
    if _info(actions).get("operation", "").startswith("VACUUM") and (gone := _gone(folder)):
        return f"deleted {gone}, which it needs"
    return None


@dataclass(frozen=True)
class _File:
    rows: int | None
    """None where it cannot be read."""
    int96: bool = False


def _file(folder: Location, action: dict[str, Any]) -> _File:
    try:
        with opened_parquet(folder / unquote(action["path"])) as file:
            footer = file.metadata
    except (OSError, pa.ArrowException):
        # It was deleted since, or whoever needs it will say that it cannot be read.
        return _File(None)
    vector = action.get("deletionVector") or {}
    return _File(footer.num_rows - int(vector.get("cardinality", 0)), in_int96(footer))


def _sum(files: Sequence[_File]) -> int | None:
    rows = [one.rows for one in files]
    return None if None in rows else sum(number for number in rows if number is not None)


def _gone(folder: Location) -> str | None:
    """A file of the newest version that is missing. A log that cannot be read is reported by whoever needs it."""
    try:
        table = open_delta(folder)
    except LakeError:
        return None
    names = [name for file in (table.files if table else ()) for name in (file.path, file.vector) if name is not None]
    return next((name for name in names if not storage.exists(folder / name)), None)


def _info(actions: Sequence[Action]) -> dict[str, Any]:
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), None) or {}


def _engine(actions: Sequence[Action]) -> str:
    return str(_info(actions).get("engineInfo") or "an unknown writer")


def _who(actions: Sequence[Action]) -> str:
    operation = str(_info(actions).get("operation") or "a commit")
    return f"{operation[:_LONGEST]} by {_engine(actions)[:_LONGEST]}"
