"""Writes down every fsync of a Python process, once it has returned: what a power cut then leaves.

Python imports this by itself where ``PYTHONPATH`` names this folder, so that a run, its receiver and Spark's
workers need to know nothing of it. A line for a file: its inode, size and time of change as they were before the
sync. A line for a folder: its inode, and the inodes by name before it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

JOURNAL = os.environ.get("PGCDC_TEST_SYNCS")
GONE = ".gone"
"""Ends the name of the file that says so, beside the journal: whoever is started after a cut syncs nothing either."""
_fsync = os.fsync


def recorded(file: Any, journal: str) -> None:
    """fsync, and a line of it."""
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
