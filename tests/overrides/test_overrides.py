"""Each override can be applied, and its test exists. ``make overrides`` checks that the test fails with the
override."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys

import pytest

from tests.overrides.applied import VARIABLE
from tests.overrides.override import Override, original_of, overrides
from tests.overrides.run import ROOT, SITE

ALL = overrides()


@pytest.mark.parametrize("override", ALL.values(), ids=ALL.keys())
def test_every_function_that_an_override_replaces_exists_and_can_be_replaced(override: Override) -> None:
    for target in override.targets:
        original = original_of(target, importlib.import_module(target.split(":")[0]))
        assert override.make(original) is not original


@pytest.mark.parametrize("override", ALL.values(), ids=ALL.keys())
def test_every_override_has_a_rule_and_names_an_existing_test(override: Override) -> None:
    file, function = override.test.split("[")[0].split("::")
    tree = ast.parse((ROOT / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert override.rule


def test_a_new_process_applies_the_override_before_any_module_imports_the_function() -> None:
    script = "from pgcdc_assets.log.commit import storage; from pgcdc_assets.store.localfiles import sync_file; " \
             "print(sync_file.__module__)"  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]), VARIABLE: "fsync_is_skipped"}
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tests.overrides.log"
