"""``pgcdc demo``: nothing to prepare, all equal, within its three minutes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.end_to_end.command import Project

LIMIT_SECONDS = 180


@pytest.mark.process
@pytest.mark.long
def test_the_demo_proves_every_table_equal(tmp_path: Path) -> None:
    project = Project(tmp_path, {"TMPDIR": str(tmp_path), "PGCDC_SOURCE": "host=/nowhere", "PGCDC_TABLES": "wrong"})
    started = time.monotonic()
    result = project.run("demo", "--seconds", "10")
    assert time.monotonic() - started < LIMIT_SECONDS
    assert result.out.count("equal") == 8
    assert "all tables are equal" in result.out
    assert "tables copied" in result.out
