"""Log lines of commands, runs and the receiver's process as JSON, and the rotation of the project's log files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from stat import S_IMODE
from typing import Any

import click
import pytest

from pgcdc_assets import logs
from pgcdc_assets.cli import main
from pgcdc_assets.cli.console import ConsoleProgress, say
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.reports import RangeReport, TableTurn
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.settings import STATE_FOLDER
from pgcdc_assets.store import localfiles
from tests.waiting import wait_for

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    for name in ("SOURCE", "LAKE", "LOG_FORMAT"):
        # After setenv and delenv, monkeypatch deletes the variable at the end of the test, even if a command has set
        # it.
        monkeypatch.setenv(f"PGCDC_{name}", "x")
        monkeypatch.delenv(f"PGCDC_{name}")
    yield
    logs.begin(as_json=False)


def lines(text: str) -> list[dict[str, Any]]:
    """Parses log lines. Fails unless every line is a JSON object with at least a time, a level, a logger and a
    message."""
    found = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in found)
    return found


@pytest.mark.parametrize("by", ["command", "group", "variable", "file"])
def test_errors_are_json_if_an_option_or_setting_requests_json(
    by: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["status"]
    monkeypatch.setenv("PGCDC_SORCE", "x")
    if by == "variable":
        monkeypatch.setenv("PGCDC_LOG_FORMAT", "json")
    elif by == "file":
        Path("pgcdc.yaml").write_text("log_format: json\n")
    else:
        arguments = [*arguments, "--log-format", "json"] if by == "command" else ["--log-format", "json", *arguments]
    assert main.run(arguments) == 2
    streams = capfd.readouterr()
    warned, failed = lines(streams.err)
    assert (warned["level"], warned["message"]) == (
        "WARNING", "PGCDC_SORCE is not a setting; did you mean PGCDC_SOURCE?",
    )  # fmt: skip
    assert (failed["level"], failed["class"]) == ("ERROR", "WrongSource")
    assert failed["docs"] == "docs/reference/errors.md#wrong-source"
    assert failed["message"].startswith("neither PGCDC_SOURCE nor `source`")
    assert streams.out == ""


def test_errors_about_wrong_usage_are_json_if_an_option_requests_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["sync", "--log-format", "json", "--until", "12"]) == 2
    (line,) = lines(capfd.readouterr().err)
    assert "'12' is not an LSN" in line["message"]


def test_log_lines_are_text_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["status"]) == 2
    assert capfd.readouterr().err.startswith("pgcdc: ")


def test_a_wrong_log_format_is_refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.run(["status", "--log-format", "xml"]) == 2
    assert "'xml' is not one of 'text', 'json'" in capfd.readouterr().err
    monkeypatch.setenv("PGCDC_LOG_FORMAT", "xml")
    assert main.run(["status"]) == 2
    assert "setting `log_format`: must be 'text' or 'json'" in capfd.readouterr().err


T = TableName("public", "t")
RANGE = RangeReport(
    LsnRange(Lsn(1), Lsn(9)), 2, {"I": 3}, 100, Lsn(9), Lsn(9), 0, 0.5, {T: TableTurn(T, Lsn(9), 4, inserted=3)}, {}
)


def _run(progress: ConsoleProgress) -> None:
    with progress.shown("follow"):
        progress.progress("watch", "table public.t: is published now", table="public.t")
        progress.copied(CopyReport(T, Lsn(5), 1_000, 2_000, 1, 0.25, 3))
        progress.range_closed(RANGE)


def test_json_log_lines_of_a_run_have_stage_table_and_lsn(capfd: pytest.CaptureFixture[str]) -> None:
    logs.begin(as_json=True)
    _run(ConsoleProgress())
    watch, copied, closed, applied = lines(capfd.readouterr().err)
    assert (watch["stage"], watch["table"], watch["message"]) == (
        "watch", "public.t", "table public.t: is published now",
    )  # fmt: skip
    assert {name: copied[name] for name in ("stage", "table", "lsn", "rows", "seconds")} == {
        "stage": "snapshot", "table": "public.t", "lsn": "0/5", "rows": 1_000, "seconds": 0.25,
    }  # fmt: skip
    assert {name: closed[name] for name in ("stage", "start_lsn", "lsn", "transactions", "rows")} == {
        "stage": "publish", "start_lsn": "0/1", "lsn": "0/9", "transactions": 2, "rows": 3,
    }  # fmt: skip
    assert (applied["stage"], applied["table"], applied["lsn"], applied["inserted"]) == ("apply", "public.t", "0/9", 3)


def test_log_lines_of_a_run_are_text_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    _run(ConsoleProgress())
    told = [line.partition("s ")[2] for line in capfd.readouterr().err.splitlines()]
    assert told == [
        "watch: table public.t: is published now",
        "copied public.t: 1,000 rows in 0.2 s",
        "applied LSN range 0/1..0/9: 2 transactions, 3 rows, 1 tables",
    ]


def test_a_log_line_has_the_fields_of_the_enclosing_about_block_and_of_its_own_call(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If the block and the call set the same field, the line has the value of the call. For an exception, the line has
    only the class, because the message may contain a secret."""
    logs.begin(as_json=True, process="receiver")
    with logs.about(stage="apply", lsn="0/1"):
        logging.getLogger("pgcdc_assets.log.commit").warning("%d tables", 2, extra={"lsn": "0/2"})
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("pgcdc_assets.log").exception("it failed")
    first, second = lines(capfd.readouterr().err)
    assert {name: first[name] for name in first if name != "time"} == {
        "level": "WARNING", "logger": "pgcdc_assets.log.commit", "message": "2 tables", "process": "receiver",
        "stage": "apply", "lsn": "0/2",
    }  # fmt: skip
    assert (second["error"], "stage" in second) == ("ValueError", False)
    assert SECRET not in json.dumps(second)


