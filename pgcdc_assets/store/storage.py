"""The functions that read and write the lake's files. Most functions only call the method of the same name in the
file's store; :mod:`pgcdc_assets.store.base` describes these methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final

import pyarrow as pa

from pgcdc_assets.core.layout import LOCAL, Location
from pgcdc_assets.store.base import Entry, Guard, Store
from pgcdc_assets.store.local import LocalStore
from pgcdc_assets.store.scratch import DraftFile, Scratch, write_scratch

_OBJECTS: Final = ("s3", "abfss", "gs")
"""URL schemes that :mod:`pgcdc_assets.store.objects` serves. The module is imported only if a lake has such a URL."""
_STORES: Final[dict[str, Store]] = {LOCAL: LocalStore()}
_GUARDS: Final[dict[Location, Guard]] = {}


def store_of(place: Location) -> Store:
    """The store of a place. Raises ValueError if no store serves the place's URL scheme."""
    return _served(place.scheme)


def _served(scheme: str) -> Store:
    if scheme in _OBJECTS and scheme not in _STORES:
        from pgcdc_assets.store.objects import ObjectStore

        _STORES.update(dict.fromkeys(_OBJECTS, ObjectStore()))
    try:
        return _STORES[scheme]
    except KeyError:
        raise ValueError(f"URLs that begin with {scheme}:// are not supported") from None


@contextmanager
def guarded(folder: Location, guard: Guard) -> Iterator[None]:
    """During the block, each write of this process to files inside the folder first calls :meth:`Guard.check`."""
    _GUARDS[folder] = guard
    try:
        yield
    finally:
        del _GUARDS[folder]


def _written(place: Location) -> Store:
    """The store of a place that is about to be written. Raises LeaseLost if a guard forbids the write."""
    for guard in _guards(place):
        guard.check()
    return store_of(place)


def assure(folder: Location) -> None:
    """Raises LeaseLost if another process may have taken the lease that guards the folder (:func:`guarded`)."""
    for guard in _guards(folder / "any"):
        guard.check()


def _guards(place: Location) -> list[Guard]:
    return [guard for folder, guard in list(_GUARDS.items()) if place.text.startswith(f"{folder}/")]


def read(at: Location, start: int = 0, size: int | None = None) -> bytes:
    return store_of(at).read(at, start, size)


def pace(folder: Location) -> float:
    return store_of(folder).pace


def open_file(at: Location) -> pa.NativeFile:
    return store_of(at).open(at)


def head(at: Location) -> Entry | None:
    return store_of(at).head(at)


def exists(at: Location) -> bool:
    """Whether there is a file at this place. False for a folder."""
    return head(at) is not None


def list_after(folder: Location, name: str = "") -> list[Entry]:
    return store_of(folder).list_after(folder, name)


def walk(folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
    return store_of(folder).walk(folder, hidden=hidden)


def together(folder: Location, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """See :meth:`.Store.together`. All calls must be to the folder's store."""
    return store_of(folder).together(calls)


def draft(to: Location) -> DraftFile:
    return DraftFile(store_of(to).draft(to))


def scratch(folder: Location) -> Scratch:
    return Scratch(store_of(folder).scratch(folder))


def fetch(at: Location, to: Location) -> None:
    """Copy a file to this machine, for code that can read only local files. The copy need not survive a power cut."""
    write_scratch(to, read(at))


def put(made: DraftFile, to: Location) -> None:
    _written(to).put(made.path, to)


def create(to: Location, content: bytes) -> None:
    try:
        _written(to).create(to, content)
    except FileExistsError:
        for guard in _guards(to):
            guard.confirm()
        raise


def replace(to: Location, content: bytes) -> None:
    _written(to).replace(to, content)


def copy(source: Location, to: Location) -> None:
    """Copy a file, also from one store to a different store. No file may exist at ``to``."""
    if source.scheme == to.scheme:
        _written(to).copy(source, to)
    else:
        create(to, read(source))


def move(source: Location, to: Location) -> None:
    copy(source, to)
    delete([source])


def delete(places: Iterable[Location]) -> None:
    for _, some in groupby(places, key=lambda place: place.scheme):
        gone = list(some)
        _written(gone[0]).delete(gone)


def settle(places: Iterable[Location]) -> None:
    for scheme, some in groupby(places, key=lambda place: place.scheme):
        _served(scheme).settle(list(some))


def make_private(root: Location) -> None:
    store_of(root).make_private(root)


def probe(root: Location) -> None:
    store_of(root).probe(root)


def free_bytes(root: Location) -> int | None:
    return store_of(root).free_bytes(root)


def delete_folder(folder: Location) -> None:
    _written(folder).delete_folder(folder)


def delete_empty(folder: Location) -> None:
    store_of(folder).delete_empty(folder)


def move_folder(source: Location, to: Location) -> None:
    _written(to).move_folder(source, to)


def options(place: Location) -> dict[str, str]:
    """See :meth:`.Store.options`."""
    return store_of(place).options()
