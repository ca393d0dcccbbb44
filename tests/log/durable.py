"""Computes what remains of a folder after a crash of the machine: only what was fsynced.

The rules are the weakest that POSIX allows. A file has the content that it had at its last fsync, or is empty if it was
never fsynced. A folder has the names that it had at its own last fsync.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Disk:
    """Records which files and folders were fsynced. The test must replace ``os.fsync`` by the method ``fsync``;
    ``really`` is the original ``os.fsync``. The folder ``root`` must be empty at the start. The folder itself counts as
    durable."""

    root: Path
    really: Callable[[int], None]
    contents: dict[int, bytes] = field(default_factory=dict)
    """Durable content of files, by inode."""
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    """For each fsynced folder, by its inode: the names of its entries and their inodes."""
    folders: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fsync(self, descriptor: int) -> None:
        path, status = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor)
        self.really(descriptor)
        with self._lock:
            if not stat.S_ISDIR(status.st_mode):
                self.contents[status.st_ino] = path.read_bytes()
                return
            entries = list(os.scandir(path))
            self.names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
            self.folders |= {entry.inode() for entry in entries if entry.is_dir(follow_symlinks=False)}

    def left(self, target: Path) -> Path:
        """Copies to ``target`` what would remain of ``root`` if the machine crashed now."""
        with self._lock:
            self._restore(self.root.stat().st_ino, target)
        return target

    def _restore(self, folder: int, target: Path) -> None:
        target.mkdir(parents=True)
        for name, inode in self.names.get(folder, {}).items():
            if inode in self.folders:
                self._restore(inode, target / name)
            else:
                (target / name).write_bytes(self.contents.get(inode, b""))
