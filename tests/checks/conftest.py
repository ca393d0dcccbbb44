from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks.mirrors import Lake
from tests.fix_postgres import Database


@pytest.fixture
def lake(database: Database, tmp_path: Path) -> Lake:
    with database.connect() as conn:
        conn.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return Lake(database.conninfo, tmp_path / "lake")
