"""A cohort: several stories (random histories with schema changes) that share a database, a project and its syncs.

Each story has its own schemas. The stories of a cohort share the kind of publication. In each round, every story
executes its steps up to its next sync, then one sync runs for all stories, and all stories are compared.
"""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
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
from tests.fix_postgres import fresh_database
from tests.history.structure import source
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.judge import Judge, Silence
from tests.history.structure.moves import ALL_KINDS, granted
from tests.history.structure.player import Player, Session
from tests.history.structure.source import Schemas
from tests.history.structure.story import CONNECTIONS, Kind, Story, columns_story, story
from tests.power.images import told
from tests.power.outages import Outages, outages
from tests.projectfiles import CATALOG_FILE

logger = logging.getLogger(__name__)

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
"""Number of stories in a cohort. The first copy of their tables is the most expensive part, with about 0.3 s a
table."""
TEMPO = 0.3
"""How many seconds the writer waits after each step if a sync follows, so that the sync can publish a point between two
steps."""


@dataclass
class Cohort:
    kind: Kind
    settings: Settings
    conninfo: str
    spark: SparkSession
    players: Sequence[Player]
    judge: Judge
    chance: random.Random
    power: Outages | None = None
    """If set, the power is cut during every sync, and another sync recovers."""
    observer: Silent = field(default_factory=Silent)
    _following: Run | None = None

    def play(self) -> None:
        self.setup()
        self.run()
        for number in range(max(len(player.story.parts) for player in self.players)):
            for player in self.players:
                for step in (player.story.parts[number : number + 1] or ((),))[0]:
                    player.take(step)
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
            self._execute(*(text for one in self.players for text in granted(one.schemas, one.reader)))
        self.setup()
        self.run(self._set_aside())
        self._note(self.judge.lacking())

    def _execute(self, *statements: str) -> None:
        for statement in statements:
            self.judge.chronicle.conn.execute(statement.encode())

    def _note(self, found: Sequence[Silence]) -> None:
        for silence in found:
            player = next(player for player in self.players if silence.schema in player.schemas.both)
            player.silences.append(silence.what)
            player.told.append(f"!! {silence.what}")

    def finish(self) -> None:
        for player in self.players:
            player.finish()

    # Results ----------------------------------------------------------------------------------------

    @property
    def silent(self) -> list[Player]:
        """The players of the failed stories: a table differs from the source or is missing, and nothing reports it."""
        return [player for player in self.players if player.silences]

    @property
    def done(self) -> Counter[str]:
        return sum((player.done for player in self.players), start=Counter())

    def account(self, *, all_of_them: bool = False) -> str:
        """A text about the failed stories: their SQL, their syncs, and the differences found."""
        return "\n".join("\n  ".join([f"story {player.story.seed} in {player.schemas.app}:", *player.told])
                         for player in (self.players if all_of_them else self.silent))  # fmt: skip

    def counts(self) -> str:
        refused = sum(sum(player.refused.values()) for player in self.players)
        followed = sum(not one.copied for one in self.observer.structures)
        return (f"{self.judge.seen} points, {self.judge.listed} tables listed, {dict(self.judge.told)} told, "
                f"{self.done.total()} steps, {refused} refused, {followed} structures followed, "
                f"{len(self.silent)} silent")  # fmt: skip

    # Runs -------------------------------------------------------------------------------------------

    def run(self, again: Sequence[TableName] = ()) -> None:
        """Runs a sync up to the newest commit, then compares all points. ``again``: the tables that it copies again."""
        self.stop()
        if self.power is not None:
            image = self.power.cut(lambda: self._whole(again))
            for player in self.players:
                player.told.append("-- power cut\n" + told(image.lost))
            self.judge.forget()
        self._whole(again)
        newest = ConsistentPoints(self.settings.layout).newest()
        for player in self.players:
            names = [str(name) for name in again if name.schema in player.schemas.both]
            player.told.append(f"-- run to {newest.replay_lsn if newest else None}, copies {names} again")
        self._note(self.judge.judge())
        if self.kind.scope != "tables" and self.judge.chronicle.partial:
            # A story has excluded some kinds of changes from the publication that all stories share. Setup repairs only
            # a publication that it created itself.
            self._execute(f"ALTER PUBLICATION {self.settings.publication} SET (publish = '{ALL_KINDS}')")
            self.judge.chronicle.announce(self.judge.chronicle.conn)
            self.judge.chronicle.committed(())

    def _whole(self, again: Sequence[TableName]) -> None:
        run = Run(self.engine(), again=again)
        if not run.ended(PATIENCE):
            self.finish()
        try:
            run.join()
        except EmptyPublication as error:
            # A story that is played alone may have left no table published. The sync must then report this and nothing
            # else.
            self.judge.told[str(error)] += 1
        except RightLacking:
            self.judge.told["run without a right"] += 1

    def stop(self) -> None:
        if self._following is not None:
            following, self._following = self._following, None
            following.stop()

    def _set_aside(self) -> list[TableName]:
        """Tables that were set aside and are published. Without a publication, a table cannot be copied."""
        conn = self.judge.chronicle.conn
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
            self.judge.told["setup without a right"] += 1

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
def cohort(
    server: EmbeddedServer, spark: SparkSession, kind: Kind, stories: Sequence[Story], power: int | None = None
) -> Iterator[Cohort]:
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
        places = [Schemas(number) for number in range(len(stories))]
        for story, schemas in zip(stories, places, strict=True):
            source.make(admin, schemas, story.families)
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
        players = []
        for story, schemas in zip(stories, places, strict=True):
            sessions = [Session(name, closing.enter_context(database.connect(client_encoding="UTF8")))
                        for name in "ABC"[:CONNECTIONS]]  # fmt: skip
            for session in sessions:
                session.conn.execute("SET lock_timeout = '30ms'")
            players.append(Player(story, schemas, settings.publication, kind, reader, sessions, chronicle))
        judge = Judge(settings, chronicle, everything=kind.scope != "schema")
        chance = random.Random(f"runs {stories[0].seed}")
        cuts = None if power is None else closing.enter_context(outages(spark, settings, admin, power))
        found = Cohort(kind, settings, conninfo, spark, players, judge, chance, cuts)
        try:
            yield found
        finally:
            with contextlib.suppress(BaseException):
                found.stop()


