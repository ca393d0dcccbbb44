"""Files on this machine that survive a power cut, and folders that only their owner may enter.

A file's content survives a power cut once the file is fsynced, and its name once its folder is fsynced. Otherwise the
file may be missing, empty, truncated, full of zeros, or old. Neither pyarrow nor delta-rs nor Spark fsyncs anything.

The lake's folders are private because they contain copies of all rows, which the source's permissions do not protect.
Files and folders inside have the usual modes. To share a folder, change the mode of the folder itself
(docs/guides/maintenance.md).
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

AT_A_TIME: Final = 8
"""How many fsyncs of one call run at the same time. The file system's journal then writes them together."""
_UNABLE: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""Errors of network and user-space file systems on which folders cannot be fsynced. On these file systems, file names
are durable at once, or cannot be made durable."""


OWNER_ONLY: Final = 0o700
_LOG_BYTES: Final = 10 << 20
_ROTATE_SECONDS: Final = 10.0


def write_whole(path: Path, content: bytes) -> None:
    """Write a file durably. Other processes see the old file or the complete new content, even after a power cut. An
    existing file keeps its mode. If ``path`` is a symbolic link, its target is written."""
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
    """Make a file's content, or the names in a folder, durable."""
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
    """Make several files and folders durable, up to AT_A_TIME in parallel."""
    wanted = list(dict.fromkeys(paths))
    if len(wanted) < 2:
        for path in wanted:
            _sync(path)
        return
    with ThreadPoolExecutor(min(AT_A_TIME, len(wanted)), thread_name_prefix="fsync") as pool:
        list(pool.map(_sync, wanted))


def _sync(path: Path) -> None:
    (sync_folder if path.is_dir() else sync_file)(path)


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may enter. An existing folder keeps its mode. New parent folders have the
    usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(OWNER_ONLY)
    return path


def private_log(path: Path) -> IO[bytes]:
    """Open a log file in a private folder for appending. A log above 10 MiB is first renamed to ``<name>.1``, replacing
    that file."""
    private_folder(path.parent)
    with suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(_earlier(path))
    return path.open("ab")


def rotate(path: Path) -> None:
    """Copy a log above 10 MiB to ``<name>.1``, then truncate it. The log is not renamed, because Java and the receiver
    keep the file open, and would write to the renamed file. Lines that are written between copy and truncation are
    lost."""
    with suppress(OSError):
        if path.stat().st_size > _LOG_BYTES:
            shutil.copyfile(path, _earlier(path))
            os.truncate(path, 0)


@contextmanager
def rotated(path: Path) -> Iterator[None]:
    """During the block, calls :func:`rotate` every ten seconds."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(_ROTATE_SECONDS):
            rotate(path)

    thread = threading.Thread(target=work, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
