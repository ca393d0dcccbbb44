"""The commands that prepare the source and clean it up: setup, teardown."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from pgcdc_assets.cli.arguments import as_json, confirm, examples, is_component, with_yes
from pgcdc_assets.cli.console import amount, say, show, waits
from pgcdc_assets.cli.jobs import release_instance
from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.demo import shop
from pgcdc_assets.errors import MachineError, PgcdcError, SettingsError, SlotMissing, StoreFailed, UsageError
from pgcdc_assets.flow.lock import holder, lake_lock, refuse_unwritable, unwritable
from pgcdc_assets.project import change_note, load_note, note_file, note_made, save_catalog
from pgcdc_assets.projectfile import EMBEDDED, SETTINGS_FILE, save_source, without_secrets
from pgcdc_assets.settings import Settings
from pgcdc_assets.store import storage

if TYPE_CHECKING:
    from pgcdc_assets.checks.documents import SetupDocument
    from pgcdc_assets.source.setup.findings import Finding
    from pgcdc_assets.source.setup.setup import SetupReport


@click.command(epilog=examples("pgcdc setup", "pgcdc setup --sql --role replicator > setup.sql"))
@as_json
@click.option("--sql", "as_sql", is_flag=True, help="Print a script for the owner of the source; change nothing.")
@click.option("--role", help="With --sql: the role that will replicate, if it is not the connecting role.")
def setup(as_json: bool, as_sql: bool, role: str | None) -> int:
    """Prepare the source: create the publication and the slot. Also checks the source and saves the catalog. Safe to
    run again."""
    from pgcdc_assets.flow.ownlake import refuse_other_lake, refuse_other_slot
    from pgcdc_assets.projectsource import started_source

    settings = Settings.load()
    refuse_other_lake(settings)
    refuse_other_slot(settings)
    if as_sql:
        return _print_script(settings, role)
    if role:
        raise click.UsageError("--role requires --sql")
    report = make_ready(settings, started_source(settings))
    if as_json:
        click.echo(json.dumps(setup_json(report), indent=1))
    else:
        _print(report)
    return 0


@click.command(epilog=examples("pgcdc teardown", "pgcdc teardown --yes --lake"))
@with_yes
@click.option("--lake", "lake_too", is_flag=True, help="Remove the lake too. Files of other programs stay.")
@click.option("--forget", is_flag=True, help="For a source that is gone or was replaced: do not connect to it.")
@click.option("--shared", is_flag=True, help="Also remove a slot or publication that another project made or uses.")
def teardown(yes: bool, lake_too: bool, forget: bool, shared: bool) -> int:
    """Remove what setup made: slot, publication, saved catalog. The lake stays unless --lake is given.

    What another project made stays unless --shared is given. Exits with 1 if something that this project made stays.
    """
    from pgcdc_assets.flow.ownlake import refuse_other_lake, refuse_other_slot

    settings = Settings.load()
    refuse_other_lake(settings, may_be_gone=True)
    refuse_other_slot(settings)
    things = [] if forget else _to_remove(settings, shared)
    things = things or ["the saved state of this project"]
    if lake_too:
        things.append(f"the lake {settings.layout.root}")
    what = " and ".join([", ".join(things[:-1]), things[-1]] if things[:-1] else things)
    if not yes:
        confirm("remove", what)
    return _removed(settings, lake_too, forget=forget, shared=shared)


def _to_remove(settings: Settings, shared: bool) -> list[str]:
    """What teardown will remove from the source. Without ``shared``, raises UsageError for a publication that another
    project reads."""
    from pgcdc_assets.projectsource import is_embedded, require_same_source, source_of
    from pgcdc_assets.source.setup.setup import traces

    require_same_source(settings)
    if is_embedded(settings):
        # No other project uses the embedded server. So it need not be started to find out what it has.
        return [f"slot {settings.slot}", f"publication {settings.publication}"]
    found = traces(settings, source_of(settings), load_note(settings.state).made, shared=shared)
    if shared:
        return found.ours
    for publication, slots in found.read_by_others.items():
        raise UsageError(
            f"is used by slot {slots[0]} of another project, which would lose changes",
            thing=f"publication {publication}",
            do="run `pgcdc teardown` in that project first, or run `pgcdc teardown --shared` here",
        )  # fmt: skip
    return found.ours


def _print_script(settings: Settings, role: str | None) -> int:
    from pgcdc_assets.projectsource import require_same_source, source_of
    from pgcdc_assets.source.setup.rights import owner_script

    require_same_source(settings)
    show(owner_script(settings, source_of(settings), role))
    return 0


def make_ready(settings: Settings, conninfo: str) -> SetupReport:
    """Create publication and slot if they are missing, and save the source's catalog in the project."""
    from pgcdc_assets.flow.ownlake import note_lake
    from pgcdc_assets.log.reader import ChangeLog
    from pgcdc_assets.projectsource import known_identity, remember
    from pgcdc_assets.source.setup.setup import setup
    from pgcdc_assets.spark.jars import java_command

    # Check Java and the lake first. If no sync could read the new slot, the slot would keep WAL on the source.
    java_command()
    refuse_unwritable(settings.layout)
    _check_slot(settings, conninfo)
    report = setup(
        settings,
        conninfo,
        on_wait=lambda holders: say(waits(holders, "setup"), err=True),
        made=load_note(settings.state).made,
        making=partial(note_made, settings.state),
        first=not settings.catalog_file.exists() and not ChangeLog(settings.layout).exists,
    )
    report = replace(
        report, catalog=replace(report.catalog, identity=known_identity(settings, report.catalog.identity))
    )
    save_catalog(report.catalog, settings.catalog_file)
    remember(settings, conninfo, report.catalog.identity)
    with suppress(PgcdcError, OSError):
        if (log := ChangeLog(settings.layout)).exists:
            note_lake(settings, log)
    findings = [*_room(settings, report.copy_bytes), *_refused(report.catalog), *report.findings]
    return replace(report, findings=[*findings, *_saved_source(settings)])


