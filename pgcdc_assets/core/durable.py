"""What survives a power cut: a file's content once it is fsynced, its name once its folder is.

Until then either may be missing, and the content may be empty, cut, zeros, or what was there before.
Neither pyarrow, nor delta-rs, nor Spark syncs anything.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

AT_A_TIME: Final = 8
"""Syncs of one call under way together: a file system's journal commits them together, too."""
_UNABLE: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""Some file systems, of networks or in user space, sync no folders: their names are durable by themselves, or never."""


def write_whole(path: Path, text: str) -> None:
    """Write a file durably, whole or not at all: readers may come, and the power go, at any time.

    A file that is there keeps its mode, and a link to it stays one.
    """
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(text)
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


def sync_files(paths: Iterable[Path]) -> None:
    """Sync several files, a few at a time."""
    _together(sync_file, paths)


def sync_folders(paths: Iterable[Path]) -> None:
    """Sync several folders."""
    _together(sync_folder, paths)


def up_to(folder: Path, root: Path) -> list[Path]:
    """The folder and those that it stands in, to the one that holds ``root``: what makes a new folder durable."""
    return [folder, *(above for above in folder.parents if above == root.parent or root in (above, *above.parents))]


def _together(sync: Callable[[Path], None], paths: Iterable[Path]) -> None:
    wanted = list(dict.fromkeys(paths))
    if len(wanted) < 2:
        for path in wanted:
            sync(path)
        return
    with ThreadPoolExecutor(min(AT_A_TIME, len(wanted)), thread_name_prefix="fsync") as pool:
        list(pool.map(sync, wanted))
