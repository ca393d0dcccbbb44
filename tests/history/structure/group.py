"""A group: several random histories with schema changes, which share a database, a project and its syncs.

Each history has its own schemas. All histories of a group have the same kind of publication. In each round, every
history executes its steps up to its next sync. Then one sync runs for all histories, and all histories are compared.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import USER, EmbeddedServer
from pgcdc_assets.errors import EmptyPublication, RightLacking, SetupRefused
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent, SyncReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.setup.setup import publication_names, setup
from pgcdc_assets.structure.record import TableState
from tests.fix_postgres import fresh_database
from tests.history.structure import source
from tests.history.structure.changes import ALL_KINDS, granted
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.comparison import Comparison, Failure
from tests.history.structure.generate import CONNECTIONS, History, Kind, columns_history, history
from tests.history.structure.source import Schemas
from tests.history.structure.steprunner import Session, StepRunner
from tests.power.images import described
from tests.power.outages import Outages, outages
from tests.projectfiles import CATALOG_FILE

logger = logging.getLogger(__name__)

KEPT = Path.cwd() / "build" / "histories"
"""If a group fails, its folder is copied here, with its lake and ``syncs.log``."""
SECONDS = 900.0
"""The longest duration of one sync in seconds, on a busy machine."""
PATIENCE = 3.0
"""Seconds that a sync may run while transactions are open. Then the transactions are ended, because a copy waits for
them."""
WAYS: Sequence[dict[str, Any]] = (
    {}, {}, {"drain_bytes": 1}, {"batch_bytes": 1, "range_bytes": 2_000},
)  # fmt: skip
"""Settings of the syncs: to receive from the stream, or through the SQL functions, or in many small turns."""
SIZE = 8
"""Number of histories in a group. The first copy of their tables is the most expensive part, with about 0.3 s a
table."""
TEMPO = 0.3
"""How many seconds the writer waits after each step while a sync runs in follow mode, so that the sync can publish a
point between two steps."""


class Noted(Silent):
    """Writes what the syncs report to the file ``syncs.log`` in the project's folder, with the time."""

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        with Path("syncs.log").open("a") as file:
            file.write(f"{time.time():.3f} {stage}: {message}\n")


@dataclass
class HistoryGroup:
    kind: Kind
    settings: Settings
    conninfo: str
    spark: SparkSession
    runners: Sequence[StepRunner]
    comparison: Comparison
    chance: random.Random
    power: Outages | None = None
    """If set, the power is cut during every sync, and another sync recovers."""
    observer: Silent = field(default_factory=Noted)
    _following: Run | None = None

    def play(self) -> None:
        self.setup()
        self.run()
        for number in range(max(len(runner.history.parts) for runner in self.runners)):
            for runner in self.runners:
                for step in (runner.history.parts[number : number + 1] or ((),))[0]:
                    runner.take(step)
                    self._give_time()
            if self.chance.random() < 0.3:
                self.setup()
            self.run(self._set_aside() if self.chance.random() < 0.6 else ())
            if self.kind.following:
                self._following = Run(self.engine(), follow=True)
        self.finish()
        self.run()
        self.converge()

    def converge(self) -> None:
        """Follows the advice for tables that were set aside: grants, setup and new copies. Then a point must list all
        tables."""
        if self.kind.few:
            self._execute(*(text for one in self.runners for text in granted(one.schemas, one.reader)))
        self.setup()
        self.run(self._set_aside())
        self._note(self.comparison.missing_tables())

    def _execute(self, *statements: str) -> None:
        for statement in statements:
            self.comparison.chronicle.conn.execute(statement.encode())

    def _note(self, found: Sequence[Failure]) -> None:
        for failure in found:
            runner = next(runner for runner in self.runners if failure.schema in runner.schemas.both)
            runner.failures.append(failure.what)
            runner.script.append(f"!! {failure.what}")

    def finish(self) -> None:
        for runner in self.runners:
            runner.finish()

    # Results ----------------------------------------------------------------------------------------

    @property
    def failed(self) -> list[StepRunner]:
        """The runners of the failed histories. In a failed history, a table differs from the source or is missing, and
        nothing reports this."""
        return [runner for runner in self.runners if runner.failures]

    @property
    def done(self) -> Counter[str]:
        return sum((runner.done for runner in self.runners), start=Counter())

    def failure_text(self, *, all_of_them: bool = False) -> str:
        """A text about the failed histories: their SQL, their syncs, and the differences found."""
        return "\n".join("\n  ".join([f"history {runner.history.seed} in {runner.schemas.app}:", *runner.script])
                         for runner in (self.runners if all_of_them else self.failed))  # fmt: skip

    def counts(self) -> str:
        refused = sum(sum(runner.refused.values()) for runner in self.runners)
        followed = sum(not one.copied for one in self.observer.structures)
        found = self.comparison
        return (f"{found.seen} points, {found.listed} tables listed, {dict(found.reported)} not listed, "
                f"{self.done.total()} steps, {refused} refused, {followed} structures followed, "
                f"{len(self.failed)} failed")  # fmt: skip

    # Runs -------------------------------------------------------------------------------------------

    def run(self, again: Sequence[TableName] = ()) -> None:
        """Runs a sync up to the newest commit, then compares all points. ``again``: the tables that the sync copies
        again."""
        self.stop()
        if self.power is not None:
            image = self.power.cut(lambda: self._whole(again))
            for runner in self.runners:
                runner.script.append("-- power cut\n" + described(image.lost))
            self.comparison.forget()
        self._whole(again)
        newest = ConsistentPoints(self.settings.layout).newest()
        for runner in self.runners:
            names = [str(name) for name in again if name.schema in runner.schemas.both]
            runner.script.append(f"-- run to {newest.replay_lsn if newest else None}, copies {names} again")
        self._note(self.comparison.compare())
        if self.kind.scope != "tables" and self.comparison.chronicle.partial:
            # A history has excluded some kinds of changes from the publication that all histories share. Setup does not
            # undo this, because setup repairs only a publication that it created itself.
            self._execute(f"ALTER PUBLICATION {self.settings.publication} SET (publish = '{ALL_KINDS}')")
            self.comparison.chronicle.announce(self.comparison.chronicle.conn)
            self.comparison.chronicle.committed(())

    def _whole(self, again: Sequence[TableName]) -> None:
        run = Run(self.engine(), again=again)
        if not run.ended(PATIENCE):
            self.finish()
        try:
            run.join()
        except EmptyPublication as error:
            # A history that runs alone may have left no table published. The sync must then report this and nothing
            # else.
            self.comparison.reported[str(error)] += 1
        except RightLacking:
            self.comparison.reported["run without a right"] += 1

    def stop(self) -> None:
        if self._following is not None:
            following, self._following = self._following, None
            following.stop()

    def _set_aside(self) -> list[TableName]:
        """Tables that were set aside and are published. Without a publication, a table cannot be copied."""
        conn = self.comparison.chronicle.conn
        names = publication_names(conn, self.settings)
        published = {table.name for table in read_tables(conn, names, self.settings.tables)}
        rows = TableStates(self.settings.layout).all()
        return [name for name, row in rows.items() if row.state is TableState.SET_ASIDE and name in published]

    def setup(self) -> None:
        try:
            save_catalog(setup(self.settings, self.conninfo).catalog, CATALOG_FILE)
        except SetupRefused as error:
            if "may not be" not in str(error):
                raise
            self.comparison.reported["setup without a right"] += 1

    def engine(self) -> Engine:
        settings = self.settings.model_copy(update=self.chance.choice(WAYS))
        return Engine(settings, self.conninfo, self.observer, lambda: self.spark, "test")

    def _give_time(self) -> None:
        if self._following is not None:
            self._following.ended(TEMPO)


class Run:
    def __init__(self, engine: Engine, *, follow: bool = False, again: Sequence[TableName] = ()) -> None:
        self._bounds, self._again = Bounds(follow=follow), again
        self._report: SyncReport | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(engine,), daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._bounds.stop.set()
        self.join()

    def join(self) -> SyncReport:
        assert self.ended(SECONDS), "the run did not end"
        if self._failure is not None:
            raise self._failure
        assert self._report is not None
        return self._report

    def _work(self, engine: Engine) -> None:
        try:
            self._report = engine.sync(self._bounds, copy_anew=self._again)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that joins
            self._failure = error


