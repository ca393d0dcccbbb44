"""What event triggers say of a year of migrations: each structure that a table had, as the catalog showed it then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.log.structurenotes import structure_notes
from pgcdc_assets.source.catalog.drift import table_changes
from pgcdc_assets.source.catalog.noted import StructureNote, as_published, structure_changes
from pgcdc_assets.source.catalog.successor import alike
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import SourceConnection, connect
from pgcdc_assets.source.setup.eventtriggers import EventTriggers
from tests.fix_postgres import Database
from tests.log.conftest import PUBLICATION, Source, source_in
from tests.migrations.steps import BASE, Migration, migrations

pytestmark = pytest.mark.takes(60)

_LEFT_TO_THE_CATALOG = ("GENERATED ALWAYS AS (", "ADD PRIMARY KEY")
"""Generated columns, and another key."""


@pytest.fixture
def source(database: Database, tmp_path: Path) -> Iterator[Source]:
    with source_in(database, tmp_path) as source:
        yield source


def test_each_structure_is_told(source: Source, database: Database) -> None:
    steps = migrations(source.conn.info.server_version // 10000)
    for number in range(len(steps)):
        source.run(f"CREATE SCHEMA m{number}; SET search_path = m{number}; {BASE}")
        source.run(f"CREATE PUBLICATION p{number} FOR TABLE m{number}.t; ALTER PUBLICATION p ADD TABLE m{number}.t")
    log = source.log()
    EventTriggers(log.identity.slot, [PUBLICATION]).make(source.conn)
    with connect(database.conninfo) as looking:
        shown = {number: _played(source, looking, number, step) for number, step in enumerate(steps)}
    source.receive(log, source.lsn(), messages=())
    notes = structure_notes(log, log.batches(log.start))
    wrong = [step.name for number, step in enumerate(steps) if not _is_told(step, shown[number], notes)]
    assert not wrong


def _played(source: Source, looking: SourceConnection, number: int, step: Migration) -> list[Table]:
    """The table before, and after each statement."""
    source.run(f"SET search_path = m{number}")
    shown = [*read_tables(looking, [f"p{number}"])]
    for statement in step.sql:
        source.run(statement)
        shown += read_tables(looking, [f"p{number}"])
    return shown


def _is_told(step: Migration, shown: list[Table], notes: Sequence[StructureNote]) -> bool:
    before, now = shown[0], shown[-1]
    of_it = [note for note in notes if note.rewritten == now.oid or any(table.oid == now.oid for table in note.tables)]
    changes = structure_changes(before, now, of_it)
    if changes is None:
        # VACUUM FULL writes the values of older rows into these, and no trigger tells.
        words = (*_LEFT_TO_THE_CATALOG, "VACUUM")
        return any(word in statement for statement in step.sql for word in words)
    last = changes[-1].table if changes else before
    same_files = replace(now, relfilenode=last.relfilenode, toast=last.toast)
    return not table_changes(as_published(last, now), same_files) and all(
        any(alike(change.table, other) for other in shown) for change in changes
    )
