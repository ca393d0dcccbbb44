"""Test modules import no other test module: shared code is in modules without tests."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def test_no_module_imports_a_test_module() -> None:
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in TESTS
        for name in _imported(path)
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    ]


def _imported(path: Path) -> set[str]:
    """The modules that a file imports, including modules in the form ``from package import module``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {node.module, *(one for one in inside if (ROOT / f"{one.replace('.', '/')}.py").exists())}
    return found
