"""The option ``--component``: a command takes its settings from a component of a Dagster project."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from pgcdc_assets.cli.arguments import LOG_FORMAT, use_log_format
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.settings import PREFIX, Settings

_META = "pgcdc.component"


def of_component(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """Set the variables ``PGCDC_...`` to the component's settings, for this process and the processes that it starts.
    Such variables of the shell are ignored. ``name``: the component's folder below ``defs``. Raises SettingsError if
    the working directory is not in a Dagster project, or if the component cannot be loaded."""
    if name is not None:
        # Load the component before any variable is changed, because its file may refer to one of these variables, for
        # example by `source: "{{ env.PGCDC_SOURCE }}"`.
        given = _settings(name)
        for field in Settings.model_fields:
            os.environ.pop(PREFIX + field.upper(), None)
        os.environ.update({PREFIX + field.upper(): _text(value) for field, value in given.items()})
        context.meta[_META] = name
        if asked := context.meta.get(LOG_FORMAT) or given.get("log_format"):
            use_log_format(asked)
    return name


def is_component() -> bool:
    """Whether the running command was given a component."""
    context = click.get_current_context(silent=True)
    return context is not None and _META in context.meta


def _settings(name: str) -> dict[str, Any]:
    import dagster as dg

    from pgcdc_assets.defs.pipeline import PgcdcComponent

    try:
        tree = dg.ComponentTree.for_project(Path.cwd())
        found = tree.load_component(name, PgcdcComponent)
    except Exception as error:  # noqa: BLE001
        # Dagster imports the project's modules here, so any exception is possible.
        raise SettingsError(
            f"cannot be loaded: {_cause(error)}",
            thing=f"component {name}",
            do="run the command in the Dagster project, give the component's folder below `defs` as NAME, and set the "
            "environment variables that its file reads",
        ) from None
    root = tree.project_root
    own = {"name": found.name, "source": found.source, "lake": found.lake_of(root), "state": found.state_of(root)}
    return {**found.settings, **own, "tables": found.tables}


def _cause(error: BaseException) -> str:
    """The error at which the chain of causes begins, in one line. For a wrong attribute, its value is left out,
    because it may be a password."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"attribute `{'.'.join(map(str, first['loc']))}`: {first['msg']}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _text(value: Any) -> str:
    """The value as a variable holds it: lists and maps as JSON."""
    return str(value) if isinstance(value, (str, Path)) else json.dumps(value)
