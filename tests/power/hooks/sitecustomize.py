"""Records every fsync of a Python process, as soon as the fsync has returned. A simulated power cut keeps only what was
recorded.

Python imports this module by itself if ``PYTHONPATH`` names this folder, so a sync, its receiver and Spark's workers
need no change. Each fsync is one JSON line. For a file: its inode, size and change time before the fsync. For a folder:
its inode, and the inodes of its entries by name before the fsync.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

JOURNAL = os.environ.get("PGCDC_TEST_SYNCS")
GONE = ".gone"
"""Suffix of the file that marks a power cut, next to the file with the recorded fsyncs. While the file with this suffix
exists, each fsync fails, also in processes that start later."""
_fsync = os.fsync


def recorded(file: Any, journal: str) -> None:
    descriptor = file if isinstance(file, int) else file.fileno()
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        names = {entry.name: entry.inode() for entry in os.scandir(f"/proc/self/fd/{descriptor}")}
        line: dict[str, object] = {"folder": status.st_ino, "names": names}
    else:
        line = {"file": [status.st_ino, status.st_size, status.st_mtime_ns]}
    line["path"] = os.readlink(f"/proc/self/fd/{descriptor}")
    _fsync(descriptor)
    lines = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(lines, json.dumps(line).encode() + b"\n")
    finally:
        os.close(lines)


if JOURNAL:

    def fsync(file: Any) -> None:
        if os.path.exists(f"{JOURNAL}{GONE}"):
            raise OSError(errno.EIO, "the power is gone")
        recorded(file, str(JOURNAL))

    os.fsync = fsync  # type: ignore[assignment]
