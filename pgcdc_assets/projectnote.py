"""What a project has noted in ``.pgcdc``: which lake is its own, and what ``setup`` created on the source.

A lake is recognized by the id of its change log, not only by its place. A lake that was moved is still the same lake.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.location import LOCAL, Location
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.store.durable import write_whole
from pgcdc_assets.store.private import private_folder

_NAME = "note.json"


@dataclass(frozen=True)
class ProjectNote:
    lake: str | None = None
    """The place of the project's lake; None before the lake has a change log."""
    log: str | None = None
    """The id of that lake's change log."""
    made: tuple[str, ...] = ()
    """What ``setup`` created on the source, for example ``slot pgcdc``."""

    def is_at(self, lake: Location) -> bool:
        """Whether the noted place is this lake's. Symbolic links to the same folder count as the same place."""
        if self.lake is None or self.lake == lake.text:
            return self.lake is not None
        with suppress(OSError):
            return lake.scheme == Location(self.lake).scheme == LOCAL and os.path.samefile(self.lake, lake.text)
        return False


def note_file(state: Path) -> Path:
    """The file of the note, in the project's folder ``state``."""
    return state / _NAME


def load_note(state: Path) -> ProjectNote:
    """The note; an empty note if there is no file. Raises SettingsError if the file cannot be read."""
    try:
        found = json.loads(note_file(state).read_text())
        return ProjectNote(_text(found["lake"]), _text(found["log"]), tuple(str(thing) for thing in found["made"]))
    except FileNotFoundError:
        return ProjectNote()
    except (OSError, *MALFORMED):
        do = "delete it, set `lake` to the lake of this project, and run `pgcdc setup`"
        raise SettingsError("cannot be read", thing=str(note_file(state)), do=do) from None


def change_note(state: Path, **changed: Any) -> None:
    """Save new values of these fields."""
    before = load_note(state)
    after = replace(before, **changed)
    if after != before:
        private_folder(state)
        write_whole(note_file(state), (json.dumps(asdict(after), indent=1) + "\n").encode())


def note_made(state: Path, things: list[str]) -> None:
    """Note things that ``setup`` has created, or is about to create."""
    before = load_note(state).made
    change_note(state, made=(*before, *(thing for thing in things if thing not in before)))


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError
