"""Registers mirrors in a catalog of query engines, such as Unity or Glue (the setting ``registry``).

A mirror is registered after the first point that lists it, and again after its columns or comments have changed. Its
entry is removed only when the mirror is deleted (``pgcdc forget``). A file in the lake records what is registered, so
most points need no request to the catalog.

Replication never waits for the catalog, because a separate thread makes the requests. If the catalog does not answer,
``status`` shows a warning, and later points try again. Only at its end, a run waits for its requests."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError, RegistryUnreachable, StoreFailed
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.work import Work
from pgcdc_assets.registry.glue import Glue
from pgcdc_assets.registry.hive import HiveMetastore
from pgcdc_assets.registry.named import NamedTable, Registry, owner
from pgcdc_assets.registry.unity import UnityCatalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store import storage

AGAIN_SECONDS: Final = 60.0
"""Seconds between two tries of one run after a failure, so that a catalog that refuses a table does not get a request
after each turn."""
END_SECONDS: Final = 60.0
"""Seconds that a run waits for its requests at its end. The next run sends the requests that are left."""


@dataclass(frozen=True)
class RegisteredTables:
    """What is registered, and where."""

    place: str = ""
    """The setting ``registry``, and the lake's location. If either changes, all mirrors are registered again."""
    tables: Mapping[TableName, str] = field(default_factory=dict)
    """The registered tables, each with a digest of the columns and comments that its entry shows."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why the last requests failed, by table. Under the empty name: why no request could be made."""

    @classmethod
    def read(cls, layout: Layout) -> Self:
        """The stored record; an empty record if there is no file, or if the file cannot be read."""
        try:
            data = json.loads(storage.read(layout.registered))
            tables = {TableName.parse(name): digest for name, digest in data["tables"].items()}
            return cls(data["place"], tables, dict(data["failed"]))
        except (OSError, StoreFailed, *MALFORMED):
            return cls()

    def save(self, layout: Layout) -> None:
        tables = {str(name): digest for name, digest in self.tables.items()}
        data = {"place": self.place, "tables": tables, "failed": dict(self.failed)}
        storage.replace(layout.registered, json.dumps(data, indent=1).encode())


@dataclass
class _Pass:
    """Some requests to the catalog, made one after another by a separate thread. ``puts``: the mirrors to register;
    ``removals``: the entries to remove, each with the owner that the entry must name."""

    puts: Mapping[TableName, Callable[[], NamedTable]]
    removals: Mapping[TableName, str]
    opened: Callable[[], Registry]
    done: list[TableName] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            with closing(self.opened()) as registry:
                for name, of in self.removals.items():
                    self._one(name, partial(registry.remove, name, of))
                for name, read in self.puts.items():
                    self._one(name, partial(_put, registry, read))
        except PgcdcError as error:
            self.failed[""] = str(error)
        except Exception as error:  # noqa: BLE001 - nothing in this thread may end the run
            self.failed[""] = f"unexpected {type(error).__name__}"

    def _one(self, name: TableName, call: Callable[[], None]) -> None:
        if self.stop.is_set():
            return
        try:
            call()
        except RegistryUnreachable:
            raise
        except PgcdcError as error:
            self.failed[str(name)] = str(error)
        else:
            self.done.append(name)


def _put(registry: Registry, read: Callable[[], NamedTable]) -> None:
    registry.put(read())


