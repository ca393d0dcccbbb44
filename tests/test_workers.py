"""Tests that share an expensive fixture form a group. One worker of pytest-xdist runs all tests of a group, so the
fixture is made only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Groups, group, pytest_xdist_make_scheduler


def test_tests_that_share_a_server_or_a_running_pgcdc_up_are_in_one_group(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        names = getattr(item, "fixturenames", ())
        if "up" in names:
            assert group(item.nodeid) == "up"
        elif isinstance(item, pytest.Function) and "version_server" in names:
            assert group(item.nodeid) == f"pg{item.callspec.params['version_server']}"
        else:
            assert group(item.nodeid) in (item.nodeid.split("::")[0], item.nodeid)


def test_all_tests_of_a_group_are_given_to_one_worker(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "dist", "loadgroup")
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen"])
    scheduler = pytest_xdist_make_scheduler(pytestconfig, None)
    assert isinstance(scheduler, Groups)
    assert scheduler._split_scope("tests/end_to_end/test_up.py::test_a[pg14]") == "up"
    assert scheduler._split_scope("tests/versions/test_receive.py::test_a[pg14-x]") == "pg14"
    assert scheduler._split_scope("tests/core/test_lsn.py::test_a[@x::y]") == "tests/core/test_lsn.py"
    assert scheduler._split_scope("tests/crash/test_leaders.py::test_a") == "tests/crash/test_leaders.py::test_a"


@pytest.mark.long
def test_a_test_that_kills_its_worker_is_not_run_again(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    tests = """
import os, pathlib
def test_before(): pass
def test_deadly():
    with open(pathlib.Path(__file__).with_name("began"), "a") as began: began.write("x")
    os._exit(1)
def test_behind(): pass
"""
    (tmp_path / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-n", "2",
               "--dist", "loadgroup", "test_it.py"]  # fmt: skip
    environment = {"PYTHONPATH": str(pytestconfig.rootpath), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "began").read_text() == "x", done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
