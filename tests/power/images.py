"""Images: an image is one possible state of a folder after a power cut.

An image has everything that was synced (fsync), and any part of the changes that were not synced.

POSIX allows the following. A name that was added or removed since its folder's last fsync exists or does not exist,
independently of other names. A replaced name has the old or the new file. The content of a file that changed since the
file's own fsync is complete, empty, cut (also between two lines) or partly zeros.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Stamp = tuple[int, int, int]
"""Inode, size and change time of a file."""


@dataclass
class Folder:
    inode: int
    files: dict[str, Stamp] = field(default_factory=dict)
    folders: dict[str, Folder] = field(default_factory=dict)

    def names(self) -> dict[str, int]:
        return {**{name: stamp[0] for name, stamp in self.files.items()},
                **{name: folder.inode for name, folder in self.folders.items()}}  # fmt: skip


@dataclass
class Syncs:
    """Everything that was synced (fsync) at a moment: files, and the entries of folders by the folder's inode."""

    files: frozenset[Stamp]
    folders: Mapping[int, Mapping[str, int]]


@dataclass
class Disk:
    """A folder to which other processes write, with all file contents that it had. It is read while these processes are
    stopped."""

    root: Path
    journal: Path
    contents: dict[Stamp, bytes] = field(default_factory=dict)
    _files: set[Stamp] = field(default_factory=set)
    _folders: dict[int, Mapping[str, int]] = field(default_factory=dict)
    _read: int = 0

    def __post_init__(self) -> None:
        """Files that exist at the start count as synced."""
        self._take_as_synced(self.look())

    def look(self) -> Folder:
        return self._look(self.root)

    def count(self) -> int:
        """The number of recorded fsyncs. Fsyncs of the change log do not count, because a receiver makes dozens of them
        a second."""
        if not self.journal.exists():
            return 0
        return sum(b"/change_log" not in line for line in self.journal.read_bytes().splitlines())

    def syncs(self) -> Syncs:
        if self.journal.exists():
            with self.journal.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    record = json.loads(line)
                    if "file" in record:
                        inode, size, changed = record["file"]
                        self._files.add((inode, size, changed))
                    else:
                        self._folders[record["folder"]] = record["names"]
        return Syncs(frozenset(self._files), dict(self._folders))

    def _look(self, path: Path) -> Folder:
        found = Folder(path.stat().st_ino)
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                found.folders[entry.name] = self._look(Path(entry.path))
                continue
            status = entry.stat(follow_symlinks=False)
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            found.files[entry.name] = stamp
            if stamp not in self.contents:
                self.contents[stamp] = Path(entry.path).read_bytes()
        return found

    def _take_as_synced(self, folder: Folder) -> None:
        self._folders[folder.inode] = folder.names()
        self._files |= set(folder.files.values())
        for inner in folder.folders.values():
            self._take_as_synced(inner)


class Image:
    """One possible result of a power cut at a moment."""

    def __init__(self, disk: Disk, folder: Folder, syncs: Syncs, chance: random.Random) -> None:
        self._contents, self._folder, self._syncs, self._chance = disk.contents, folder, syncs, chance
        self._share = chance.choice([0.05, 0.2, 0.5, 0.9, 1.0])
        """The share of unsynced changes that is lost."""
        self._of: dict[int, bytes] = {}
        """File contents by inode, because a file with two names has only one content."""
        self.lost: list[str] = []

    def write(self, target: Path) -> None:
        self._restore(self._folder, target, "")

    def _restore(self, folder: Folder, target: Path, place: str) -> None:
        target.mkdir(parents=True)
        durable = self._syncs.folders.get(folder.inode, {})
        for name, stamp in sorted(folder.files.items()):
            before = durable.get(name)
            if before != stamp[0] and self._loses():
                self.lost.append(f"name {place}{name}")
                if before is not None and (old := self._last_of(before)) is not None:
                    (target / name).write_bytes(old)
                continue
            (target / name).write_bytes(self._content(stamp, f"{place}{name}"))
        for name in sorted(durable.keys() - folder.names().keys()):
            if (old := self._last_of(durable[name])) is not None and self._loses():
                self.lost.append(f"removal {place}{name}")
                (target / name).write_bytes(old)
        for name, inner in sorted(folder.folders.items()):
            if durable.get(name) != inner.inode and self._loses():
                self.lost.append(f"folder {place}{name}")
                continue
            self._restore(inner, target / name, f"{place}{name}/")

    def _loses(self) -> bool:
        return self._chance.random() < self._share

    def _last_of(self, inode: int) -> bytes | None:
        """The last synced content of a file that no longer has a name."""
        found = [stamp for stamp in self._contents if stamp[0] == inode and stamp in self._syncs.files]
        return self._contents[max(found, key=lambda stamp: stamp[2])] if found else None

    def _content(self, stamp: Stamp, name: str) -> bytes:
        content = self._contents[stamp]
        if stamp in self._syncs.files or not content:
            return content
        if stamp[0] not in self._of:
            self._of[stamp[0]] = content
            if self._loses():
                kind = self._chance.choice(["empty", "zeros", "cut", "cut at a line", "zeros behind", "zeros within"])
                self.lost.append(f"content {name}: {kind}")
                self._of[stamp[0]] = self._torn(content, kind)
        return self._of[stamp[0]]

    def _torn(self, content: bytes, kind: str) -> bytes:
        at = self._chance.randrange(len(content))
        match kind:
            case "empty":
                return b""
            case "zeros":
                return bytes(len(content))
            case "cut":
                return content[:at]
            case "cut at a line":
                ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
                return content[: self._chance.choice(ends)] if ends else content[:at]
            case "zeros behind":
                return content[:at] + bytes(len(content) - at)
            case _:
                end = min(len(content), at + 512)
                return content[:at] + bytes(end - at) + content[end:]


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def described(lost: Iterable[str]) -> str:
    return "\n".join(f"  lost: {one}" for one in lost)
