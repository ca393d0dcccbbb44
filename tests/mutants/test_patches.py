"""Every mutant can still be made, and names a test that exists. ``make mutants`` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.patches import ROOT, Patch, apply, patches, scratch


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scratch(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.name)
def test_the_patch_applies_and_its_test_exists(patch: Patch, copy: Path) -> None:
    assert apply(patch, copy) is None
    try:
        # A patch that git put into another function, of lines that look alike, makes a test fail for nothing.
        for path in patch.files:
            ast.parse((copy / path).read_text())
    finally:
        assert apply(patch, copy, "--reverse") is None
    path, name = patch.test.split("[")[0].split("::")
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions


def test_a_patch_that_does_not_apply_is_told(copy: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.patch"
    header = "# rule: a\n# test: b\n--- a/pgcdc_assets/errors.py\n+++ b/pgcdc_assets/errors.py\n"
    path.write_text(f"{header}@@ -1 +1 @@\n-x\n+y\n")
    assert "errors.py" in str(apply(Patch(path, "a", "b"), copy, "--check"))


def test_there_are_enough() -> None:
    assert len({patch.rule for patch in patches()}) == len(patches()) >= 20
