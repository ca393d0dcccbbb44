"""All advice is listed in tests/advice.py, and names only commands, options and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.settings import Settings
from tests.advice import FOLLOWED, KINDS
from tests.advised import advice

ROOT = Path(__file__).parent.parent
WRITTEN = [*FOLLOWED, *(text for texts in KINDS.values() for text in texts)]
_COMMAND = re.compile(r"(?:`|: )pgcdc ([a-z][a-z-]*)((?: --?[a-z]+)*)")
_SETTING = re.compile(r"setting `(\w+)`|set `(\w+)` to|`(\w+)` to the (?:matching|primary)")


def test_all_advice_is_listed() -> None:
    """New advice needs a test that follows it, or an entry in one of the lists of tests/advice.py."""
    assert set(WRITTEN) == advice()
    assert len(WRITTEN) == len(set(WRITTEN))


def test_tests_that_follow_advice_exist() -> None:
    for text, node in FOLLOWED.items():
        path, _, name = node.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), text


def test_commands_and_options_in_advice_exist() -> None:
    found = [(text, *match.groups()) for text in WRITTEN for match in _COMMAND.finditer(text)]
    assert len(found) > 40
    for text, name, given in found:
        command = pgcdc.commands.get(name)
        assert command is not None, text
        options = {option for one in command.params if isinstance(one, click.Option) for option in one.opts}
        assert set(given.split()) <= options, text


def test_settings_in_advice_exist() -> None:
    named = {name for text in WRITTEN for match in _SETTING.finditer(text) for name in match.groups() if name}
    assert {"lake", "slot", "source", "tables"} <= named <= Settings.model_fields.keys()
