"""``pgcdc demo`` works without any setup, and ends with a ``verify`` that finds all tables equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import Project


@pytest.mark.process
@pytest.mark.long
def test_the_demo_verifies_that_all_tables_are_equal(tmp_path: Path) -> None:
    project = Project(tmp_path, {"TMPDIR": str(tmp_path), "PGCDC_SOURCE": "host=/nowhere", "PGCDC_TABLES": "wrong"})
    result = project.run("demo", "--seconds", "10")
    assert result.out.count("equal") == 8
    assert "all tables are equal" in result.out
    assert "tables copied" in result.out
