"""The commands that direct a sync (``until``, ``pause``, ``resume``, ``positions``), in a project where no sync is
running."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.checks import positions
from pgcdc_assets.cli import jobs
from pgcdc_assets.cli.console import ConsoleProgress
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.store import storage
from tests.cli.conftest import Shell, traces
from tests.jsondocuments import checked


def test_pgcdc_positions_shows_requests_of_the_operator_until_they_are_withdrawn(shell: Shell) -> None:
    shell.pgcdc("setup")
    before = json.loads(shell.pgcdc("positions", "--json"))
    assert before["apply"] == "running"
    assert before["endpos"] is None
    assert before["at_work"] is None
    assert shell.pgcdc("until", "7/AB") == "syncs end at 7/AB\n"
    assert shell.pgcdc("pause", "apply") == "apply is paused: changes only go into the change log\n"
    assert "already" in shell.pgcdc("pause", "apply")
    found = json.loads(shell.pgcdc("positions", "--json"))
    assert (found["endpos"], found["apply"]) == ("7/AB", "paused")
    assert "endpos         7/AB" in shell.pgcdc("positions")
    assert shell.pgcdc("resume", "apply") == "changes are applied\n"
    assert shell.pgcdc("until", "--current").startswith("syncs end at ")
    assert shell.pgcdc("until", "--clear") == "the request to end at an LSN is cancelled\n"
    after = json.loads(shell.pgcdc("positions", "--json"))
    assert (after["endpos"], after["apply"]) == (None, "running")


def test_pgcdc_until_warns_if_the_changes_up_to_its_lsn_are_already_received(shell: Shell) -> None:
    shell.pgcdc("setup")
    assert shell.pgcdc("until", "0/1") == "syncs end at 0/1\n"
    said = shell.pgcdc("follow", "--receive-only")
    assert "pgcdc: ended at LSN 0/1, as `pgcdc until` requested; `pgcdc until --clear` cancels the request" in said
    assert "pgcdc: changes are already received up to LSN " in shell.pgcdc("until", "0/1")


def test_positions_are_read_from_the_lowest_to_the_highest(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions may rise between two reads. If the higher position were read first, the lower position could appear to
    be above it."""
    asked: list[str] = []

    def noted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def ask(*given: object) -> object:
            asked.append(name)
            return original(*given)

        return ask

    shell.pgcdc("setup")
    for name in ("flush_lsn", "lowest_replayed"):
        monkeypatch.setattr(positions, name, noted(name, getattr(positions, name)))
    shell.pgcdc("positions")
    assert asked == ["lowest_replayed", "flush_lsn"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["until"], "Give an LSN, --current or --clear."),
        (["until", "1/0", "--clear"], "Give an LSN, --current or --clear."),
        (["until", "nowhere"], "nowhere"),
        (["pause"], "Missing argument"),
        (["pause", "copies"], "'copies' is not 'apply'"),
    ],
)
def test_the_error_for_a_wrong_argument_explains_what_is_wrong(shell: Shell, arguments: list[str], told: str) -> None:
    shell.pgcdc("setup")
    assert told in shell.pgcdc(*arguments, expect=2)


def test_commands_that_direct_a_sync_advise_setup_if_the_project_is_not_set_up(shell: Shell) -> None:
    for arguments in (["until", "1/0"], ["pause", "apply"], ["positions"]):
        assert "run `pgcdc setup`" in shell.pgcdc(*arguments, expect=1)
    assert not any(name.startswith("lake") for name in shell.files())


# `status` names the processes that hold the lake's locks, or reports that a process recorded no name


def test_status_shows_that_a_running_verify_pauses_the_applying_of_changes(shell: Shell) -> None:
    shell.pgcdc("setup")
    with place_verify_request(Layout.of(shell.folder / "lake")) as request:
        assert f"paused               for `pgcdc verify` (pid {os.getpid()}): nothing is applied" in shell.pgcdc(
            "status"
        )
        request.at(Lsn(16))
        assert f"paused               for `pgcdc verify` (pid {os.getpid()}), at 0/10\n" in shell.pgcdc("status")
        assert json.loads(shell.pgcdc("status", "--json"))["hold"]["lsn"] == "0/10"
    assert "held  " not in shell.pgcdc("status")


def test_status_reports_a_lock_whose_holder_recorded_no_name(shell: Shell) -> None:
    shell.pgcdc("setup")
    own = Path("lake/_pgcdc")
    own.mkdir(parents=True)
    for name, code in (("hold", 0), ("waiting", 0), ("lock", 1)):
        with (own / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            said = shell.pgcdc("status", expect=code)
            assert f"/_pgcdc/{name} is locked by an unknown process" in said


# The program in ``docs/reference/json.md`` ----------------------------------------------------------


def test_the_python_program_on_the_page_json_md_prints_problems_and_lags(shell: Shell) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shell.pgcdc("setup")
    with shell.database.connect() as conn:
        conn.execute("DROP TABLE b")
    shell.patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    exec(program, {})
    printed = shell.streams.readouterr().out.splitlines()
    assert printed[0].startswith("error table_unpublished table public.b is no longer published")
    assert printed[-2:] == ["public.a waiting None", "public.b waiting None"]


# Ctrl-C while a command executes a Dagster run in its own process -----------------------------------


@dg.op(name="pgcdc_deaf", config_schema={})
def deaf() -> None:
    """Interrupts its own process, as Ctrl-C does, and then continues for 30 s."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)


@dg.job
def deaf_job() -> None:
    deaf()


@pytest.mark.long
def test_an_interrupted_run_raises_keyboard_interrupt_and_no_dagster_error(shell: Shell) -> None:
    settings = jobs.project_settings(set_up=False)
    with pytest.raises(KeyboardInterrupt):
        jobs._run(settings, lambda of: deaf_job, "deaf", {}, ConsoleProgress())


# `pgcdc setup` shows how much the first copy will read, and whether the lake's disk has enough space

ROWS = 20_000


@pytest.fixture
def filled(shell: Shell) -> Shell:
    """Adds a partitioned table. All its rows are in one partition, and one row has TOAST data."""
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
