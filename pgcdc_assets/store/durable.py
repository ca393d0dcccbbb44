"""What survives a power cut: a file's content once it is fsynced, its name once its folder is.

Until then either may be missing, and the content may be empty, cut, zeros, or what was there before.
Neither pyarrow, nor delta-rs, nor Spark syncs anything.
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
"""Syncs of one call that run at the same time: a file system's journal commits them together, too."""
_UNABLE: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""Errors of file systems, of networks or in user space, that sync no folders: their names are durable by themselves, or
never."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file durably, whole or not at all: readers may come, and the power go, at any time.

    A file that is there keeps its mode, and a link to it stays one.
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
    """Make the content of a file durable, or of a folder: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a file's own fsync does not."""
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
