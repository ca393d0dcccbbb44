"""A command with wrong arguments or wrong settings exits with code 2, and prints an error that names the problem. For
wrong settings, the error also contains a link to the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.checks.status import Status
from pgcdc_assets.cli.main import run
from pgcdc_assets.cli.status_verify import print_status


@pytest.fixture(autouse=True)
def _fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("PGCDC_SOURCE", "host=/nowhere dbname=none connect_timeout=2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["sync", "--until", "12"], "'12' is not an LSN"),
        (["sync", "--bogus"], "No such option"),
        (["snapshot"], "Missing argument 'TABLE...'"),
        (["heal"], "Missing argument 'TABLE...'"),
        (["snapshot", "a.b.c"], "'a.b.c' is not a table name"),
        (["repair", "public.t"], "Missing option '--range'"),
        (["repair", "public.t", "--range", "0/1"], "is not an LSN range; write two LSNs"),
        (["repair", "public.t", "--range", "0/2..0/1"], "below its start"),
        (["verify", '"'], "is not a table name"),
        (["demo", "--seconds", "0"], "0 is not in the range"),
        (["up", "--port", "x"], "'x' is not a valid integer"),
    ],
)
def test_a_command_with_wrong_arguments_exits_with_code_2(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    streams = capfd.readouterr()
    assert said in streams.err
    assert streams.out == ""


@pytest.mark.parametrize("arguments", [["sync"], ["status"], ["setup"], ["verify"], ["follow"], ["teardown", "--yes"]])
def test_a_command_with_wrong_settings_exits_with_code_2_and_names_the_setting(
    arguments: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCDC_BATCH_BYTES", "plenty")
    assert run(arguments) == 2
    err = capfd.readouterr().err.strip()
    assert err.startswith("pgcdc: setting `batch_bytes`:")
    assert err.endswith("\nSee docs/reference/errors.md#settings-error")


def test_the_command_sql_with_closed_stdout_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert run(["sql", "SELECT 1"]) == 2
    assert capfd.readouterr().err == "Error: the result cannot be written: stdout is closed\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["sync", "-h"], ["--version"]])
def test_asking_for_help_or_version_does_not_fail(arguments: list[str]) -> None:
    assert run(arguments) in (0, 2) if not arguments else run(arguments) == 0


@pytest.mark.parametrize(
    ("tables", "at_work", "said"),
    [
        (0, None, "nothing is wrong"),
        (1, None, "info: 1 table waits for a copy; run `pgcdc sync`"),
        (3, None, "info: 3 tables wait for a copy; run `pgcdc sync`"),
        (3, "`pgcdc follow` (pid 5)", "info: 3 tables wait for a copy; `pgcdc follow` (pid 5) copies them"),
    ],
)
def test_status_shows_how_many_tables_have_no_copy_yet(
    tables: int, at_work: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_status(Status(None, None, None, None, (), (), uncopied=tables, at_work=at_work))
    lines = capsys.readouterr().out.splitlines()
    assert said in lines
    assert len([line for line in lines if line.startswith("info")]) == (tables > 0)