@contextmanager
def group(
    server: EmbeddedServer, spark: SparkSession, kind: Kind, histories: Sequence[History], power: int | None = None
) -> Iterator[HistoryGroup]:
    """Makes and publishes the tables, and starts the chronicle. The project's folder is the current directory during
    the block. ``power``: the seed of the power cuts, or None for no power cuts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        fresh_database(server, kind.encoding) as database,
        contextlib.ExitStack() as closing,
    ):
        admin = closing.enter_context(database.connect(client_encoding="UTF8"))
        admin.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'".encode())
        places = [Schemas(number) for number in range(len(histories))]
        for history, schemas in zip(histories, places, strict=True):
            source.make(admin, schemas, history.families)
        reader = closing.enter_context(_few(admin, places)) if kind.few else USER
        conninfo = make_conninfo(database.conninfo, user=reader)
        settings = Settings(
            source=conninfo, slot=f"s_{database.name}"[:60], batch_seconds=0.05, range_seconds=0.3,
            messages=("*",),
            tables=tuple(f"{schema}.*" for schemas in places for schema in schemas.both),
        )  # fmt: skip
        if kind.scope != "tables":
            apps = ", ".join(schemas.app for schemas in places)
            carried = "ALL TABLES" if kind.scope == "all" else f"TABLES IN SCHEMA {apps}"
            root = f"publish_via_partition_root = {kind.via_root}"
            admin.execute(f"CREATE PUBLICATION {settings.publication} FOR {carried} WITH ({root})".encode())
        chronicle = Chronicle.begin(
            admin, [schema for schemas in places for schema in schemas.both], settings.publication
        )  # fmt: skip
        runners = []
        for history, schemas in zip(histories, places, strict=True):
            sessions = [Session(name, closing.enter_context(database.connect(client_encoding="UTF8")))
                        for name in "ABC"[:CONNECTIONS]]  # fmt: skip
            for session in sessions:
                session.conn.execute("SET lock_timeout = '30ms'")
            runners.append(StepRunner(history, schemas, settings.publication, kind, reader, sessions, chronicle))
        comparison = Comparison(settings, chronicle, everything=kind.scope != "schema")
        chance = random.Random(f"runs {histories[0].seed}")
        cuts = None if power is None else closing.enter_context(outages(spark, settings, admin, power))
        found = HistoryGroup(kind, settings, conninfo, spark, runners, comparison, chance, cuts)
        try:
            yield found
        finally:
            with contextlib.suppress(BaseException):
                found.stop()
            if found.failed:
                kept = KEPT / str(histories[0].seed)
                # The folder may exist already: while a history is shortened, each form of it that fails is copied to
                # this folder.
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(folder, kept)


@contextmanager
def _few(admin: psycopg.Connection[Any], places: Sequence[Schemas]) -> Iterator[str]:
    """Creates a role that may read only the tables that exist now."""
    role = f"few_{admin.info.dbname}"
    try:
        admin.execute(f"CREATE ROLE {role} LOGIN REPLICATION".encode())
        for statement in (statement for schemas in places for statement in granted(schemas, role)):
            admin.execute(statement.encode())
        yield role
    finally:
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def histories(
    number: int, *, size: int = SIZE, long: bool = False, columns: bool = False
) -> tuple[Kind, list[History]]:  # fmt: skip
    """The histories of group ``number``. Their seeds start at ``number`` × 100."""
    kind = Kind.of(number, long=long)
    parts, sequences = (4, 3) if long else (2, 3)
    make = columns_history if columns else history
    return kind, [
        make(number * 100 + place, kind.scope, parts=parts, sequences=sequences, long=long) for place in range(size)
    ]


def played(
    server: EmbeddedServer, spark: SparkSession, kind: Kind, chosen: Sequence[History], power: int | None = None
) -> HistoryGroup:
    with group(server, spark, kind, chosen, power) as at:
        started = time.monotonic()
        try:
            at.play()
        except BaseException as error:
            error.add_note(f"{kind}\n{at.failure_text(all_of_them=True)}")
            raise
        logger.info("%s, %s histories, %.1f s: %s", kind, len(chosen), time.monotonic() - started, at.counts())
        return at
