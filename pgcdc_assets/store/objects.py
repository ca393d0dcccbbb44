"""The store for a lake in S3 or a compatible store, in Azure Blob Storage, or in Google Cloud Storage. Uses the library
obstore.

Each file is an object. The object is complete and durable when the store acknowledges its PUT. Credentials, endpoint
and region come only from the environment, the instance role or the workload identity of the process. A place (the URL
of a file) contains no credentials.

The answer to a request can be lost after the store has executed the request. Reads, replacements and deletions are then
simply repeated. But a repeated PUT that must create the object fails, because the first attempt created it. So after a
lost answer, the existing object is read and compared with the content. This works because no two writers write the same
content: a commit, for example, contains a random id.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import StoreFailed
from pgcdc_assets.store.base import HIDDEN, Entry, Store
from pgcdc_assets.store.scratch import draft_for, folder_for

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Bucket

ONE_PUT: Final = 64 << 20
"""A file of up to this many bytes is read into memory and sent in one request. A larger file is sent in parts."""
_PART: Final = 16 << 20
_PATIENCE: Final = 60.0
"""A failed or unanswered request is tried again for this many seconds. This is less than the time for which a lease
lasts without renewal."""
_RETRIES: Final = 1000
"""More retries than are possible within ``_PATIENCE``, so that only the time limits them."""
_AT_A_TIME: Final = 16
"""How many requests of :meth:`ObjectStore.together` a process sends at the same time."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_TIMEOUT: Final = "120s"
"""The time limit for one request, including its body."""
_QUERY: Final = re.compile(r"\?\S*")
"""Matches the query of a URL in an error's text, which is removed because on Azure it can contain a signature."""
_ANSWERED: Final = re.compile(r"<Message>(.*?)</Message>")
_TAIL: Final = 256 << 10
"""How many bytes at a file's end are read when the file is opened. This is enough for the footer of a Parquet file, or
for all of a small file."""
_AZURE: Final = "abfss"
"""Azure's URL scheme. On Azure, the last bytes of a file can be read only if its size is known."""
_NO_BUCKET: Final = re.compile("NoSuchBucket|ContainerNotFound|FilesystemNotFound|specified bucket does not exist")
_REFUSED: Final = re.compile("status code: 40[13]")
"""Matches the error of a listing without permission, which obstore does not report as a permission error."""
_NO_ROLE: Final = re.compile(r"//(169\.254\.\d+\.\d+|metadata\.google\.internal)\b")
"""Matches the addresses at which obstore asks for the machine's role if the environment contains no credentials."""
_RIGHTS: Final = "use credentials with the right to list, get, put and delete there"
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


class ObjectStore(Store):
    pace = 1.0

    def read(self, at: Location, start: int = 0, size: int | None = None) -> bytes:
        bucket, key = _bucket_of(at)
        if size == 0:
            return b""
        with _translated(at):
            if size is not None:
                return bytes(obstore.get_range(bucket, key, start=start, length=size))
            options: Any = {"range": {"offset": start}} if start else None
            return bytes(obstore.get(bucket, key, options=options).bytes())

    def open(self, at: Location) -> pa.NativeFile:
        return pa.PythonFile(RangeFile(self, at), mode="r")

    def tail(self, at: Location, size: int) -> tuple[bytes, int]:
        """Returns the last ``size`` bytes of the file (all bytes if it is smaller), and the file's size."""
        bucket, key = _bucket_of(at)
        with _translated(at):
            if at.scheme == _AZURE:
                whole = obstore.head(bucket, key)["size"]
                start = max(0, whole - size)
                return bytes(obstore.get_range(bucket, key, start=start, end=whole)) if whole else b"", whole
            found = obstore.get(bucket, key, options={"range": {"suffix": size}})
            return bytes(found.bytes()), found.meta["size"]

    def head(self, at: Location) -> Entry | None:
        bucket, key = _bucket_of(at)
        try:
            with _translated(at):
                return _entry(at.name, obstore.head(bucket, key))
        except FileNotFoundError:
            return None

    def list_after(self, folder: Location, name: str = "") -> list[Entry]:
        # Check the names again: some servers ignore the name after which the listing should start.
        found = [entry for entry in self._listed(folder, name) if "/" not in entry.name and entry.name > name]
        return sorted(found, key=lambda entry: entry.name)

    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        for entry in self._listed(folder):
            if hidden or not any(part.startswith(HIDDEN) for part in entry.name.split("/")):
                yield entry

    def _listed(self, folder: Location, after: str = "") -> Iterator[Entry]:
        bucket, key = _bucket_of(folder)
        prefix = f"{key}/" if key else ""
        with _translated(folder):
            for some in obstore.list(bucket, key or None, offset=f"{prefix}{after}" if after else None):
                yield from (_entry(found["path"].removeprefix(prefix), found) for found in some)

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return list(_pool(os.getpid()).map(lambda call: call(), calls))

    def draft(self, to: Location) -> str:
        return draft_for(to)

    def scratch(self, folder: Location) -> str:
        return folder_for(folder)

    def put(self, draft: str, to: Location) -> None:
        bucket, key = _bucket_of(to)
        whole = os.stat(draft).st_size <= ONE_PUT
        _overwrite(to, lambda: obstore.put(bucket, key, Path(draft), use_multipart=not whole, chunk_size=_PART))
        os.unlink(draft)

    def create(self, to: Location, content: bytes) -> None:
        unsure = False
        bucket, key = _bucket_of(to, once=True)
        for last in _attempts():
            try:
                obstore.put(bucket, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                there = self._content(to)
                if there == content and unsure:
                    return
                # If there is no object, try again, because S3 may refuse both of two simultaneous PUTs.
                if there is not None:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to)) from None
                if last:
                    raise _failure(to, error) from None
            except (BaseError, ValueError, FileNotFoundError) as error:
                failed = _failure(to, error)
                if last or not failed.passing:
                    raise failed from None
                unsure = True
            else:
                return

    def _content(self, at: Location) -> bytes | None:
        try:
            return self.read(at)
        except FileNotFoundError:
            return None

    def replace(self, to: Location, content: bytes) -> None:
        bucket, key = _bucket_of(to)
        _overwrite(to, lambda: obstore.put(bucket, key, content, use_multipart=False))

    def copy(self, source: Location, to: Location) -> None:
        """See :meth:`Store.copy`. If two callers copy to the same place at the same time, both may succeed. This is
        safe for data files, because their names are unique."""
        if self.head(to) is not None:
            raise FileExistsError(f"{to} exists")
        bucket, key = _bucket_of(source)
        other, target = _bucket_of(to)
        if other is not bucket:
            self.create(to, self.read(source))
            return
        _overwrite(source, lambda: obstore.copy(bucket, key, target))

    def delete(self, places: Iterable[Location]) -> None:
        by_bucket: dict[str, list[Location]] = {}
        for place in places:
            by_bucket.setdefault(_parts(place)[0], []).append(place)
        for some in by_bucket.values():
            bucket, _ = _bucket_of(some[0])
            with suppress(FileNotFoundError), _translated(some[0]):
                obstore.delete(bucket, [_parts(place)[1] for place in some])

    def settle(self, places: Iterable[Location]) -> None:
        """Does nothing, because an object's name is durable together with its content."""

    def options(self) -> dict[str, str]:
        return {"allow_http": "true"} if _plain_http() else {}


