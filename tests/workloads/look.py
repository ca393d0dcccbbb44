"""Compares the lake with the source. The only failure is a table that differs although `pgcdc status` reports that it
is up to date, or does not report it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from tests.journal import published
from tests.oracle import mirror_rows, source_rows
from tests.workloads.application import Invariant

BEAT = """
CREATE SCHEMA pulse;
CREATE TABLE pulse.beat (id int PRIMARY KEY, beats bigint NOT NULL);
INSERT INTO pulse.beat VALUES (1, 0)
"""
"""The SQL of the heartbeat table ("beat"). A point with the newest beat contains everything that was committed before
this beat."""

_TABLES = """
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1
"""


@dataclass
class Look:
    """The state of every table of the source at one consistent point."""

    equal: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    """Tables that are reported as set aside, as not replicated, or as replicated for inserts only, with the text of the
    report."""
    pending: list[str] = field(default_factory=list)
    """Tables that wait for a copy, or that no point lists yet."""
    silent: dict[str, str] = field(default_factory=dict)
    """Tables that differ from the source without a report."""

    @property
    def settled(self) -> bool:
        return not self.pending and not self.silent


def beat(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("UPDATE pulse.beat SET beats = beats + 1 RETURNING beats").fetchone()
    assert row is not None
    return int(row[0])


def look(conn: psycopg.Connection[Any], lake: Path, status: dict[str, Any]) -> Look:
    """Compares all tables at the newest consistent point. ``status``: the output of `pgcdc status --json`. There must
    be no writer on the source during the call."""
    found = Look()
    newest = published(lake)[-1:]
    versions = newest[0][1] if newest else {}
    if not _holds(conn, lake, versions):
        found.pending.append("the newest beat")
        return found
    told = {entry["name"].replace('"', ""): entry for entry in status["tables"]}
    for (table,) in conn.execute(_TABLES).fetchall():
        problems = [problem["what"] for problem in status["problems"] if table in problem["what"].replace('"', "")]
        entry = told.get(table)
        if entry is None:
            _file(found, table, None if problems else "status does not know the table", problems)
        elif entry["state"] == "set_aside":
            _file(found, table, None if entry["reason"] and problems else "set aside without a word", problems)
        elif entry["state"] != "streaming" or table not in versions:
            found.pending.append(table)
        else:
            _compare(found, conn, lake, table, versions[table], problems)
    return found


def _holds(conn: psycopg.Connection[Any], lake: Path, versions: dict[str, int]) -> bool:
    if "pulse.beat" not in versions:
        return False
    columns, rows = source_rows(conn, "pulse", "beat")
    return rows == mirror_rows(lake, "pulse/beat", columns, versions["pulse.beat"])


def _file(found: Look, table: str, silence: str | None, problems: Sequence[str]) -> None:
    if silence is None:
        found.told[table] = "; ".join(problems)
    else:
        found.silent[table] = silence


def _compare(
    found: Look, conn: psycopg.Connection[Any], lake: Path, table: str, version: int, problems: Sequence[str]
) -> None:
    schema, name = table.split(".", 1)
    columns, expected = source_rows(conn, schema, name)
    mirror = lake / schema / name
    lacking = set(columns) - {field.name for field in DeltaTable(mirror, version=version).schema().fields}
    if lacking:
        values = [name for name in lacking if any(row[columns.index(name)] is not None for row in expected)]
        if values:
            found.silent[table] = f"the mirror has no column {values}, and the source has values in it"
            return
        keep = [place for place, name in enumerate(columns) if name not in lacking]
        columns = [columns[place] for place in keep]
        expected = type(expected)(tuple(row[place] for place in keep) for row in expected.elements())
    rows = mirror_rows(lake, f"{schema}/{name}", columns, version)
    missing, extra = expected - rows, rows - expected
    inserts_only = [problem for problem in problems if "updates and deletes are not replicated" in problem]
    if not missing and not extra:
        found.equal.append(table)
    elif inserts_only and not missing:
        found.told[table] = inserts_only[0]
    else:
        lost, more = (f"{rows.total()} rows like {next(iter(rows), None)}" for rows in (missing, extra))
        found.silent[table] = f"missing {lost}; too many {more}"


def violations(lake: Path, invariants: Sequence[Invariant], *, after: int = 0) -> tuple[int, list[str]]:
    """Checks the invariants at each consistent point above ``after`` that lists their tables. Returns the number of
    checks and the violations."""
    asked, wrong = 0, []
    for lsn, versions in published(lake):
        for invariant in invariants:
            if lsn <= after or not set(invariant.tables.values()) <= versions.keys():
                continue
            asked += 1
            query = QueryBuilder()
            try:
                for alias, table in invariant.tables.items():
                    path = lake.joinpath(*table.split(".", 1))
                    query = query.register(alias, DeltaTable(path, version=versions[table]))
                found = query.execute(invariant.wrong).read_all()
            except DeltaError as error:
                raise AssertionError(f"{invariant.name}: {error}") from error
            if found.num_rows:
                wrong.append(f"{invariant.name}, at {lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}: {found.num_rows} rows")
    return asked, wrong