@contextmanager
def _few(admin: psycopg.Connection[Any], places: Sequence[Schemas]) -> Iterator[str]:
    """A role that may read only the tables that exist now."""
    role = f"few_{admin.info.dbname}"
    try:
        admin.execute(f"CREATE ROLE {role} LOGIN REPLICATION".encode())
        for statement in (statement for schemas in places for statement in granted(schemas, role)):
            admin.execute(statement.encode())
        yield role
    finally:
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def stories(
    number: int, *, size: int = SIZE, long: bool = False, columns: bool = False
) -> tuple[Kind, list[Story]]:  # fmt: skip
    """The stories of cohort ``number``. Their seeds start at ``number`` × 100."""
    kind = Kind.of(number, long=long)
    parts, ideas = (4, 3) if long else (2, 3)
    tell = columns_story if columns else story
    return kind, [tell(number * 100 + place, kind.scope, parts=parts, ideas=ideas, long=long) for place in range(size)]


def played(
    server: EmbeddedServer, spark: SparkSession, kind: Kind, told: Sequence[Story], power: int | None = None
) -> Cohort:
    with cohort(server, spark, kind, told, power) as at:
        started = time.monotonic()
        try:
            at.play()
        except BaseException as error:
            error.add_note(f"{kind}\n{at.account(all_of_them=True)}")
            raise
        logger.info("%s, %s stories, %.1f s: %s", kind, len(told), time.monotonic() - started, at.counts())
        return at
