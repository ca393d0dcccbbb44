"""Plays a random history with whole syncs. The engine runs in this process, with real receiver processes and with the
Spark session that all tests share."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, event, settings
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import NotReached, NotRepairable
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent, SyncReport
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import fresh_database
from tests.history.steps import History, Operation, Step
from tests.history.tables import Spec
from tests.history.workload import Workload
from tests.journal import Journal, published
from tests.netchanges import assert_net_change, assert_undone
from tests.projectfiles import CATALOG_FILE
from tests.receiving import run_to
from tests.waiting import wait_for

SECONDS = 200.0
"""The longest duration of one sync in seconds."""
WAYS: Sequence[dict[str, Any]] = ({}, {"drain_bytes": 1})
"""Settings of the two ways to receive: through the stream, and through the SQL functions."""


SLOW = settings(
    deadline=None, print_blob=True, database=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
"""Settings of hypothesis for tests of which one example takes seconds. Hypothesis prints a failing example with its
blob (for ``@reproduce_failure``), and does not shrink the example."""


@dataclass
class Project:
    """A project directory with its own database, and the workload and journal of this database."""

    settings: Settings
    conninfo: str
    spark: SparkSession
    workload: Workload
    journal: Journal
    observer: Silent = field(default_factory=Silent)
    written: int = 0
    """The WAL insert position at the start of the last sync."""

    @property
    def lake(self) -> Path:
        return path_of(self.settings.layout.root)

    @property
    def specs(self) -> Sequence[Spec]:
        return self.workload.tables

    def setup(self) -> None:
        save_catalog(setup(self.settings, self.conninfo).catalog, CATALOG_FILE)

    def engine(self, **settings: Any) -> Engine:
        settings = {name: value for name, value in settings.items() if value is not None}
        chosen = self.settings.model_copy(update=settings)
        return Engine(chosen, self.conninfo, self.observer, lambda: self.spark, "test")

    def sync(self, operation: Operation | None = None, *, copy_again: Sequence[Spec] = (), **bounds: Any) -> SyncReport:
        """Runs one sync, which also copies the tables ``copy_again`` again. Fails if the sync sets a table aside."""
        sizes: dict[str, Any] = {}
        if operation is not None:
            sizes = {"batch_bytes": operation.batch_bytes, "range_bytes": 10_000}
            sizes |= WAYS[operation.pick % len(WAYS)]
        self.written = self.insert_position()
        names = [TableName(spec.schema, spec.name) for spec in copy_again]
        report = self.engine(**sizes).sync(Bounds(**bounds), copy_anew=names)
        assert not report.set_aside, report.set_aside
        return report

    def insert_position(self) -> int:
        return self.position("pg_current_wal_insert_lsn()")

    def position(self, expression: str) -> int:
        row = self.workload.conn.execute(f"SELECT ({expression} - '0/0')::bigint".encode()).fetchone()
        assert row is not None
        return int(row[0])

    def assert_now(self) -> None:
        """Checks that the newest consistent point lists all tables, and that the current mirrors equal the source at
        its LSN."""
        newest, versions = published(self.lake)[-1]
        assert set(versions) == {spec.title for spec in self.specs}
        current = {spec.title: self.version(spec) for spec in self.specs}
        self.journal.assert_equal_at(self.lake, newest, current, self.journal.commits())

    def version(self, spec: Spec) -> int:
        return DeltaTable(str(self.path(spec))).version()

    def path(self, spec: Spec) -> Path:
        return path_of(self.settings.layout.mirror(TableName(spec.schema, spec.name)))


@contextmanager
def project(server: EmbeddedServer, spark: SparkSession, history: History) -> Iterator[Project]:
    """Makes the tables and starts the journal. The project's folder is the current directory during the block."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        fresh_database(server, history.encoding) as database,
        database.connect(client_encoding="UTF8") as conn,
    ):
        workload, tables = Workload(database, history.tables, conn), history.tables
        workload.make()
        settings = Settings(
            source=database.conninfo,
            slot=f"s_{database.name}"[:60],
            tables=("*.*", "-journal.*"),
            batch_seconds=0.2,
            messages=("*",),
        )
        journal = Journal.keep(conn, *(spec.title for spec in tables))
        try:
            yield Project(settings, database.conninfo, spark, workload, journal)
        finally:
            workload.close()


