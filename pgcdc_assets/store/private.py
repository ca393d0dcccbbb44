"""Folders that only their owner may enter. They contain copies of all rows, for which the source's permissions no
longer apply.

Files and folders inside have the usual modes. To share a folder, change the mode of the folder itself
(docs/operations.md).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import IO, Final

OWNER_ONLY: Final = 0o700
_LOG_BYTES: Final = 10 << 20


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter. An existing folder keeps its mode. Missing parent folders are made
    with the usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(OWNER_ONLY)
    return path


def private_log(path: Path) -> IO[bytes]:
    """Open a log file in a private folder for appending. A log of more than 10 MiB is first renamed to ``<name>.1``,
    which replaces an earlier ``<name>.1``."""
    private_folder(path.parent)
    with suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")