def _room(settings: Settings, copy_bytes: int) -> list[Finding]:
    """A warning if the lake's disk has less free space than a first copy reads."""
    from pgcdc_assets.source.setup.findings import Finding

    root = settings.layout.root
    free = storage.free_bytes(root)
    if free is None or free >= copy_bytes:
        return []
    what = f"has {amount(free)} free, but the tables take {amount(copy_bytes)} on the source"
    return [Finding("warning", f"lake {root}", what, "free some space, or set `lake` to another place")]


def _check_slot(settings: Settings, conninfo: str) -> None:
    """Raise WrongLake if the slot was already read for another lake. Raise SlotMissing if this lake has a change log,
    but the slot does not exist."""
    from pgcdc_assets.flow.ownlake import log_id, refuse_taken_slot
    from pgcdc_assets.source.connect.connection import APPLICATION, connect
    from pgcdc_assets.source.connect.failures import COPY_ANEW
    from pgcdc_assets.source.slot.slot import slot_status

    try:
        log = log_id(settings.layout)
    except (PgcdcError, OSError, ValueError):
        return
    with connect(conninfo, application_name=f"{APPLICATION}/setup") as conn:
        slot = slot_status(conn, settings.slot)
    if log is None and slot is not None and slot.database == slot.connected_to:
        refuse_taken_slot(slot, settings.layout)
    if log is not None and slot is None:
        root = settings.layout.root
        what = f"does not exist, but lake {root} has its change log: changes after the end of this log are lost"
        raise SlotMissing(what, thing=f"slot {settings.slot}", do=COPY_ANEW)


def _saved_source(settings: Settings) -> list[Finding]:
    """Write the source into pgcdc.yaml, so that shells without PGCDC_SOURCE work on the same source. Writes nothing for
    a component of a Dagster project, because the component's file already names the source."""
    from pgcdc_assets.source.setup.findings import Finding

    if is_component():
        return []

    source = settings.source or EMBEDDED
    try:
        if not save_source(source):
            return []
    except SettingsError as error:
        return [Finding("warning", str(SETTINGS_FILE), error.what, error.do or "")]
    do = "put the password into PGPASSWORD, a service file or a passfile" if without_secrets(source) != source else ""
    what = "now contains the source" + (", without its password" if do else "")
    return [Finding("info", str(SETTINGS_FILE), what, do)]


def _refused(catalog: Catalog) -> list[Finding]:
    """Findings for published tables that cannot be mirrored. Sync, status and verify report them too."""
    from pgcdc_assets.mirror.delta.mirrorschema import refusal, way_back
    from pgcdc_assets.source.setup.findings import Finding

    reasons = {table.name: reason for table in catalog.tables if (reason := refusal(table)) is not None}
    return [
        Finding("warning", f"table {name}", f"cannot be mirrored: {reason}", way_back(name, refused=True))
        for name, reason in reasons.items()
    ]