def _plain_http() -> bool:
    """Whether the environment contains an endpoint without TLS, such as a server on this machine."""
    return any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)


def _parts(place: Location) -> tuple[str, str]:
    """Splits a place into the URL of the bucket and the key in the bucket."""
    scheme, _, rest = place.text.partition("://")
    authority, _, key = rest.partition("/")
    return f"{scheme}://{authority}", key


def _bucket_of(place: Location, *, once: bool = False) -> tuple[Bucket, str]:
    url, key = _parts(place)
    try:
        return _bucket(url, once, os.getpid()), key
    except (BaseError, ValueError) as error:
        raise _failure(place, error) from None


@cache
def _bucket(url: str, once: bool, process: int) -> Bucket:
    """``once``: make only one attempt per request. ``process``: the pid, which is part of the cache's key because
    connections and threads do not survive a fork."""
    del process
    retries: Any = (
        {"max_retries": 0} if once else {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_PATIENCE)}
    )
    client: Any = {"timeout": _TIMEOUT, "allow_http": _plain_http()}
    return from_url(url, client_options=client, retry_config=retries)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    del process
    return ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="store")


def _attempts() -> Iterator[bool]:
    """Yields once per attempt: True for the last attempt, which is made when ``_PATIENCE`` is over, and False for all
    others. Sleeps between attempts, longer each time."""
    end, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
    while time.monotonic() < end:
        yield False
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, _LONGEST_PAUSE)
    yield True


def _overwrite(place: Location, send: Callable[[], object]) -> None:
    """Send a request that may be repeated. If the store refuses the request because of a simultaneous request for the
    same object, tries again, which obstore itself does not do. ``place``: the place to name in errors."""
    for last in _attempts():
        with _translated(place):
            try:
                send()
                return
            except AlreadyExistsError:
                if last:
                    raise


def _entry(name: str, found: ObjectMeta) -> Entry:
    at = found["last_modified"].timestamp()
    return Entry(name, found["size"], at, at)


@contextmanager
def _translated(place: Location) -> Iterator[None]:
    """Converts obstore's errors in the block to the errors that :mod:`pgcdc_assets.store.base` lists."""
    try:
        yield
    except FileNotFoundError as error:
        if _NO_BUCKET.search(str(error)):
            raise _failure(place, error) from None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place)) from None
    except (BaseError, ValueError) as error:
        raise _failure(place, error) from None


def _failure(place: Location, error: Exception) -> StoreFailed:
    text = str(error)
    said = _ANSWERED.search(text)
    if _NO_BUCKET.search(text):
        return StoreFailed("the bucket does not exist", thing=_parts(place)[0], do="create it, or change `lake`")
    if _NO_ROLE.search(text):
        what = "no credentials were found in the environment, and this machine has no instance role"
        return StoreFailed(what, thing=str(place), do=_RIGHTS)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or _REFUSED.search(text):
        why = f": {said[1]}" if said else ""
        return StoreFailed(f"the store refused the credentials of the environment{why}", thing=str(place), do=_RIGHTS)
    what = said[1] if said else _QUERY.sub("", text.partition("\n")[0])
    failed = StoreFailed(f"the object store reported: {what}", thing=str(place))
    failed.passing = isinstance(error, GenericError)
    return failed


class RangeFile:
    """A file object for :class:`pyarrow.PythonFile`. Requests ranges of bytes from the store. The last ``_TAIL`` bytes
    of the file are read when it is opened, and kept in memory."""

    def __init__(self, store: ObjectStore, at: Location) -> None:
        self._store = store
        self._place = at
        self._tail, self._size = store.tail(at, _TAIL)
        self._at = 0
        self.closed = False

    def read(self, size: int | None = None) -> bytes:
        left = self._size - self._at
        taken = left if size is None or size < 0 else min(size, left)
        if taken <= 0:
            return b""
        start, self._at = self._at, self._at + taken
        within = start - (self._size - len(self._tail))
        return self._tail[within : within + taken] if within >= 0 else self._store.read(self._place, start, taken)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True
