"""Two projects with one DAGSTER_HOME: the second project is refused before it starts a run or changes its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.cli.jobs import instance
from pgcdc_assets.defs.partitions import RangeRegister, claim
from tests.cli.conftest import Shell
from tests.defs.catalogs import NAMES, catalog_of
from tests.defs.doubles import span

FIRST = catalog_of(("public", "orders"), slot="first")


@pytest.fixture
def shared(shell: Shell, tmp_path: Path) -> Shell:
    """A shell whose Dagster instance another project has used."""
    home = tmp_path / "dagster"
    home.mkdir()
    shell.patch.setenv("DAGSTER_HOME", str(home))
    with instance() as runs:
        claim(runs, NAMES, FIRST.identity)
        RangeRegister(runs, NAMES).add(span(0x10, 0x20))
    return shell


def test_commands_of_a_second_project_are_refused_before_they_start_a_run(shared: Shell) -> None:
    shared.pgcdc("setup")
    for arguments in (["sync"], ["follow"], ["maintain"], ["snapshot", "a"]):
        said = shared.pgcdc(*arguments, expect=2)
        assert "uses the name pgcdc for another project, which reads slot first of system 7" in said
        assert "DAGSTER_HOME" in said
        assert len(said.strip().splitlines()) == 2
    assert not Path("lake").exists()
    with instance() as runs:
        assert runs.get_runs_count() == 0
        assert RangeRegister(runs, NAMES).known() == [span(0x10, 0x20)]
    shared.pgcdc("teardown", "--yes")
    with instance() as runs:
        claim(runs, NAMES, FIRST.identity)
