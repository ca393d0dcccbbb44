"""Registers mirrors in a catalog of query engines (the setting ``registry``), after the points that need it.

A mirror is registered once a point lists it, and again when its columns or comments change. Its entry is removed when
the mirror itself is deleted (``pgcdc forget``): as long as the rows can be read, the name stays. A file in the lake
records what is registered, so a point that changes nothing sends no request.

Replication never waits for the catalog: a thread of its own makes the requests. A catalog that does not answer is a
warning of ``status``, and later points try again. Only the end of a run waits for the requests that it began."""

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
"""After a failure, points try again at most this often in one run, so that a catalog that refuses a table is not asked
each second."""
END_SECONDS: Final = 60.0
"""How long the end of a run waits for its requests. The next run sends the rest."""


@dataclass(frozen=True)
class RegisteredTables:
    """What is registered, and where."""

    place: str = ""
    """The setting ``registry`` and the lake. If either changes, all mirrors are registered again."""
    tables: Mapping[TableName, str] = field(default_factory=dict)
    """A digest of each registered table's columns and comments."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why tables are not registered, by table. An empty name: the catalog does not answer."""

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
    """One round of requests, made by a thread."""

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
        """The tables whose present columns are registered."""
        self._pass: _Pass | None = None
        self._thread: threading.Thread | None = None
        self._digests: dict[TableName, str] = {}
        self._not_before = 0.0

    def after_point(self, *, removals: bool = False) -> None:
        """Begin the requests that the newest point requires, unless the last ones still run, or failed a moment ago.
        ``removals``: also check which registered mirrors were deleted."""
        self._take()
        if self._pass is not None or time.monotonic() < self._not_before:
            return
        puts, gone = self._due(), self._gone() if removals else {}
        if puts or gone:
            self._pass = _Pass(puts, gone, self._opened)
            self._thread = threading.Thread(target=self._pass.run, name="register", daemon=True)
            self._thread.start()

    def close(self, *, waits: bool) -> None:
        """End the requests. ``waits``: send those that are still due first, for at most END_SECONDS."""
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
        """Record what an ended pass has done."""
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
            say(f"a catalog entry was not made: {reason}")
        if ended.done:
            say(f"catalog entries that were made or checked: {len(ended.done)}")
        self._not_before = time.monotonic() + AGAIN_SECONDS if ended.failed else 0.0
        self._record = replace(self._record, tables=tables, failed=ended.failed)
        try:
            self._record.save(self._work.layout)
        except (OSError, StoreFailed) as error:
            say(f"{self._work.layout.registered}: cannot be written: {type(error).__name__}")


@contextmanager
def registering(work: Work) -> Iterator[None]:
    """Registers mirrors during an operation, after each point, and at its end. Does nothing without the setting."""
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
