"""The commands that move data (sync, follow, snapshot, heal, repair), and the commands that control running syncs
(until, pause, resume)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from pgcdc_assets.cli.arguments import LSN, RANGE, TABLE, as_json, examples
from pgcdc_assets.cli.console import ConsoleProgress, say
from pgcdc_assets.cli.jobs import project_settings, refuse_unknown, run_repair, run_sync, saved_settings
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pgcdc_assets.checks.documents import SyncDocument
    from pgcdc_assets.flow.reports import SyncReport


@click.command(epilog=examples("pgcdc sync", "pgcdc sync --until 0/16B3748"))
@click.option("--until", type=LSN, help="Stop at this LSN instead of the source's current LSN.")
@as_json
def sync(until: Lsn | None, as_json: bool) -> int:
    """Copy new tables, bring all mirrors up to date, and end."""
    report = _synced("sync", until=None if until is None else str(until))
    _print_sync(report, as_json)
    if until is not None and until <= report.start and not report.transactions:
        say(f"pgcdc: the lake had already reached LSN {until}, so nothing was received", err=True)
    return _code(report)


@click.command(epilog=examples("pgcdc follow"))
@click.option("--receive-only", is_flag=True, help="Only write changes to the change log. Mirrors are not updated.")
def follow(receive_only: bool) -> int:
    """Keep the mirrors up to date until Ctrl-C."""
    from pgcdc_assets.flow.requests import operator_requests

    report = _synced("follow", follow=True, receive_only=receive_only or None)
    _print_sync(report, False)
    with suppress(PgcdcError, OSError):
        requests = operator_requests(saved_settings().layout)
        if requests.reached(report.transform_lsn):
            say(f"pgcdc: ended at LSN {requests.endpos}, as `pgcdc until` requested; `pgcdc until --clear` cancels the "
                "request", err=True)  # fmt: skip
    return _code(report)


@click.command(epilog=examples("pgcdc snapshot public.orders"))
@click.argument("tables", nargs=-1, required=True, type=TABLE, metavar="TABLE...")
def snapshot(tables: tuple[TableName, ...]) -> int:
    """Copy tables again. Also works while `pgcdc follow` runs."""
    return _for_tables("snapshot", "copy_anew", tables)


@click.command(epilog=examples("pgcdc heal public.orders"))
@click.argument("tables", nargs=-1, required=True, type=TABLE, metavar="TABLE...")
def heal(tables: tuple[TableName, ...]) -> int:
    """Follow tables again that pgcdc stopped following (set aside), once the cause is fixed. Applies the missing
    changes from the change log, without a copy. Also works while `pgcdc follow` runs."""
    return _for_tables("heal", "heal", tables)


@click.command(epilog=examples("pgcdc repair public.orders --range 0/16B3748..0/16C0000"))
@click.argument("table", type=TABLE, metavar="TABLE")
@click.option(
    "--range",
    "span",
    type=RANGE,
    required=True,
    help="An LSN range X/Y..X/Y, or the key of a partition of `change_log` in Dagster.",
)
def repair(table: TableName, span: LsnRange) -> int:
    """Rebuild, from the change log, the rows that changed in an LSN range. Also works while `pgcdc follow` runs."""
    settings = project_settings()
    refuse_unknown(settings, [table])
    progress = ConsoleProgress()
    with progress.shown(f"repairing {table}"):
        run_repair(settings, progress, table=str(table), span=span.key)
    for report in progress.ranges:
        turn = report.tables.get(table)
        changed = (turn.inserted, turn.updated, turn.deleted) if turn else (0, 0, 0)
        say("{}: range {}: {} rows inserted, {} updated, {} deleted".format(table, report.span, *changed))
    return 0


@click.command(epilog=examples("pgcdc until --current", "pgcdc until 0/16B3748", "pgcdc until --clear"))
@click.argument("lsn", type=LSN, required=False)
@click.option("--current", is_flag=True, help="End at the source's current LSN.")
@click.option("--clear", is_flag=True, help="Cancel the request to end at an LSN.")
def until(lsn: Lsn | None, current: bool, clear: bool) -> int:
    """Make the running sync, and the sensor's runs, end at an LSN. Later runs end there too, until you use --clear."""
    from pgcdc_assets.flow.requests import follow_until
    from pgcdc_assets.log.reader import ChangeLog

    if (lsn is not None) + current + clear != 1:
        raise click.UsageError("Give an LSN, --current or --clear.")
    settings = saved_settings()
    if current:
        lsn = _source_position(settings)
    follow_until(settings.layout, lsn)
    say("the request to end at an LSN is cancelled" if lsn is None else f"syncs end at {lsn}")
    with suppress(PgcdcError, OSError):
        log = ChangeLog(settings.layout)
        if lsn is not None and log.exists and lsn < (position := log.position()):
            say(f"pgcdc: changes are already received up to LSN {position}, so syncs end at once; `pgcdc until "
                "--clear` cancels the request", err=True)  # fmt: skip
    return 0


