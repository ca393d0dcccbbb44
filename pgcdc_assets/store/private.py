"""Folders that their owner alone may enter: copies of all rows lie in them, without the source's rights on rows.

What is made inside has usual modes: to share a folder it is enough to open the folder itself (docs/operations.md).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import IO, Final

OWNER_ONLY: Final = 0o700
_LOG_BYTES: Final = 10 << 20


def private_folder(path: Path) -> Path:
    """Make a folder that its owner alone may enter. An existing one keeps its mode; those above are made as usual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(OWNER_ONLY)
    return path


def private_log(path: Path) -> IO[bytes]:
    """Open a log of a private folder for appending. A log of more than 10 MiB is first moved to ``<name>.1``, in place
    of the one that was moved before."""
    private_folder(path.parent)
    with suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")