def _removed(settings: Settings, lake_too: bool, *, forget: bool, shared: bool) -> int:
    """Remove everything, under the lake's lock, so that no other process writes. Returns the exit code."""
    from pgcdc_assets.projectsource import origin_file

    with ExitStack() as stack:
        _hold_lake(stack, settings, must=lake_too)
        left: dict[str, bool] = {}
        if forget:
            what = f"if slot {settings.slot} still exists on a source, drop it, because it keeps WAL there"
            say(f"pgcdc: {what}", err=True)
        else:
            left = _removed_from_source(settings, shared=shared)
        retired = True
        # If the slot stays, a later sync can continue the change log.
        if not lake_too and f"slot {settings.slot}" not in left:
            retired = _retire_log(settings)
        release_instance(settings)
        settings.catalog_file.unlink(missing_ok=True)
        origin_file(settings).unlink(missing_ok=True)
        if made := [thing for thing, ours in left.items() if ours]:
            # Keep the file that lists what setup created (the project's note), with the things that stay. A later
            # teardown, perhaps as another role, can then remove them.
            change_note(settings.state, lake=None, log=None, made=tuple(made))
        else:
            note_file(settings.state).unlink(missing_ok=True)
        if lake_too:
            _remove_lake(settings)
    return 0 if retired and not made else 1


def _hold_lake(stack: ExitStack, settings: Settings, *, must: bool) -> None:
    """Take the lake's lock if the lock file exists. Without the file there is no writer, and taking the lock would
    create the lake's folder. If the lake is not writable or out of reach, teardown continues without the lock, so that
    no slot stays on the source. ``must``: raise an error instead, because the lake is to be deleted."""
    try:
        try:
            there = storage.exists(settings.layout.lock)
        except OSError as error:
            raise unwritable(settings.layout, error) from None
        if there:
            stack.enter_context(lake_lock(settings.layout, "teardown"))
    except MachineError as error:
        if must or (not isinstance(error, StoreFailed) and holder(settings.layout) is not None):
            raise


def _remove_lake(settings: Settings) -> None:
    from pgcdc_assets.mirror.delta.removal import remove_lake

    root = settings.layout.root
    there = any(True for _ in storage.walk(root, hidden=True))
    if left := remove_lake(settings.layout):
        more = f" and {len(left) - 1} more" if left[1:] else ""
        say(f"removed this project's files from lake {root}")
        say(f"pgcdc: folder {root} stays, because it contains files of other programs: {left[0]}{more}", err=True)
    else:
        say(f"removed lake {root}" if there else f"there is no lake {root}")


def _removed_from_source(settings: Settings, *, shared: bool) -> dict[str, bool]:
    """Remove what setup made, and report what stays. Returns each thing that stays, and whether this project made
    it."""
    from pgcdc_assets.projectsource import is_embedded, started_source
    from pgcdc_assets.source.setup.setup import teardown, traces

    conninfo, made = started_source(settings), load_note(settings.state).made
    # No other project uses the embedded server.
    shared = shared or is_embedded(settings)
    removed = teardown(settings, conninfo, made, shared=shared)
    for thing in removed or ["nothing from the source"]:
        say(f"removed {thing}")
    left = traces(settings, conninfo, made, shared=shared).left
    for thing, why in left.items():
        say(f"pgcdc: {thing} stays: {why}", err=True)
    if is_embedded(settings):
        shop.server(settings.state).stop()
    return {thing: thing in made for thing in left}


def _retire_log(settings: Settings) -> bool:
    """Rename the change log, but keep it. Without its slot, the log can never continue, and the next slot needs a new
    log. If renaming fails, prints the reason and returns False."""
    from pgcdc_assets.log.reader import ChangeLog

    try:
        log = ChangeLog(settings.layout)
        if log.exists:
            place = log.path.with_name(f"{log.path.name}-{log.position():012X}")
            storage.move_folder(log.path, place)
            say(f"kept the change log, under the new name {place}")
    except (OSError, StoreFailed) as error:
        why = error.what if isinstance(error, StoreFailed) else error.strerror
        say(f"pgcdc: the change log of lake {settings.layout.root} could not be renamed: {why}; make the lake "
            "writable, and run `pgcdc teardown` again before `pgcdc setup`", err=True)  # fmt: skip
        return False
    return True


def setup_json(report: SetupReport) -> SetupDocument:
    return {
        "ok": True,
        "created": list(report.created),
        "tables": [str(table.name) for table in report.catalog.tables],
        "copy_bytes": report.copy_bytes,
        "findings": [{"severity": f.severity, "thing": f.thing, "what": f.what, "do": f.do} for f in report.findings],
    }


def _print(report: SetupReport) -> None:
    for finding in report.findings:
        say(f"{finding.severity}: {finding}", err=True)
    for line in report.created:
        say(f"created {line}")
    tables = report.catalog.tables
    count = "1 table is" if len(tables) == 1 else f"{len(tables)} tables are"
    say(f"{count} published, {amount(report.copy_bytes)} on the source; run `pgcdc sync`")
    for table in tables:
        say(f"  {table.name}{'' if table.updates_seen else '  (inserts only)'}")
