"""Each line of the table in ``docs/guides/schema_changes.md`` has the outcome that pgcdc decides."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.source.catalog.pgclass import without_rows
from pgcdc_assets.source.catalog.published import GENERATED_SINCE
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.setup.publications import OwnPublication
from pgcdc_assets.structure.differences import changes
from pgcdc_assets.structure.record import TableRecord, TableState
from pgcdc_assets.structure.verdict import AfterRows, Recopy, Reshape, Rules, SetAside, Stay, Verdict, verdict
from tests.fix_postgres import Database

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "schema_changes.md").read_text()
(SCHEMA,) = re.findall(r"```sql\n(CREATE TYPE mood.+?)```", PAGE, re.DOTALL)
EXAMPLES: list[tuple[str, str]] = re.findall(
    r"^\| `((?:ALTER|CREATE|TRUNCATE|VACUUM) [^`]+)` \| ([^|]+) \|", PAGE, re.M
)
AFRESH = "DROP PUBLICATION IF EXISTS pgcdc; DROP SCHEMA public CASCADE; CREATE SCHEMA public"
FILL = """
INSERT INTO t (id, a, k, v, n, m) SELECT i, i, i, 'x', 1, 'ok' FROM generate_series(1, 100) AS i;
INSERT INTO keyless SELECT generate_series(1, 100); INSERT INTO p SELECT i, 1 FROM generate_series(1, 100) AS i
"""
SMALL, LARGE = Rules("rewrite", 1 << 40), Rules("rewrite", 1)
"""``SMALL``: rules with such a high ``recopy_bytes`` that every table counts as small. ``LARGE``: rules with such a low
``recopy_bytes`` that every table counts as large."""
OUTCOMES: Final[dict[tuple[type[Verdict], type[Verdict]], str]] = {
    (Stay, Stay): "nothing", (Reshape, Reshape): "follows", (AfterRows, AfterRows): "follows",
    (Recopy, SetAside): "copied", (Recopy, Recopy): "copied, any size",
}  # fmt: skip
"""The outcome as the page words it. The key is a pair of verdicts: the verdict on a small table, and the verdict on a
large table."""


def test_each_example_on_the_page_has_the_documented_outcome(database: Database, pg_version: int) -> None:
    expected = dict(EXAMPLES)
    if pg_version < GENERATED_SINCE // 10000:
        expected |= {statement: "nothing" for statement in expected if "STORED" in statement}
    with connect(database.conninfo) as conn, database.connect() as user:
        found = {statement: outcome_of(statement, conn, user) for statement in expected}
    assert found == expected


def outcome_of(statement: str, conn: psycopg.Connection[Any], user: psycopg.Connection[Any]) -> str:
    user.execute(f"{AFRESH}; {SCHEMA}; {FILL}".encode())
    OwnPublication("pgcdc").create(user, "insert, update, delete, truncate")
    user.execute("ALTER PUBLICATION pgcdc ADD TABLE t, keyless, p; ANALYZE t, keyless, p")
    before: tuple[Table, ...] = read_tables(conn, ["pgcdc"])
    for part in statement.split("; "):
        user.execute(part.encode())
    user.execute("ANALYZE t, keyless, p")
    now = {table.oid: table for table in read_tables(conn, ["pgcdc"])}
    pairs = ((table, now[table.oid]) for table in before)
    decided = {(_decided(conn, *pair, SMALL), _decided(conn, *pair, LARGE)) for pair in pairs}
    changed = decided - {(Stay, Stay)} or decided
    assert len(changed) == 1, "an example changes one table"
    small, large = changed.pop()
    return OUTCOMES[small, large]


def _decided(conn: psycopg.Connection[Any], before: Table, now: Table, rules: Rules) -> type[Verdict]:
    record = TableRecord(before, TableState.STREAMING, Lsn(20), 3)
    return type(verdict(record, now, changes(before, now), rules, without_rows=partial(without_rows, conn)))


def test_the_guide_has_examples() -> None:
    assert len(EXAMPLES) > 20
