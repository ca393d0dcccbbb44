"""Commands take their settings from a component of a Dagster project."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import click
import pytest

from pgcdc_assets.cli.dagsterproject import is_component
from pgcdc_assets.cli.main import pgcdc, run
from pgcdc_assets.settings import PREFIX, Settings

PYPROJECT: Final = """
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "shop_project"
"""
COMPONENT: Final = """
type: pgcdc_assets.PgcdcComponent
attributes:
  name: shop
  source: '{{ env.SHOP_DSN }}'
  lake: lake/shop
  tables: ["public.*"]
  settings: {retention: 14 days, two_phase: true, spark: {master: "local[1]"}}
"""
DSN: Final = "host=nowhere.invalid dbname=shop password=geheim"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Dagster project with one component. It is the working directory. The shell has settings of a different
    project."""
    folder = tmp_path / "src/shop_project/defs/shop"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (folder / "defs.yaml").write_text(COMPONENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if PREFIX not in name})
    os.environ.update(SHOP_DSN=DSN, PGCDC_NAME="crm", PGCDC_SLOT="other")
    yield tmp_path
    for module in [name for name in sys.modules if name.startswith("shop_project")]:
        del sys.modules[module]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, bool]]:
    """Adds a command ``show``. The list gets the settings that each call of ``show`` sees, and whether they are those
    of a component."""
    found: list[tuple[Settings, bool]] = []
    show = click.command("show")(lambda: found.append((Settings.load(), is_component())))
    monkeypatch.setitem(pgcdc.commands, "show", show)
    return found


def test_settings_are_those_of_the_component(project: Path, shown: list[tuple[Settings, bool]]) -> None:
    assert run(["--component", "shop", "show"]) == 0
    ((found, of_component),) = shown
    assert of_component
    assert (found.name, found.slot, found.source) == ("shop", "pgcdc_shop", DSN)
    assert (found.lake, found.state) == (project / "lake/shop", project / ".pgcdc/shop")
    assert (found.tables, found.retention, found.two_phase) == (("public.*",), timedelta(days=14), True)
    assert found.spark == {"master": "local[1]"}
    assert json.loads(os.environ["PGCDC_TABLES"]) == ["public.*"]  # for child processes


@pytest.mark.parametrize(("option", "form"), [((), "json"), (("--log-format", "text"), "text")])
def test_lines_have_the_format_of_the_component(
    project: Path, capfd: pytest.CaptureFixture[str], option: tuple[str, ...], form: str
) -> None:
    file = project / "src/shop_project/defs/shop/defs.yaml"
    file.write_text(file.read_text().replace("settings: {", "settings: {log_format: json, "))
    assert run([*option, "--component", "shop", "positions"]) == 1
    assert capfd.readouterr().err.startswith("{" if form == "json" else "pgcdc: ")
    assert os.environ["PGCDC_LOG_FORMAT"] == form


def test_without_a_component_the_settings_of_the_shell_are_used(
    project: Path, shown: list[tuple[Settings, bool]]
) -> None:
    assert run(["show"]) == 0
    assert [(found.name, of_component) for found, of_component in shown] == [("crm", False)]


@pytest.mark.parametrize(
    ("component", "change", "cause"),
    [
        ("crm", lambda _: None, "component crm: cannot be loaded: No component found"),
        ("shop", lambda _: os.environ.pop("SHOP_DSN"), "attribute `source`: Input should be a valid string"),
        ("shop", lambda project: sys.path.remove(str(project / "src")), "No module named 'shop_project'"),
        ("shop", lambda project: (project / "pyproject.toml").unlink(), "Could not find config file"),
    ],
    ids=["unknown", "without a variable", "not installed", "outside a project"],
)
def test_error_names_a_component_that_cannot_be_loaded(
    project: Path, shown: list[tuple[Settings, bool]], component: str, change: Callable[[Path], object], cause: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    change(project)
    assert run(["--component", component, "show"]) == 2
    told = capfd.readouterr().err
    assert cause in told
    assert "geheim" not in told
    assert "Traceback" not in told
    assert shown == []
