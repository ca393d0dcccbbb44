"""The source's catalog as setup or sync last read it, saved in the project. Dagster's code location loads nothing
else."""

from __future__ import annotations

import json
from pathlib import Path

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.formats import FORMAT, check_format, reading
from pgcdc_assets.errors import SetupNeeded
from pgcdc_assets.store.durable import sync_folder, write_whole
from pgcdc_assets.store.private import private_folder

_FORMAT = "format"


def save_catalog(catalog: Catalog, path: Path) -> None:
    """Write the catalog whole or not at all, because another process may read it at any time."""
    made = not path.parent.exists()
    private_folder(path.parent)
    write_whole(path, json.dumps({_FORMAT: FORMAT, **catalog.to_json()}, indent=1).encode())
    if made:
        sync_folder(path.parent.parent)


def load_catalog(path: Path) -> Catalog | None:
    """The saved catalog; None if there is none yet. UnknownFormat if it has another format, SetupNeeded if it cannot be
    read."""
    thing = f"saved catalog {path}"
    with reading(thing, SetupNeeded, "delete it, then run `pgcdc setup`"):
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        # Every version states a format. So a file without one is damaged.
        check_format(content.pop(_FORMAT), thing)
        return Catalog.from_json(content)


class SavedCatalog:
    """Reads the saved catalog, and reads it again only if it was written since. Each write makes a new file, so the
    file's inode and time tell whether it was written."""

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
