"""The commands that control or show running syncs: until, pause, resume, positions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from pgcdc_assets.cli.arguments import LsnType, as_json
from pgcdc_assets.cli.lines import say

if TYPE_CHECKING:
    from pgcdc_assets.core.lsn import Lsn
    from pgcdc_assets.settings import Settings


@click.command()
@click.argument("lsn", type=LsnType(), required=False)
@click.option("--current", is_flag=True, help="Where the source stands now.")
@click.option("--clear", is_flag=True, help="Take it back: follow on.")
def until(lsn: Lsn | None, current: bool, clear: bool) -> int:
    """Make the running sync, and the sensor's runs, end at an LSN. Later runs end there too, until --clear."""
    from pgcdc_assets.flow.requests import follow_until

    if (lsn is not None) + current + clear != 1:
        raise click.UsageError("Give an LSN, --current or --clear.")
    settings = _set_up()
    if current:
        lsn = _source_position(settings)
    follow_until(settings.layout, lsn)
    say("following goes on" if lsn is None else f"following ends at {lsn}")
    return 0


@click.command()
@click.argument("what", type=click.Choice(["apply"]))
def pause(what: str) -> int:
    """Stop applying changes to the mirrors. Changes still go into the log, and the slot is freed."""
    return _pause(paused=True)


@click.command()
@click.argument("what", type=click.Choice(["apply"]))
def resume(what: str) -> int:
    """Apply changes again. The mirrors catch up from the log."""
    return _pause(paused=False)


@click.command()
@as_json
def positions(as_json: bool) -> int:
    """Show the positions written, flushed and replayed. Also shows where following ends, and whether changes are
    applied."""
    from pgcdc_assets.checks.sentinel import positions as look

    found = look(_set_up())
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
        return 0
    for name, value in found.to_json().items():
        say(f"{name:<14} {value if value is not None else '-'}")
    return 0


def _pause(*, paused: bool) -> int:
    from pgcdc_assets.flow.requests import pause_apply

    changed = pause_apply(_set_up().layout, paused=paused)
    already = "" if changed else " already"
    say(f"apply is paused{already}: changes go into the log alone" if paused else f"changes are applied{already}")
    return 0


def _set_up() -> Settings:
    """The settings of a project that has been set up."""
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.project import required_catalog
    from pgcdc_assets.settings import Settings

    settings = Settings.load()
    refuse_other_lake(settings)
    required_catalog(settings.catalog_file)
    return settings


def _source_position(settings: Settings) -> Lsn:
    from pgcdc_assets.projectsource import source_of
    from pgcdc_assets.source.connect.connection import APPLICATION, connect
    from pgcdc_assets.source.slot.positions import boundary

    with connect(source_of(settings), application_name=f"{APPLICATION}/positions") as conn:
        return boundary(conn)
