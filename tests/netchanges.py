"""Compares net changes, and the SQL that undoes them, with the journal: the test's own record of its row changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import psycopg
import pyarrow as pa

from pgcdc_assets.core.lsn import Lsn
from tests.journal import Journal
from tests.oracle import RAW, Rows, source_rows, written


def assert_net_change(
    journal: Journal, table: str, change: pa.Table, a: int, b: int, commits: dict[int, str], keys: Sequence[str] = ()
) -> None:
    """Checks that a net change contains exactly the rows that differ between the LSNs ``a`` and ``b``: each row that
    the table has only at ``a`` as an old row, and each row that it has only at ``b`` as a new row. ``keys``: the key
    columns. With ``keys``, also checks that each key occurs only once."""
    columns, before = journal.rows_at(table, a, commits)
    _, after = journal.rows_at(table, b, commits)
    where = f"{table} between {Lsn(a)} and {Lsn(b)}"
    for side, expected in (("before", before - after), ("after", after - before)):
        found = image_rows(change, side, columns)
        assert found == expected, (
            f"{where}, images {side}: missing {list((expected - found).elements())[:3]}, "
            f"too many {list((found - expected).elements())[:3]}"
        )
    for row in change.to_pylist():
        here = tuple(row[side] is not None for side in ("before", "after"))
        assert here == {"insert": (False, True), "delete": (True, False), "update": (True, True)}[row["kind"]], where
    if keys:
        both = [row for row in change.to_pylist() if row["kind"] == "update"]
        assert all(_same(row["before"][key], row["after"][key]) for row in both for key in keys), where
        images = [row["after"] or row["before"] for row in change.to_pylist()]
        values = [tuple((repr(image[key]), dict(image[RAW] or ()).get(key)) for key in keys) for image in images]
        assert len(set(values)) == len(values), f"{where}: a key has two rows"


def _same(one: object, other: object) -> bool:
    """Whether PostgreSQL would see the same key value: NaN equals NaN, and 0 equals -0."""
    return bool(one == other) or repr(one) == repr(other)


def image_rows(change: pa.Table, side: str, columns: Sequence[str]) -> Rows:
    """All old rows (``side`` is "before") or all new rows ("after") of a net change, as ``tests.oracle`` compares
    rows."""
    images = change.filter(change[side].is_valid())[side].combine_chunks()
    misfits = [dict(entry or ()) for entry in images.field(RAW).to_pylist()]
    data = (written(name, images.field(name), misfits) for name in columns)
    return Counter(zip(*data, strict=True))


def assert_undone(conn: psycopg.Connection, journal: Journal, table: str, sql: str, a: int) -> bool:
    """Runs an undo on the source and compares the table with its rows at ``a``, then rolls back. Returns False if a
    constraint of the source forbids the old rows."""
    schema, name = table.split(".", 1)
    _, expected = journal.rows_at(table, a)
    with conn.transaction(force_rollback=True):
        try:
            conn.execute("SET LOCAL session_replication_role = replica")
            conn.execute(sql.encode())
        except psycopg.errors.IntegrityError:
            return False
        _, found = source_rows(conn, schema, name)
    assert found == expected, (
        f"{table} undone to {Lsn(a)}: missing {list((expected - found).elements())[:3]}, "
        f"too many {list((found - expected).elements())[:3]}"
    )
    return True
