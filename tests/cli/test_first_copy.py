"""`pgcdc setup` says what a first copy reads, and whether the lake's disk has room for it."""

from __future__ import annotations

import json
import re

import pytest

from pgcdc_assets.store import storage
from tests.cli.conftest import Shell, traces
from tests.jsondocuments import checked

ROWS = 20_000


@pytest.fixture
def filled(shell: Shell) -> Shell:
    """A third table, whose partition has the rows and whose rows have TOAST data."""
    with shell.database.connect() as conn:
        conn.execute("CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
                     "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100000);"
                     "ALTER TABLE p1 ALTER v SET STORAGE EXTERNAL")  # fmt: skip
        conn.execute("INSERT INTO p SELECT g, repeat('x', 20) FROM generate_series(1, %s) g", [ROWS])
        conn.execute("INSERT INTO p VALUES (0, repeat('x', 3000000))")
    return shell


def test_setup_reports_tables_and_bytes_of_a_first_copy(filled: Shell) -> None:
    with filled.database.connect() as conn:
        row = conn.execute("SELECT pg_table_size('p1') + pg_table_size('a') + pg_table_size('b')").fetchone()
    assert row is not None
    document, _ = json.JSONDecoder().raw_decode(filled.pgcdc("setup", "--json"))
    assert checked("setup", document)["copy_bytes"] == row[0] > 3_000_000
    assert re.search(
        r"^3 tables are published, \d\.\d MiB on the source; run `pgcdc sync`$", filled.pgcdc("setup"), re.M
    )
    assert not (filled.folder / "lake").exists()


def test_setup_warns_if_the_disk_of_the_lake_is_too_small(filled: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warning: lake" not in filled.pgcdc("setup")
    monkeypatch.setattr(storage, "free_bytes", lambda root: 1_000_000)
    told = rf"^warning: lake {filled.folder / 'lake'}: has 977 KiB free, but the tables take \d\.\d MiB on the source"
    assert re.search(told, filled.pgcdc("setup"), re.M)


def test_setup_makes_no_slot_for_a_lake_that_cannot_be_written(shell: Shell) -> None:
    shell.set(LAKE="/proc/lake")
    assert "lake /proc/lake: cannot be written" in shell.pgcdc("setup", expect=1)
    assert traces(shell.database) == []
