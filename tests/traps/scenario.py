"""Runs many traps (known difficult cases) at once. Each trap has its own schema in a shared database.

A trap is SQL that runs before the copy, and SQL that runs after it. At the end, the mirror of every table of the trap's
schema must equal the source. If a schema change cannot be applied to the mirror, ``aside`` is the expected reason. The
table is then copied again, and its mirror must equal the source.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from tests.fix_postgres import fresh_database
from tests.flow.rig import Rig
from tests.oracle import mirror_rows, source_rows
from tests.waiting import wait_for

Step = str | Callable[["Rig", str], None]
"""SQL that is sent as one message (one transaction, unless the SQL itself commits), or a function of rig and schema."""


@dataclass(frozen=True)
class Trap:
    name: str
    """The name of the trap, which is also the name of its schema."""
    before: str
    after: tuple[Step, ...]
    later: tuple[Step, ...] = ()
    """Steps that are run after a sync of the steps in ``after``."""
    aside: str | None = None
    """Pattern of the reason with which the sync of ``after`` must set the table ``t`` aside. None if the sync must not
    set ``t`` aside."""


@dataclass
class Played:
    """The state after all traps were run."""

    rig: Rig
    reasons: dict[str, str] = field(default_factory=dict)
    """Why tables were set aside, by schema."""

    def assert_equal(self, trap: Trap) -> None:
        reason = self.reasons.get(trap.name)
        if trap.aside is None:
            assert reason is None
        else:
            assert reason is not None
            assert re.search(trap.aside, reason), reason
        tables = _tables(self.rig.conn, trap.name)
        assert tables
        self.rig.assert_equal(*(f"{trap.name}.{table}" for table in tables))


@contextmanager
def empty_rig(server: EmbeddedServer, spark: SparkSession, folder: Path, **settings: Any) -> Iterator[Rig]:
    """A project with a new, empty database."""
    with (
        pytest.MonkeyPatch.context() as patch, fresh_database(server) as database, database.connect() as conn
    ):  # fmt: skip
        folder.mkdir(exist_ok=True)
        patch.chdir(folder)
        named = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], messages=("*",), **settings)
        yield Rig(named, conn, lambda: spark, Silent())


def play(rig: Rig, traps: Sequence[Trap], *, together: bool) -> Played:
    """Copies the tables, then runs the steps of all traps. All steps are applied in one turn, or each step in a
    separate turn if ``together`` is false."""
    played = Played(rig)
    for trap in traps:
        rig.conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(trap.name)))
        _do(rig, trap.name, trap.before)
    rig.setup()
    rig.sync()
    most = max(len(trap.after) for trap in traps)
    for number in range(most):
        for trap in traps:
            for step in trap.after[number : number + 1]:
                _do(rig, trap.name, step)
        if not together and number < most - 1:
            played.reasons |= _aside(rig)
    # Setup publishes tables that the traps have dropped and created again, so the next sync also follows these tables.
    rig.setup()
    played.reasons |= _aside(rig)
    for trap in traps:
        for step in trap.later:
            _do(rig, trap.name, step)
    rig.engine().sync(Bounds(), copy_anew=[TableName(schema, "t") for schema in played.reasons])
    return played


def _do(rig: Rig, schema: str, step: Step) -> None:
    rig.conn.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(schema)))
    if isinstance(step, str):
        rig.conn.execute(step.encode())
    else:
        step(rig, schema)


def _aside(rig: Rig) -> dict[str, str]:
    """Runs a sync. Returns, by schema, the reason for which the sync has set the table ``t`` aside."""
    found = rig.sync().set_aside
    rows = TableStates(rig.settings.layout).all()
    assert all(rows[name].reason == reason for name, reason in found)
    assert all(name.name == "t" for name, _ in found), found
    return {name.schema: reason for name, reason in found}


def _tables(conn: psycopg.Connection[Any], schema: str) -> list[str]:
    """The tables of the schema that have their own mirror: all tables except partitions."""
    query = """SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'p')
               AND NOT relispartition ORDER BY relname"""
    return [name for (name,) in conn.execute(query, [f'"{schema}"'])]


def assert_same(rig: Rig, view: str, mirror: str) -> None:
    """Compares a view of the source, which selects the published rows and columns of a table, with the table's
    mirror."""
    schema, name = view.split(".", 1)
    columns, expected = source_rows(rig.conn, schema, name)
    found = mirror_rows(rig.lake, mirror.replace(".", "/"), columns)
    assert found == expected, f"missing {expected - found}, too many {found - expected}"


@dataclass
class Following:
    rig: Rig
    stop: threading.Event = field(default_factory=threading.Event)
    errors: list[PgcdcError] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.rig.engine("follow").sync(Bounds(follow=True, stop=self.stop))
        except PgcdcError as error:
            self.errors.append(error)

    def listed(self, *tables: str, since: Lsn | None = None) -> None:
        """Waits for a point at ``since`` or above (default: the source's current LSN) that lists exactly these
        tables."""
        points, goal = ConsistentPoints(self.rig.settings.layout), since or self.rig.flush()
        wanted = {TableName("public", table) for table in tables}

        def reached() -> bool:
            assert not self.errors, self.errors
            newest = points.newest()
            return newest is not None and newest.replay_lsn >= goal and set(newest.tables) == wanted

        wait_for(reached, what=f"a point of {tables}")


@contextmanager
def following_run(rig: Rig) -> Iterator[Following]:
    following = Following(rig)
    try:
        yield following
    finally:
        following.stop.set()
        following.thread.join(120)
