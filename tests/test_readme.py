"""The README is short, its commands and settings exist, and its links have a target."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.settings import Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WORDS = 700
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
LINES = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
INLINE = [shlex.split(text) for text in re.findall(r"`(pgcdc [^`]*)`", README)]
COMMANDS = sorted({tuple(words) for words in [*LINES, *INLINE] if words[:1] == ["pgcdc"]})
LINKS = sorted(set(re.findall(r"\]\(((?!https?:)[^)]+)\)", README)))


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= WORDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_readme_exists(words: tuple[str, ...]) -> None:
    _, name, *rest = words
    command = pgcdc.commands[name]
    known = {option for parameter in command.params for option in parameter.opts if isinstance(parameter, click.Option)}
    assert {word for word in rest if word.startswith("--")} <= known


def test_settings_in_the_readme_are_valid() -> None:
    for words in LINES:
        if words[:1] == ["echo"]:
            Settings(**yaml.safe_load(words[1]))


@pytest.mark.parametrize("words", [tuple(words) for words in LINES if words[:1] == ["make"]], ids=" ".join)
def test_a_make_target_of_the_readme_is_in_the_makefile(words: tuple[str, ...]) -> None:
    assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("link", LINKS)
def test_link_in_the_readme_has_a_target(link: str) -> None:
    place, _, anchor = link.partition("#")
    assert (ROOT / place).exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", (ROOT / place).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
