"""Makes files survive a power cut. A file's content survives once the file is fsynced, its name once its folder is.

Without these calls the file may be missing after a power cut, or its content may be empty, truncated, zeros, or the old
content. Neither pyarrow, nor delta-rs, nor Spark syncs anything.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

AT_A_TIME: Final = 8
"""How many syncs of one call run at the same time. The file system's journal commits them together, too."""
_UNABLE: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""Errors of network and user-space file systems that cannot sync folders. On these, names are durable without a sync,
or never."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file durably, whole or not at all, whenever another process reads it or the power fails.

    An existing file keeps its mode, and a symbolic link to it stays a link.
    """
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content)
        if path.exists():
            shutil.copymode(path, draft)
        sync_file(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. An fsync of a file does not make its name durable."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise


def sync_all(paths: Iterable[Path]) -> None:
    """Sync several files and folders, a few at a time."""
    wanted = list(dict.fromkeys(paths))
    if len(wanted) < 2:
        for path in wanted:
            _sync(path)
        return
    with ThreadPoolExecutor(min(AT_A_TIME, len(wanted)), thread_name_prefix="fsync") as pool:
        list(pool.map(_sync, wanted))


def _sync(path: Path) -> None:
    (sync_folder if path.is_dir() else sync_file)(path)
