"""Reading a table of millions of rows takes the memory of one part of a file, and not of the table."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.deltatables import opened
from tests.lake.lakes import A, written, written_tables

NAME = TableName("public", "big")
ROWS_A_GROUP, GROUPS = 100_000, 5
READ = """
import resource, sys
from pgcdc_assets import Lake
at = Lake(sys.argv[1]).at()
if sys.argv[2] == "batches":
    assert sum(batch.num_rows for batch in at.batches("big")) % 500_000 == 1
if sys.argv[2] == "duckdb":
    assert at.sql("SELECT max(note), sum(length(note)), count(DISTINCT id) FROM big").num_rows == 1
if sys.argv[2] == "polars":
    import polars as pl
    assert at.polars("big").filter(pl.col("note") != "").select(pl.len()).collect(engine="streaming").item() > 500_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tables of 1 and of 5 million rows, with texts of 100 characters."""
    return [_made(tmp_path_factory.mktemp("lake"), files) for files in (2, 10)]


def _made(root: Path, files: int) -> Path:
    ids = pa.array(range(ROWS_A_GROUP))
    notes = pc.binary_repeat(pc.utf8_lpad(ids.cast(pa.string()), 10, "0"), 10)
    rows = pa.table({"id": ids, "note": notes})
    layout = written_tables(Location.of(root), {NAME: rows.slice(0, 1)})
    folder = layout.mirror(NAME)
    first = written(folder, opened(folder).columns, *([rows.to_pylist()] * GROUPS))
    reports = [first]
    for _ in range(files - 1):
        reports.append(replace(first, path=f"part-{uuid4().hex}.parquet"))
        shutil.copy(path_of(folder / first.path), path_of(folder / reports[-1].path))
    commit_files(opened(folder), reports, "append", {})
    ConsistentPoints(layout).publish(A, {NAME: opened(folder).number}, {NAME: A})
    return root


@pytest.mark.long
@pytest.mark.parametrize("reader", ["batches", "duckdb", "polars"])
def test_memory_does_not_grow_with_the_table(lakes: list[Path], reader: str) -> None:
    """Arrow alone takes some 500 MB more for the larger table."""
    small, large = (
        int(subprocess.run([sys.executable, "-c", READ, root, reader], check=True, capture_output=True).stdout)
        for root in lakes
    )
    print(f"{reader}: {small} MB for 1 million rows, {large} MB for 5 million")
    assert large - small < 100
