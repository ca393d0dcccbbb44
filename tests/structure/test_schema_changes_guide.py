"""Each line of the table in ``docs/guides/schema_changes.md`` has the outcome that pgcdc decides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.states import TableState
from pgcdc_assets.source.catalog.pgclass import without_rows
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.structure.differences import changes
from pgcdc_assets.structure.record import TableRecord
from pgcdc_assets.structure.verdict import AfterRows, Recopy, Reshape, Rules, SetAside, Stay, Verdict, verdict
from tests.fix_postgres import Database

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "schema_changes.md"
PUBLISHED = ("t", "keyless", "p")
FILL = """
INSERT INTO t (id, a, k, v, n, m) SELECT i, i, i, 'x', 1, 'ok' FROM generate_series(1, 100) AS i;
INSERT INTO keyless SELECT generate_series(1, 100); INSERT INTO p SELECT i, 1 FROM generate_series(1, 100) AS i;
CREATE PUBLICATION pgcdc FOR TABLE t, keyless, p
"""
SMALL, LARGE = Rules("rewrite", 1 << 40), Rules("rewrite", 1)
"""Settings under which each table is small or large, compared with ``recopy_bytes``."""
LIMITED = {
    "nothing": (Stay, Stay), "follows": ((Reshape, AfterRows), (Reshape, AfterRows)), "copied": (Recopy, SetAside),
    "copied, any size": (Recopy, Recopy),
}  # fmt: skip
"""For each outcome, the verdict on a small table and on a large table."""


def examples() -> Iterator[tuple[str, str]]:
    """The statements of the table, and their outcomes."""
    for statement, outcome in re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE):
        if statement.startswith(("ALTER ", "CREATE ", "TRUNCATE ", "VACUUM ")):
            yield statement, outcome


def schema() -> str:
    (found,) = re.findall(r"```sql\n(CREATE TYPE mood.+?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@pytest.mark.parametrize(("statement", "outcome"), list(examples()))
def test_each_example_has_its_outcome(database: Database, statement: str, outcome: str) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute(f"{schema()}; {FILL}".encode())
        user.execute("ANALYZE")
        before: tuple[Table, ...] = read_tables(conn, ["pgcdc"])
        for part in statement.split("; "):
            user.execute(part.encode())
        user.execute("ANALYZE")
        now = {table.oid: table for table in read_tables(conn, ["pgcdc"])}
        decided = [
            (decide(table, now[table.oid], SMALL), decide(table, now[table.oid], LARGE))
            for decide in [partial(_decided, conn)] for table in before
        ]  # fmt: skip
    changed = [pair for pair in decided if pair != (Stay(), Stay())] or [(Stay(), Stay())]
    assert len(changed) == 1, "an example changes one table"
    small, large = LIMITED[outcome]
    assert isinstance(changed[0][0], small)
    assert isinstance(changed[0][1], large)


def _decided(conn: object, before: Table, now: Table, rules: Rules) -> Verdict:
    record = TableRecord(before, TableState.STREAMING, Lsn(20), 3)
    return verdict(record, now, changes(before, now), rules, without_rows=partial(without_rows, conn))


def test_the_page_has_examples() -> None:
    assert len(list(examples())) > 20
