"""Folders that their owner alone may enter: copies of all rows lie in them, without the source's rights on rows.

What is made inside has usual modes: to share a folder it is enough to open the folder itself (docs/operations.md).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

OWNER_ONLY: Final = 0o700


def private_folder(path: Path) -> Path:
    """Make a folder that its owner alone may enter. An existing one keeps its mode; those above are made as usual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(OWNER_ONLY)
    return path
