"""The saved catalog, which every sync reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.project import load_catalog, save_catalog
from tests.log.durable import Disk
from tests.projectfiles import CATALOG_FILE

CATALOG = Catalog(Identity("7123", "shop", "pgcdc"), "pgcdc", 180004, ())


def test_saved_catalog_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    disk = Disk(project, os.fsync)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    save_catalog(CATALOG, project / CATALOG_FILE)
    assert load_catalog(disk.left(tmp_path / "left") / CATALOG_FILE) == CATALOG