def play(at: Project, history: History) -> None:
    """Plays the whole history, then syncs once more. Compares every consistent point with the journal."""
    for step in history.before:
        at.workload.take(step)
    at.workload.finish(random.Random(0))
    at.setup()
    at.sync()
    rest = [(list(steps), operation) for steps, operation in history.parts]
    for number, (steps, operation) in enumerate(rest):
        for step in steps:
            at.workload.take(step)
        following = rest[number + 1][0] if number + 1 < len(rest) else []
        beside, following[: operation.beside] = following[: operation.beside], []
        at.workload.release()
        event(f"{operation.kind}{' during writes' if beside else ''}")
        _OPERATIONS[operation.kind](at, operation, beside)
        _assert_arrived(at, operation)
    at.workload.finish(random.Random(1))
    written = at.insert_position()
    wait_for(lambda: at.position("pg_current_wal_flush_lsn()") >= written, what="the source's WAL writer")
    run_concurrently(at.sync, lambda: _read_own_writes(at, written))
    at.assert_now()
    assert at.journal.assert_published(at.lake) > 0
    _read(at, written)


def _assert_arrived(at: Project, operation: Operation) -> None:
    """Calls `Lake.wait`, with a timeout of 0, for some recent WAL positions of the source. `wait` may return a point
    below the position only if no table of the point has changed between the point and the position."""
    lake, commits, recent = Lake(at.lake), at.journal.commits(), at.workload.positions[-12:]
    for lsn in random.Random(operation.pick).sample(recent, min(3, len(recent))):
        try:
            point = lake.wait(lsn, timeout=0)
        except NotReached:
            event("wait: not reached")
            continue
        event(f"wait: returns a point {'below' if point.lsn < lsn else 'at or above'} the position")
        for spec in at.specs:
            if point.lsn < lsn and TableName(spec.schema, spec.name) in point.tables:
                then, now = (at.journal.rows_at(spec.title, upto, commits) for upto in (point.lsn, lsn))
                assert then == now, f"{spec.title} has changed between the point {point.lsn} and {Lsn(lsn)}"


def _read_own_writes(at: Project, written: int) -> None:
    """Calls `Lake.wait` for the last written position while a sync runs, as a reader does after its own COMMIT. The
    rows of the point that `wait` returns must equal the source's rows at that position."""
    point = Lake(at.lake).wait(written, SECONDS)
    versions = {spec.title: point.versions[TableName(spec.schema, spec.name)] for spec in at.specs}
    at.journal.assert_equal_at(at.lake, written, versions, at.journal.commits())


def _read(at: Project, written: int) -> None:
    """Checks what readers get besides rows: the point at which everything that was written can be read, net changes
    between random points, and the SQL that undoes the changes since a random point."""
    lake, commits = Lake(at.lake), at.journal.commits()
    # Of several points at one LSN, readers get the newest point. An older point at this LSN may list a table that the
    # newest point lacks, because the table is being copied again.
    now, points = lake.wait(written, timeout=0).lsn, dict(published(at.lake))
    chance = random.Random(len(points))
    for spec in at.specs:
        name = TableName(spec.schema, spec.name)
        listed = sorted(lsn for lsn, versions in points.items() if spec.title in versions)
        parts = [column.name for column in spec.key] + ["region"] * spec.partitioned
        keys = parts if spec.form in ("primary", "full", "index") else []
        for _ in range(2):
            a, b = chance.choice(listed), chance.choice(listed)
            assert_net_change(at.journal, spec.title, lake.diff(name, a, b), a, b, commits, keys)
        if spec.followed and not spec.unlogged:
            a = chance.choice(listed)
            undone = assert_undone(at.workload.conn, at.journal, spec.title, lake.undo(name, a, now), a)
            event(f"undo: {'done' if undone else 'refused by a constraint'}")


# What the project does between the steps -------------------------------------------------------


def _sync(at: Project, operation: Operation, beside: Sequence[Step]) -> None:
    """Runs up to ``cuts`` syncs. The last sync ends at the newest commit. Each earlier sync ends at an LSN in the WAL
    that was written since the last operation. This LSN may be inside a transaction."""
    new = [lsn for lsn in at.workload.positions if lsn > at.written]
    goals = sorted(random.Random(operation.pick).sample(new, min(operation.cuts, len(new)) - 1)) if new else []
    for goal in goals:
        at.sync(operation, until=Lsn(goal))
    _while_running(at, lambda: at.sync(operation), beside)


def _until(at: Project, operation: Operation, beside: Sequence[Step]) -> None:
    """Syncs up to the LSN that the source had after some earlier step. The mirrors must then equal the source at the
    LSN of the newest point."""
    positions = at.workload.positions or [0]
    goal = positions[-1 - operation.pick % len(positions)]
    _while_running(at, lambda: at.sync(operation, until=Lsn(goal)), beside)
    at.assert_now()


