"""A store in this process's memory, for tests of code that uses a store. It is the shortest implementation of a store's
contract."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pyarrow as pa

from pgcdc_assets.core.layout import Location
from pgcdc_assets.store import storage
from pgcdc_assets.store.base import HIDDEN, Entry, Store
from pgcdc_assets.store.scratch import draft_for, folder_for


def lake_in_memory() -> Location:
    """The root of a new lake in memory."""
    storage._STORES.setdefault("memory", MemoryStore())
    return Location.of(f"memory://{uuid.uuid4().hex}/lake")


@dataclass(frozen=True)
class _Held:
    content: bytes
    at: float


class MemoryStore(Store):
    def __init__(self) -> None:
        self._files: dict[str, _Held] = {}
        self._lock = Lock()

    def read(self, at: Location, start: int = 0, size: int | None = None) -> bytes:
        content = self._held(at).content
        return content[start:] if size is None else content[start : start + size]

    def open(self, at: Location) -> pa.NativeFile:
        return pa.BufferReader(self._held(at).content)

    def head(self, at: Location) -> Entry | None:
        held = self._files.get(at.text)
        return None if held is None else _entry(at.name, held)

    def list_after(self, folder: Location, name: str = "") -> list[Entry]:
        here = [entry for entry in self.walk(folder, hidden=True) if "/" not in entry.name and entry.name > name]
        return sorted(here, key=lambda entry: entry.name)

    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        prefix = f"{folder}/"
        with self._lock:
            found = [(at.removeprefix(prefix), held) for at, held in self._files.items() if at.startswith(prefix)]
        for name, held in found:
            if hidden or not any(part.startswith(HIDDEN) for part in name.split("/")):
                yield _entry(name, held)

    def draft(self, to: Location) -> str:
        return draft_for(to)

    def scratch(self, folder: Location) -> str:
        return folder_for(folder)

    def put(self, draft: str, to: Location) -> None:
        self.replace(to, Path(draft).read_bytes())
        Path(draft).unlink()

    def create(self, to: Location, content: bytes) -> None:
        with self._lock:
            if to.text in self._files:
                raise FileExistsError(f"{to} exists")
            self._files[to.text] = _Held(bytes(content), time.time())

    def replace(self, to: Location, content: bytes) -> None:
        with self._lock:
            self._files[to.text] = _Held(bytes(content), time.time())

    def copy(self, source: Location, to: Location) -> None:
        self.create(to, self._held(source).content)

    def delete(self, places: Iterable[Location]) -> None:
        with self._lock:
            for place in places:
                self._files.pop(place.text, None)

    def settle(self, places: Iterable[Location]) -> None:
        """Nothing to do: no file outlives the process."""

    def _held(self, at: Location) -> _Held:
        try:
            return self._files[at.text]
        except KeyError:
            raise FileNotFoundError(f"{at} does not exist") from None


def _entry(name: str, held: _Held) -> Entry:
    return Entry(name, len(held.content), held.at, held.at)
