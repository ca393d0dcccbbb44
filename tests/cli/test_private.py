"""Folders that can contain rows of the source are created readable only by their owner. A folder that already exists
keeps its mode."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_IMODE

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.project import INSTANCE_YAML, dagster_home, workspace_file
from pgcdc_assets.settings import STATE_FOLDER
from tests.cli.conftest import Shell


def mode(path: Path) -> int:
    return S_IMODE(path.stat().st_mode)


def test_folders_that_commands_create_are_readable_only_by_their_owner(shell: Shell) -> None:
    before = os.umask(0o022)
    try:
        shell.pgcdc("setup")
        workspace_file(STATE_FOLDER)
        dagster_home()
        with lake_lock(Layout.of(shell.folder / "lake"), "test"):
            pass
    finally:
        os.umask(before)
    made = {path.name: mode(path) for path in shell.folder.iterdir() if path.is_dir()}
    assert made == {".pgcdc": 0o700, ".dagster": 0o700, "lake": 0o700}


def test_a_lake_folder_created_by_verify_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    with place_verify_request(Layout.of(tmp_path / "lake")):
        assert mode(tmp_path / "lake") == 0o700


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    """The user may have created the lake's folder, or may share it on purpose. A folder above the lake is not made
    private either."""
    lake = tmp_path / "above" / "lake"
    with lake_lock(Layout.of(lake), "test"):
        lake.chmod(0o2750)
    with lake_lock(Layout.of(lake), "test"):
        assert mode(lake) == 0o2750
    assert mode(lake.parent) & 0o055


def test_the_scratch_folder_of_spark_is_readable_only_by_its_owner(spark: SparkSession) -> None:
    assert mode(Path(spark.conf.get("spark.local.dir") or "/")) == 0o700


def test_only_an_empty_dagster_home_gets_our_dagster_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    assert dagster_home() == tmp_path
    assert (tmp_path / "dagster.yaml").read_text() == INSTANCE_YAML
    (tmp_path / "dagster.yaml").unlink()
    (tmp_path / "anything").touch()
    dagster_home()
    assert not (tmp_path / "dagster.yaml").exists()
