"""The project directory: the saved catalog, the note that says which lake is the project's own, and Dagster's home.
This module does not import Dagster, so that ``pgcdc status`` starts fast."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.formats import FORMAT, MALFORMED, check_format, reading
from pgcdc_assets.core.layout import LOCAL, Location
from pgcdc_assets.errors import SettingsError, SetupNeeded
from pgcdc_assets.projectfile import SETTINGS_FILE
from pgcdc_assets.settings import STATE_FOLDER, Settings
from pgcdc_assets.store.localfiles import private_folder, sync_folder, write_whole

_NOTE = "note.json"
LOCATION = "pgcdc_assets"
DAGSTER_FOLDER = ".dagster"
SENSOR_ON = "PGCDC_ASSETS_SENSOR"
"""``pgcdc up`` sets this variable to ``on``. Without it, the sensor that starts runs is off until a user turns it on in
the UI."""

INSTANCE_YAML = """\
# The Dagster instance of this project.
telemetry:
  enabled: false
nux:
  enabled: false

# A run that the sensor requests starts within about a second.
run_coordinator:
  module: dagster._core.run_coordinator.queued_run_coordinator
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1

run_monitoring:
  enabled: true
  start_timeout_seconds: 180
  cancel_timeout_seconds: 180
  poll_interval_seconds: 10

# The sensor makes a tick every few seconds, so Dagster deletes old ticks. Old runs and their events are deleted by
# `pgcdc maintain` and its schedule.
retention:
  schedule:
    purge_after_days: 30
  sensor:
    purge_after_days:
      skipped: 1
      started: 7
      success: 7
      failure: 30
"""

OWN_DEFINITIONS = Path("definitions.py")
"""The user's own definitions, for example assets downstream of mirrors. ``pgcdc up`` loads them together with ours."""
WORKSPACE_YAML = f"""\
load_from:
  - python_module:
      module_name: pgcdc_assets.definitions
      location_name: {LOCATION}
"""


def save_catalog(catalog: Catalog, path: Path) -> None:
    """Save the source's catalog, as setup or sync has read it. The file is written completely or not at all, because
    another process may read it at any time. Dagster's code location loads the asset graph from this file alone."""
    made = not path.parent.exists()
    private_folder(path.parent)
    write_whole(path, json.dumps({"format": FORMAT, **catalog.to_json()}, indent=1).encode())
    if made:
        sync_folder(path.parent.parent)


def load_catalog(path: Path) -> Catalog | None:
    """The saved catalog; None if there is no file. Raises UnknownFormat for another format, and SetupNeeded if the file
    cannot be read."""
    thing = f"saved catalog {path}"
    with reading(thing, SetupNeeded, "delete it, then run `pgcdc setup`"):
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        # Every version of pgcdc writes a format. So a file without a format is damaged.
        check_format(content.pop("format"), thing)
        return Catalog.from_json(content)


def required_catalog(path: Path) -> Catalog:
    """The saved catalog. Raises SetupNeeded if there is none yet."""
    if (found := load_catalog(path)) is None:
        raise SetupNeeded("there is no saved catalog", thing=str(path))
    return found


class SavedCatalog:
    """Reads the saved catalog again only after it was written: each write changes the file's inode and time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: Catalog | None = None
        self._file: tuple[int, int] | None = None

    def read(self) -> Catalog | None:
        """The saved catalog; None if there is none yet."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        file = (found.st_ino, found.st_mtime_ns)
        if file != self._file:
            self._read = load_catalog(self._path)
            self._file = file
        return self._read