def test_log_lines_of_the_receiver_process_reach_the_stderr_of_the_command(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run redirects its stderr, and that of the receiver process, to run.log. Only the log lines of the receiver
    process still go to the stderr of the command."""
    from pgcdc_assets.cli.jobs import noise_in_file

    logs.begin(as_json=True)
    code = ("from pgcdc_assets import logs; import logging, sys\n"
            "logs.begin_in_child(stage='receive')\n"
            "logging.getLogger('pgcdc_assets.log').warning('waiting for the source')\n"
            "print('noise', file=sys.stderr)\n")  # fmt: skip
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: started([sys.executable, "-c", code], **more))
    receiver = ReceiverProcess(ReceiverSettings("dbname=x", str(tmp_path / "lake"), ("p",), 1, 1.0))
    with noise_in_file(tmp_path / "run.log"):
        monkeypatch.setattr("pgcdc_assets.log.receive.client.ChangeLog", lambda layout: type("L", (), {"leader": None}))
        receiver.start()
        receiver.join(30)
    (line,) = lines(capfd.readouterr().err)
    assert (line["stage"], line["message"]) == ("receive", "waiting for the source")
    assert (tmp_path / "run.log").read_text() == "noise\n"


def test_the_failure_file_keeps_the_tracebacks_of_several_failed_commands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the messages and the tracebacks of the errors. Stderr has neither."""
    failing = click.Command(
        "failing", callback=lambda number: [][number], params=[click.Argument(["number"], type=int)]
    )
    monkeypatch.setitem(main.pgcdc.commands, "failing", failing)
    for number in ("7", "8"):
        assert main.run(["failing", number]) == 1
    kept = main.FAILURE_FILE.read_text()
    assert kept.count("Traceback") == kept.count("IndexError: list index out of range") == 2
    assert S_IMODE(STATE_FOLDER.stat().st_mode) == 0o700
    monkeypatch.setenv("PGCDC_LOG_FORMAT", "json")
    capfd.readouterr()
    assert main.run(["failing", "9"]) == 1
    (line,) = lines(capfd.readouterr().err)
    assert line["message"] == "unexpected IndexError; the traceback is in .pgcdc/failure.txt"


def test_a_log_file_is_rotated_while_it_is_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localfiles, "_LOG_BYTES", 100)
    monkeypatch.setattr(localfiles, "_ROTATE_SECONDS", 0.01)
    log = tmp_path / "run.log"
    with localfiles.private_log(log) as file, localfiles.rotated(log):
        for text in (b"first" * 30, b"second" * 30):
            file.write(text)
            file.flush()
            wait_for(lambda: log.stat().st_size == 0, 10, "the rotation")
            assert (tmp_path / "run.log.1").read_bytes() == text
        file.write(b"third")
    assert log.read_bytes() == b"third"
    assert "log" not in {thread.name for thread in threading.enumerate()}


def test_the_prefix_of_a_line_on_stderr_sets_its_log_level(capfd: pytest.CaptureFixture[str]) -> None:
    logs.begin(as_json=True)
    for text in ("warning: slot x: is old", "pgcdc: 2 tables", "PostgreSQL waits for pid 5"):
        say(text, err=True)
    say("a result")
    streams = capfd.readouterr()
    found = [(line["level"], line["message"]) for line in lines(streams.err)]
    assert found == [("WARNING", "slot x: is old"), ("WARNING", "2 tables"), ("INFO", "PostgreSQL waits for pid 5")]
    assert streams.out == "a result\n"
