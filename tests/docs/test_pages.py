"""The pages are short, in plain English, and their commands, settings and Python are valid."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
import yaml

from docs.hooks.generated import EXAMPLES
from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.settings import Settings
from tests.docs.site import ROOT, SOURCES, blocks, prose, sentences, words
from tests.plainwords import INSTEAD, found

MOST_WORDS = 1500
"""The most words of one page. Code blocks and generated parts are not counted."""
MOST_WORDS_IN_ALL = 30_000
LONGEST_SENTENCE = 35
"""The most words of one sentence. Code counts as one word."""
PAGES = [*SOURCES, ROOT / "README.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_page_is_short_and_in_plain_english(page: Path) -> None:
    text = page.read_text()
    assert words(prose(text)) <= MOST_WORDS
    assert [one for one in sentences(text) if words(one) > LONGEST_SENTENCE] == []
    assert found(INSTEAD, re.sub(r"`[^`]*`", "", prose(text))) == [], "see INSTEAD in tests/plainwords.py"


@pytest.mark.parametrize("page", SOURCES, ids=NAMES[:-1])
def test_page_begins_with_a_title_and_a_sentence(page: Path) -> None:
    title, blank, first = page.read_text().split("\n", 2)
    assert title.startswith("# ")
    assert not blank
    assert first[0].isalnum() or first[0] in "`*["


def test_all_pages_together_are_short() -> None:
    assert sum(words(prose(page.read_text())) for page in SOURCES) <= MOST_WORDS_IN_ALL


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_of_a_page_exist(page: Path) -> None:
    for command in _commands(page):
        _check(command)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_of_a_page_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_of_a_page_are_valid(page: Path) -> None:
    for block in blocks(page, "yaml"):
        for document in yaml.safe_load_all(block):
            if isinstance(document, dict) and set(document) & set(Settings.model_fields) and "pgcdc.yaml" in block:
                _loaded(document)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_a_setting_is_valid(name: str) -> None:
    given = yaml.safe_load(f"{name}: {EXAMPLES[name]}")
    _loaded(given)


def _loaded(given: dict[str, object]) -> None:
    assert Settings.of(**given)


def _commands(page: Path) -> Iterator[list[str]]:
    """The words of each ``pgcdc`` command in shell blocks and in the text."""
    shell = [re.sub(r"\\\n\s*", " ", block) for block in blocks(page, "sh", "bash", "shell", "console")]
    inline = re.findall(r"`(pgcdc [^`]+)`", prose(page.read_text()))
    for line in [*(line for block in shell for line in block.splitlines()), *inline]:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, "|"]:
            if set(word) <= set("|&;<>()"):
                if command[:1] == ["pgcdc"]:
                    yield command
                command = []
            elif command or not re.match(r"\w+=", word):
                command.append(word)


def _check(command_line: Sequence[str]) -> None:
    """Fails unless the command and its options exist."""
    rest = command_line[3:] if command_line[1:2] == ["--component"] else command_line[1:]
    if not rest or rest[0].startswith("-"):
        return
    if rest[0] == "COMMAND":
        return
    command = pgcdc.commands.get(rest[0])
    assert command is not None, command_line
    known = {option for item in command.params if isinstance(item, click.Option) for option in item.opts}
    given = {word.partition("=")[0].strip("[]") for word in rest[1:] if word.strip("[").startswith("-")}
    assert given - {"-", "--help", "-h"} <= known, command_line