@click.command(epilog=examples("pgcdc pause apply"))
@click.argument("what", type=click.Choice(["apply"]))
def pause(what: str) -> int:
    """Stop applying changes to the mirrors. Changes are still received into the change log."""
    return _pause(paused=True)


@click.command(epilog=examples("pgcdc resume apply"))
@click.argument("what", type=click.Choice(["apply"]))
def resume(what: str) -> int:
    """Apply changes again. The mirrors catch up from the change log."""
    return _pause(paused=False)


def _for_tables(command: str, wish: str, tables: Sequence[TableName]) -> int:
    """Run a sync that first copies or heals these tables. ``wish``: ``copy_anew`` or ``heal``, a field of
    :class:`SyncConfig`."""
    names = [str(table) for table in tables]
    report = _synced(f"{command} {' '.join(names)}", tables, **{wish: names})
    _print_sync(report, False)
    return _code(report)


def _synced(command: str, tables: Sequence[TableName] = (), **config: Any) -> SyncReport:
    settings = project_settings()
    refuse_unknown(settings, tables)
    progress = ConsoleProgress()
    with progress.shown(command):
        run_sync(
            settings, progress, command=command, **{name: value for name, value in config.items() if value is not None}
        )
    assert progress.report is not None
    return progress.report


def _print_sync(report: SyncReport, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(sync_json(report), indent=1))
        return
    for copy in report.copied:
        say(f"{copy.table}: {copy.rows} rows copied at {copy.consistent_point}")
    say(f"{report.transactions} transactions, {report.rows} rows in {report.seconds:.1f} s; replay_lsn {report.end}")
    from pgcdc_assets.mirror.delta.mirrorschema import way_back

    if report.paused:
        say(f"pgcdc: apply is paused: new changes, up to {report.transform_lsn}, are only in the change log", err=True)
    for table, reason in report.set_aside:
        do = way_back(table, refused=table in report.refused)
        say(f"pgcdc: {table} is set aside, so its mirror is no longer updated: {reason}; {do}", err=True)
    for table, reason in report.left:
        say(f"pgcdc: {table} is behind the other tables: {reason}; run `pgcdc sync` again", err=True)
    for table, what in report.changed:
        shell = table.shell
        do = f"`pgcdc verify {shell}` lists the rows that differ, `pgcdc snapshot {shell}` copies the table again"
        say(f"pgcdc: the mirror of {table} does not match the source: {what}; {do}", err=True)


def sync_json(report: SyncReport) -> SyncDocument:
    return {
        "ok": not _code(report),
        "start_lsn": str(report.start),
        "replay_lsn": str(report.end),
        "transform_lsn": str(report.transform_lsn),
        "copied": [
            {"name": str(c.table), "consistent_point": str(c.consistent_point), "rows": c.rows} for c in report.copied
        ],
        "turns": report.turns,
        "transactions": report.transactions,
        "rows": report.rows,
        "stream_aborts": report.stream_aborts,
        "seconds": round(report.seconds, 3),
        "set_aside": [{"name": str(table), "reason": reason} for table, reason in report.set_aside],
        "changed": [{"name": str(table), "what": what} for table, what in report.changed],
        "left": [{"name": str(table), "reason": reason} for table, reason in report.left],
    }


def _code(report: SyncReport) -> int:
    """The exit code: 3 if the run succeeded but left a table behind (set aside, changed by another writer, or not at
    the position of the other tables), to distinguish this from a run that failed."""
    return 3 if report.set_aside or report.changed or report.left else 0


def _pause(*, paused: bool) -> int:
    from pgcdc_assets.flow.requests import pause_apply

    changed = pause_apply(saved_settings().layout, paused=paused)
    already = "" if changed else " already"
    say(f"apply is paused{already}: changes only go into the change log" if paused else f"changes are applied{already}")
    return 0


def _source_position(settings: Settings) -> Lsn:
    from pgcdc_assets.projectsource import source_of
    from pgcdc_assets.source.connect.connection import APPLICATION, connect
    from pgcdc_assets.source.slot.slot import boundary

    with connect(source_of(settings), application_name=f"{APPLICATION}/positions") as conn:
        return boundary(conn)
