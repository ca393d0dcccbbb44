"""``pgcdc --help`` lists each command under a topic, with the first sentence of the command's own help. Examples in the
help are valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pgcdc_assets.cli.main import pgcdc, run
from pgcdc_assets.project import save_catalog
from tests.defs.catalogs import catalog_of
from tests.projectfiles import CATALOG_FILE

NAMES = sorted(pgcdc.commands)


def _help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*arguments, "--help"]) == 0
    return capsys.readouterr().out


def test_the_list_of_commands_shows_whole_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = _help(capsys)
    assert "..." not in shown.replace("[ARGS]...", "").replace("PGCDC_...", "")
    assert max(map(len, shown.splitlines())) <= 60
    words = " ".join(shown.split())
    for name in NAMES:
        first = " ".join((pgcdc.commands[name].help or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        assert f"{name} {first}." in words


def test_the_list_of_commands_has_every_command_under_a_topic() -> None:
    listed = [name for names in pgcdc.topics.values() for name in names]
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_has_examples_that_are_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, shown = _help(capsys, name).rpartition("Example")
    examples = [line.strip() for line in shown.splitlines() if line.strip().startswith("pgcdc ")]
    assert examples
    for example in examples:
        words = shlex.split(re.split(r"[|>]", example)[0])
        command = pgcdc.commands[words[1]]
        assert command.name == name
        with command.make_context(name, words[2:], parent=click.Context(pgcdc, **pgcdc.context_settings)):
            pass


@pytest.mark.long
def test_a_shell_completes_commands_and_tables(tmp_path: Path) -> None:
    """Calls pgcdc as bash does for completion: see "Shell completion" in docs/reference/commands.md."""

    def completed(*words: str) -> list[str]:
        variables = {
            "_PGCDC_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        process = subprocess.run(
            [str(Path(sys.executable).with_name("pgcdc"))], cwd=tmp_path, env={**os.environ, **variables},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [line.partition(",")[2] for line in process.stdout.splitlines() if line]

    assert completed("pgcdc", "st") == ["status"]
    assert completed("pgcdc", "snapshot", "public.o") == []
    save_catalog(catalog_of(("public", "orders"), ("public", "other"), ("public", "carts")), tmp_path / CATALOG_FILE)
    assert completed("pgcdc", "snapshot", "public.o") == ["public.orders", "public.other"]
