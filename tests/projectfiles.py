"""Paths of the files that a project saves in the working directory, if the setting ``state`` has its default."""

from typing import Final

from pgcdc_assets.project import note_file
from pgcdc_assets.settings import STATE_FOLDER

CATALOG_FILE: Final = STATE_FOLDER / "catalog.json"
NOTE_FILE: Final = note_file(STATE_FOLDER)
