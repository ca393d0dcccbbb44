"""Each test that is named in docs/explanation/guarantees.md and tests/README.md exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
_NAMED = re.compile(r"`(tests/[\w/]+/|(?:tests/[\w/]*)?test_\w+\.py)?(?:…)?(?:::(\w+?)(…?))?`")
"""Matches a name of tests: a folder, or a file (possibly without its folder), or a function in a file. `…::` stands for
the file that the page named last."""


@pytest.mark.parametrize("page", ["docs/explanation/guarantees.md", "tests/README.md"])
def test_tests_that_the_page_names_exist(page: str) -> None:
    missing = []
    last = ""
    for file, function, more in _NAMED.findall((ROOT / page).read_text()):
        if not file and not function:
            continue
        last = file or last
        found = [path for name, path in FILES.items() if name.startswith(last) or name.endswith(f"/{last}")]
        wanted = f"def {function}" if more else f"def {function}("
        if not any(not function or wanted in path.read_text() for path in found):
            missing.append(f"{last}::{function}")
    assert not missing


def test_every_promise_of_the_guarantees_page_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs" / "explanation" / "guarantees.md").read_text().splitlines()
            if line.startswith("| **")]  # fmt: skip
    assert rows
    assert not [row for row in rows if "`tests/" not in row]
