"""The pre-commit hooks and CI use the project's tools and Makefile targets. A hook accepts only commit messages that
follow Conventional Commits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.servers import VERSIONS

ROOT = Path(__file__).parent.parent
HOOKS = {hook["id"]: hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
         for hook in repo["hooks"]}  # fmt: skip
CI = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
MESSAGE = re.compile(HOOKS["commit-message"]["entry"], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "message",
    ["fix(mirror): copy a table again\n\nA body with a line that is longer than 72 characters, which is fine there.\n",
     "feat!: drop a setting", "test(history, property): name the rule", f"docs: {'x' * 66}", "fixup! fix: a",
     "Merge branch 'x'"],
)  # fmt: skip
def test_conventional_commit_messages_are_accepted(message: str) -> None:
    assert MESSAGE.search(message)


@pytest.mark.parametrize(
    "message",
    ["Fix a table", "fix a table", "fix:no space", "fix(Mirror): a", f"docs: {'x' * 67}", "x\nfix: a", "fix: "],
)
def test_commit_messages_that_are_not_conventional_are_refused(message: str) -> None:
    assert not MESSAGE.search(message)


def test_hooks_use_the_tools_of_the_virtual_environment() -> None:
    needed = (ROOT / "pyproject.toml").read_text()
    for hook in HOOKS.values():
        if hook["language"] == "system":
            tool = hook["entry"].split()[0]
            assert tool.startswith(".venv/bin/")
            assert f'"{Path(tool).name}>=' in needed


def test_ci_calls_only_targets_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"run: make ([\w-]+)", CI)
    assert targets
    assert not [target for target in targets if f"\n{target}:" not in makefile]


def test_ci_runs_the_tests_with_the_oldest_and_the_newest_supported_postgresql() -> None:
    matrix = yaml.safe_load(CI)["jobs"]["test"]["strategy"]["matrix"]
    assert [int(version) for version in matrix["postgresql"]] == [min(VERSIONS), max(VERSIONS)]
