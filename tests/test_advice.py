"""The advice in errors names only commands, options and settings that exist."""

from __future__ import annotations

import re

import click

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.settings import Settings
from tests.advised import advice

_COMMAND = re.compile(r"(?:`|: )pgcdc ([a-z][a-z-]*)((?: --?[a-z]+)*)")
_SETTING = re.compile(r"setting `(\w+)`|set `(\w+)` to|`(\w+)` to the (?:matching|primary)")


def test_advice_names_only_commands_and_options_that_pgcdc_has() -> None:
    found = [(text, *match.groups()) for text in advice() for match in _COMMAND.finditer(text)]
    assert len(found) > 40
    for text, name, given in found:
        command = pgcdc.commands.get(name)
        assert command is not None, text
        options = {option for one in command.params if isinstance(one, click.Option) for option in one.opts}
        assert set(given.split()) <= options, text


def test_advice_names_only_settings_that_pgcdc_has() -> None:
    named = {name for text in advice() for match in _SETTING.finditer(text) for name in match.groups() if name}
    assert {"lake", "slot", "source", "tables"} <= named <= Settings.model_fields.keys()
