"""The catalog as setup and sync last saw it, saved in the project: all that Dagster's code location loads."""

from __future__ import annotations

import json
from pathlib import Path

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.formats import FORMAT, check_format
from pgcdc_assets.store.durable import sync_folder, write_whole
from pgcdc_assets.store.private import private_folder

_FORMAT = "format"


def save_catalog(catalog: Catalog, path: Path) -> None:
    """Write it whole or not at all: readers may come at any time."""
    made = not path.parent.exists()
    private_folder(path.parent)
    write_whole(path, json.dumps({_FORMAT: FORMAT, **catalog.to_json()}, indent=1).encode())
    if made:
        sync_folder(path.parent.parent)


def load_catalog(path: Path) -> Catalog | None:
    """The saved catalog; None if there is none yet. UnknownFormat if it has another format."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    check_format(content.pop(_FORMAT, None), f"saved catalog {path}")
    return Catalog.from_json(content)