def _copy(at: Project, operation: Operation, beside: Sequence[Step]) -> None:
    """Copies some tables again. The copy's snapshot waits for open transactions, so the workload ends all its
    transactions."""
    chosen = [spec for place, spec in enumerate(at.specs) if operation.pick >> place & 1]
    if not beside:
        at.workload.finish(random.Random(operation.pick))
    _while_running(at, lambda: at.sync(operation, copy_again=chosen), beside, finish=True)


def _ahead(at: Project, operation: Operation, beside: Sequence[Step]) -> None:
    """Receives changes without applying them, so that the log is ahead of the mirrors. Then derives and applies the
    changes of one table, up to the end of a batch."""
    start = published(at.lake)[-1][0]
    _receive(at, operation.batch_bytes)
    log = ChangeLog(at.settings.layout).open()
    ends = [batch.end for batch in log.batches(Lsn(start)) if batch.end > start]
    if not ends:
        return
    end = ends[operation.pick % len(ends)]
    spec = at.specs[operation.pick % len(at.specs)]
    name = TableName(spec.schema, spec.name)
    span = LsnRange(Lsn(start), end)
    at.engine().transform_range([name], span)
    at.engine().apply_range([name], span)
    at.journal.assert_equal_at(at.lake, end, {spec.title: at.version(spec)}, at.journal.commits())


def _receive(at: Project, batch_bytes: int) -> None:
    publications = ("pgcdc", "pgcdc_inserts")
    receiver = ReceiverProcess(ReceiverSettings(
        at.conninfo, str(at.settings.layout.root), publications, batch_bytes, 0.2, messages=tuple(at.settings.messages)
    ))  # fmt: skip
    run_to(receiver, Lsn(at.insert_position()))


def _backfill(at: Project, operation: Operation, beside: Sequence[Step]) -> None:
    """Derives and applies some earlier ranges again, for all tables. This must change nothing."""
    at.sync(operation)
    span = _some_ranges(at, operation.pick)
    if span is None:
        return
    at.engine().check_range(span)
    names = [TableName(spec.schema, spec.name) for spec in at.specs]
    at.engine().transform_range(names, span)
    for spec in at.specs:
        _again(at, spec, lambda name: at.engine().apply_range([name], span))
    at.assert_now()


def _repair(at: Project, operation: Operation, beside: Sequence[Step]) -> None:
    at.sync(operation)
    span = _some_ranges(at, operation.pick)
    if span is not None:
        spec = at.specs[operation.pick % len(at.specs)]
        _again(at, spec, lambda name: at.engine().repair(name, span))
        at.assert_now()


def _again(at: Project, spec: Spec, act: Callable[[TableName], Any]) -> bool:
    """Runs ``act`` (a repair, or an apply of an earlier range) for the table. Returns False if pgcdc refuses. pgcdc may
    refuse only if the table has no key, or if the log may lack large values of the table that did not change."""
    try:
        act(TableName(spec.schema, spec.name))
    except NotRepairable:
        assert not spec.keyed or (spec.has_large and not spec.whole_rows), "this repair is possible"
        event("repair refused")
        return False
    return True


def _some_ranges(at: Project, pick: int) -> LsnRange | None:
    spans = at.observer.known_ranges()
    if not spans:
        return None
    first = pick % len(spans)
    last = first + (pick >> 4) % (len(spans) - first)
    return LsnRange(spans[first].start, spans[last].end)


def _while_running(at: Project, run: Callable[[], Any], steps: Sequence[Step], *, finish: bool = False) -> None:
    def act() -> None:
        for step in steps:
            at.workload.take(step)
        at.workload.release()
        if finish:
            at.workload.finish(random.Random(len(steps)))

    if steps:
        run_concurrently(run, act)
    else:
        run()


def run_concurrently(run: Callable[[], Any], act: Callable[[], None]) -> None:
    """Calls ``act`` in this thread while ``run`` is called in another thread. Raises the error if one of the two calls
    fails."""
    failures: list[BaseException] = []

    def running() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)

    thread = threading.Thread(target=running)
    thread.start()
    try:
        act()
    finally:
        thread.join(SECONDS)
    assert not thread.is_alive(), "the run did not end"
    if failures:
        raise failures[0]


_OPERATIONS: dict[str, Callable[[Project, Operation, Sequence[Step]], None]] = {
    "sync": _sync, "until": _until, "copy": _copy, "ahead": _ahead, "backfill": _backfill, "repair": _repair,
}  # fmt: skip