@dataclass(frozen=True)
class ProjectNote:
    """A file of the project that records which lake is the project's, and what ``setup`` created on the source. A lake
    is identified by the id of its change log, not by its location, so a lake that was moved is still the same lake."""

    lake: str | None = None
    """The location of the project's lake. None until the lake has a change log."""
    log: str | None = None
    """The id of the lake's change log."""
    made: tuple[str, ...] = ()
    """What ``setup`` created on the source, for example ``slot pgcdc``."""

    def is_at(self, lake: Location) -> bool:
        """Whether the recorded location is this lake's location. Two paths are the same location if symbolic links lead
        to the same folder."""
        if self.lake is None or self.lake == lake.text:
            return self.lake is not None
        with suppress(OSError):
            return lake.scheme == Location(self.lake).scheme == LOCAL and os.path.samefile(self.lake, lake.text)
        return False


def note_file(state: Path) -> Path:
    """The path of the note. ``state``: the project's state folder."""
    return state / _NOTE


def load_note(state: Path) -> ProjectNote:
    """The project's note. It is empty if there is no file. Raises SettingsError if the file cannot be read."""
    try:
        found = json.loads(note_file(state).read_text())
        return ProjectNote(_text(found["lake"]), _text(found["log"]), tuple(str(thing) for thing in found["made"]))
    except FileNotFoundError:
        return ProjectNote()
    except (OSError, *MALFORMED):
        do = "delete it, set `lake` to the lake of this project, and run `pgcdc setup`"
        raise SettingsError("cannot be read", thing=str(note_file(state)), do=do) from None


def change_note(state: Path, **changed: Any) -> None:
    """Save new values for these fields of the note."""
    before = load_note(state)
    after = replace(before, **changed)
    if after != before:
        private_folder(state)
        write_whole(note_file(state), (json.dumps(asdict(after), indent=1) + "\n").encode())


def note_made(state: Path, things: list[str]) -> None:
    """Record things that ``setup`` has created or is about to create on the source."""
    before = load_note(state).made
    change_note(state, made=(*before, *(thing for thing in things if thing not in before)))


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError


def enter_project() -> Settings:
    """Change the current directory to the ``working_directory`` of the code location, if that is a project's folder.
    Returns the settings found in the current directory. Dagster does not change the directory itself: it only puts
    ``working_directory`` first on ``sys.path``, whenever it imports the definitions. Logs a warning if there is no
    saved catalog, because the code location then has no assets."""
    named = Path(sys.path[0] if sys.path else "").absolute()
    if (named / STATE_FOLDER).is_dir() or (named / SETTINGS_FILE).is_file():
        os.chdir(named)
    settings = Settings.load()
    if not settings.catalog_file.is_file():
        logging.getLogger(__name__).warning(
            "there is no saved catalog %s, so this code location has no assets: run `pgcdc setup` in the project's "
            "folder; if that is another folder, set it as `working_directory` of the code location",
            settings.catalog_file.absolute(),
        )
    return settings


def dagster_home() -> Path:
    """The folder ``DAGSTER_HOME``, or else ``./.dagster``. Writes our ``dagster.yaml`` into a new or empty folder."""
    if given := os.environ.get("DAGSTER_HOME"):
        home = Path(given).expanduser().absolute()
        if not home.is_dir():
            raise SettingsError(f"{home} is not a folder", thing="DAGSTER_HOME",
                                do="create it, or unset the variable to use .dagster")  # fmt: skip
        ours = not any(home.iterdir())
    else:
        home, ours = private_folder(Path(DAGSTER_FOLDER).absolute()), True
    config = home / "dagster.yaml"
    if ours and not config.exists():
        config.write_text(INSTANCE_YAML)
    return home


def workspace_file(state: Path) -> Path:
    """Write a workspace file next to the saved catalog, with our package and the project's ``definitions.py``, if
    any."""
    path, own = state.absolute() / "workspace.yaml", OWN_DEFINITIONS.absolute()
    private_folder(path.parent)
    text = WORKSPACE_YAML
    if own.is_file():
        text += (
            "  - python_file:\n"
            f"      relative_path: {json.dumps(str(own))}\n"
            f"      working_directory: {json.dumps(str(own.parent))}\n"
            f"      location_name: {OWN_DEFINITIONS.stem}\n"
        )
    path.write_text(text)
    return path