class Registration:
    """The registrations of one run. The run's thread makes all calls."""

    def __init__(self, work: Work, registry: Mapping[str, str]) -> None:
        self._work = work
        self._opened = partial(opened_registry, registry, work.session)
        place = place_of(work.settings)
        record = RegisteredTables.read(work.layout)
        self._record = record if record.place == place else RegisteredTables(place)
        self._seen: dict[TableName, Table] = {}
        """The tables that this run has found registered, each with the columns and comments that it had then."""
        self._pass: _Pass | None = None
        self._thread: threading.Thread | None = None
        self._digests: dict[TableName, str] = {}
        self._not_before = 0.0

    def after_point(self, *, removals: bool = False) -> None:
        """Begin the requests that the newest point requires. Does nothing while earlier requests still run, or for
        AGAIN_SECONDS after a failure. ``removals``: also remove the entries of deleted mirrors."""
        self._take()
        if self._pass is not None or time.monotonic() < self._not_before:
            return
        puts, gone = self._due(), self._gone() if removals else {}
        if puts or gone:
            self._pass = _Pass(puts, gone, self._opened)
            self._thread = threading.Thread(target=self._pass.run, name="register", daemon=True)
            self._thread.start()

    def close(self, *, waits: bool) -> None:
        """End the requests. ``waits``: first send the requests that are still due, for at most END_SECONDS."""
        deadline = time.monotonic() + (END_SECONDS if waits else 0)
        while waits and time.monotonic() < deadline:
            self.after_point(removals=True)
            if self._thread is None:
                return
            self._thread.join(deadline - time.monotonic())
        if self._pass is not None:
            self._pass.stop.set()
            self._take()

    def _due(self) -> dict[TableName, Callable[[], NamedTable]]:
        progress = self._work.progress
        found: dict[TableName, Callable[[], NamedTable]] = {}
        newest = progress.points.newest()
        for name in () if newest is None else newest.tables:
            table = progress[name].table if name in progress else None
            seen = self._seen.get(name)
            if table is None or table is seen:
                continue
            digest = digest_of(table)
            if self._record.tables.get(name) == digest:
                self._seen[name] = table
                continue
            self._digests[name] = digest
            found[name] = partial(NamedTable.of, self._work.layout, self._work.identity, name)
        return found

    def _gone(self) -> dict[TableName, str]:
        """The registered tables whose mirrors were deleted. The newest point may still list them."""
        found = {}
        for name in self._record.tables:
            with contained():
                if name not in self._work.progress and not self._work.target.keeps(name):
                    found[name] = owner(self._work.identity, name)
        return found

    def _take(self) -> None:
        """If the requests have ended, record which of them succeeded."""
        ended, thread = self._pass, self._thread
        if ended is None or (thread is not None and thread.is_alive()):
            return
        self._pass = self._thread = None
        tables = dict(self._record.tables)
        for name in ended.done:
            if name in ended.removals:
                tables.pop(name, None)
            else:
                tables[name] = self._digests[name]
        say = partial(self._work.observer.progress, "registry")
        for reason in sorted({*ended.failed.values()} - {*self._record.failed.values()}):
            say(f"a mirror was not registered: {reason}")
        if ended.done:
            say(f"catalog entries that were made, checked or removed: {len(ended.done)}")
        self._not_before = time.monotonic() + AGAIN_SECONDS if ended.failed else 0.0
        self._record = replace(self._record, tables=tables, failed=ended.failed)
        try:
            self._record.save(self._work.layout)
        except (OSError, StoreFailed) as error:
            say(f"{self._work.layout.registered}: cannot be written: {type(error).__name__}")


@contextmanager
def registering(work: Work) -> Iterator[None]:
    """Register mirrors during a block: at its begin, after each point, and at its end. Does nothing without the setting
    ``registry``."""
    if not work.settings.registry:
        yield
        return
    registration = Registration(work, work.settings.registry)
    work.after_point = registration.after_point
    registration.after_point(removals=True)
    try:
        yield
    except BaseException:
        registration.close(waits=False)
        raise
    registration.close(waits=True)


def opened_registry(setting: Mapping[str, str], session: SparkOnDemand) -> Registry:
    """The catalog that the setting names. RegistryUnreachable if a connection is needed and cannot be made."""
    if "unity" in setting:
        return UnityCatalog(setting["unity"], setting["catalog"])
    if "glue" in setting:
        return Glue(setting["glue"], setting.get("prefix", ""))
    return HiveMetastore(setting["hive"], setting.get("prefix", ""), session)


def place_of(settings: Settings) -> str:
    """See :attr:`RegisteredTables.place`."""
    return json.dumps([sorted((settings.registry or {}).items()), str(settings.layout.root)])


def digest_of(table: Table) -> str:
    """A digest of what an entry shows of a table."""
    columns: Sequence[Any] = [(one.attnum, one.name, one.type, one.not_null) for one in table.columns]
    return hashlib.sha256(repr((columns, table.comments)).encode()).hexdigest()[:16]
