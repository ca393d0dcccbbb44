"""The commands that only read: status, positions, verify. They work while a sync runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

from pgcdc_assets.cli.arguments import TABLE, as_json, examples
from pgcdc_assets.cli.console import ConsoleProgress, say, visible
from pgcdc_assets.cli.jobs import refuse_unknown, run_sync, saved_settings
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.project import required_catalog
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pgcdc_assets.checks.documents import StatusDocument
    from pgcdc_assets.checks.report import TableReport, VerifyReport
    from pgcdc_assets.checks.status import Status
    from pgcdc_assets.flow.boundary import SyncTo
    from pgcdc_assets.log.announcements import Announcement

_LSN_WIDTH = 17
"""Characters of the longest LSN, ``FFFFFFFF/FFFFFFFF``."""


@click.command(epilog=examples("pgcdc status", "pgcdc status --json | jq .problems"))
@as_json
def status(as_json: bool) -> int:
    """Show the slot, LSNs, lag, the state of each table, and problems."""
    from pgcdc_assets.checks.status import status as look

    found = look(Settings.load())
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        print_status(found)
    return 0 if found.ok else 1


@click.command(epilog=examples("pgcdc positions"))
@as_json
def positions(as_json: bool) -> int:
    """Show up to which LSN changes are received, durable and applied, where syncs end, and whether apply is paused."""
    from pgcdc_assets.checks.positions import positions as look

    found = look(saved_settings())
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        say(f"{name:<14} {value if value is not None else '-'}")
    return 0


@click.command(epilog=examples("pgcdc verify", "pgcdc verify public.orders public.customers"))
@click.argument("tables", nargs=-1, type=TABLE, metavar="[TABLE]...")
@as_json
def verify(tables: tuple[TableName, ...], as_json: bool) -> int:
    """Compare every value in source and mirrors, at one LSN.

    The source can be written to during the comparison. Exits with 1 if a table differs or cannot be read, and with 3 if
    no table differs but some tables could not be compared.
    """
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.projectsource import started_source

    settings = Settings.load()
    refuse_other_lake(settings)
    refuse_unknown(settings, tables)
    conninfo = started_source(settings)
    progress = ConsoleProgress()

    def sync_to(lsn: Lsn, max_seconds: float | None) -> None:
        run_sync(settings, progress, command="verify", until=str(lsn), max_seconds=max_seconds)

    with progress.shown("verify"):
        report = verified(settings, conninfo, tables or None, progress, sync_to)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report)
    return report.exit_code


def verified(
    settings: Settings, conninfo: str, tables: tuple[TableName, ...] | None, progress: ConsoleProgress, sync_to: SyncTo
) -> VerifyReport:
    """Compare the tables (None: all). The mirrors must be exactly at the LSN of the source's snapshot. A running sync
    brings them there; if no sync runs, ``sync_to`` does."""
    from pgcdc_assets.checks.verify import verify
    from pgcdc_assets.flow.boundary import Boundary
    from pgcdc_assets.source.connect.connection import connect
    from pgcdc_assets.source.slot.slot import usable_slot

    with connect(conninfo) as conn:
        usable_slot(conn, required_catalog(settings.catalog_file).identity.slot, two_phase=settings.two_phase)
    boundary = Boundary(settings, conninfo, sync_to, progress.waiting)
    boundary.prepare()

    def told(report: TableReport) -> None:
        said = f"{report.source_rows:,} rows" if report.compared else report.reason
        progress.note(f"verify: {report.table}: {_WORDS[report.verdict]}, {said}")

    # The catalog is read again, because a sync may have given renamed tables their new names.
    catalog = required_catalog(settings.catalog_file)
    return verify(settings, catalog, tables, boundary.reach, conninfo=conninfo, snapshot=boundary.snapshot,
                  on_table=told)  # fmt: skip


_WORDS: Final = {
    "equal": "equal",
    "unknown": "not known to be equal",
    "differs": "differs",
    "not_compared": "could not be compared",
    "failed": "could not be read",
}


def print_report(report: VerifyReport) -> None:
    """Print a table of the results on stdout, then examples of rows that differ, by key."""
    width = max((len(visible(str(table.table))) for table in report.tables), default=5)
    say(f"{'table':<{width}}  {'source':>12}  {'mirror':>12}  {'lsn':<{_LSN_WIDTH}}  result")
    for table in report.tables:
        name, lsn = visible(str(table.table)), "-" if table.lsn is None else str(table.lsn)
        rows = (f"{table.source_rows:,}", f"{table.mirror_rows:,}") if table.compared else ("-", "-")
        say(f"{name:<{width}}  {rows[0]:>12}  {rows[1]:>12}  {lsn:<{_LSN_WIDTH}}  {_result(table)}")
    for table in report.tables:
        for example in table.examples:
            key = ", ".join(f"{name}={value}" for name, value in example.key.items())
            columns = f": {', '.join(example.columns)}" if example.columns else ""
            say(f"{table.table}: {example.kind} ({key}){columns}")


def in_a_sentence(report: VerifyReport) -> str:
    """The report in one sentence."""
    if report.ok:
        return "all tables are equal"
    found: dict[str, list[str]] = {}
    for table in report.tables:
        found.setdefault(table.verdict, []).append(visible(str(table.table)))
    words = [("differs", "tables differ"), ("failed", "tables could not be read"),
             ("not_compared", "tables could not be compared")]  # fmt: skip
    told = [f"{said}: {', '.join(found[verdict])}" for verdict, said in words if verdict in found]
    return "; ".join(told if report.exit_code == 1 else ["no table differs", *told])


def _result(table: TableReport) -> str:
    if table.equal:
        return f"equal: {table.reason}" if table.reason else "equal"
    counts = {"missing": table.missing, "extra": table.extra, "different": table.different}
    found = [f"{count:,} {name}" for name, count in counts.items() if count]
    told = [*([", ".join(found)] if found else []), *([table.reason] if table.reason else [])]
    return f"{_WORDS[table.verdict]}: {'; '.join(told)}"


def _in_progress(found: Announcement) -> str:
    """Describes the transactions that are being received before their commit."""
    from pgcdc_assets.checks.health import span

    number = f"{found.number} transaction{'s' * (found.number != 1)}, {found.bytes:,} bytes received"
    return f"{number}; the oldest is xid {found.xid}, open for {span(found.age)}, from LSN {found.lsn}"


def _late(data: StatusDocument) -> str:
    seconds = data["lag_seconds"]
    return f", {seconds:,.1f} s" if seconds else ""


def print_status(found: Status) -> None:
    """Print the positions, the tables, and what is wrong, on stdout."""
    data = found.to_json()
    slot = data["slot"]
    if slot:
        reader = f"read by {data['at_work']}" if data["at_work"] else "not being read"
        if slot["active"]:
            reader = f"read by pid {slot['active_pid']}"
        say(f"slot {slot['name']}: wal_status {slot['wal_status']}, {reader}")
        done = slot["decoded"]
        say(
            f"decoded              {done['total_txns']:,} transactions, {done['total_bytes']:,} bytes; spilled on the "
            f"source {done['spill_bytes']:,} bytes, streamed {done['stream_bytes']:,} bytes"
        )
        say(f"confirmed_flush_lsn  {slot['confirmed_flush_lsn'] or '-'}")
    if found.in_progress is not None:
        say(f"in progress          {_in_progress(found.in_progress)}")
    if found.hold is not None:
        say(f"paused               for {found.hold}" + ("" if found.hold.lsn else ": nothing is applied"))
    for kept in data["prepared"]:
        what = f"xid {kept['xid']}, {kept['changes']:,} changes, since {kept['prepared']}"
        say(f"prepared             {visible(kept['gid'])}: {what}")
    say(f"transform_lsn        {data['transform_lsn'] or '-'}")
    behind = (
        "" if data["lag_bytes"] is None else f"  ({data['lag_bytes']:,} bytes of WAL behind the source{_late(data)})"
    )
    say(f"replay_lsn           {data['replay_lsn'] or '-'}{behind}")
    if "messages" in data:
        reason = f"  {data['messages']['reason']}" if data["messages"]["reason"] else ""
        say(f"messages             {data['messages']['replay_lsn'] or '-'}{reason}")
    width = max((len(visible(table["name"])) for table in data["tables"]), default=0)
    for table in data["tables"]:
        reason = f"  {table['reason']}" if table["reason"] else ""
        say(f"  {visible(table['name']):<{width}}  {table['state']:<12} {table['replay_lsn'] or '-'}{reason}")
    for problem in data["problems"]:
        say(f"{problem['severity']}: {problem['what']}; {problem['do']}")
    if found.uncopied:
        tables = "1 table waits" if found.uncopied == 1 else f"{found.uncopied} tables wait"
        do = f"{found.at_work} copies them" if found.at_work else "run `pgcdc sync`"
        say(f"info: {tables} for a copy; {do}")
    if not data["problems"]:
        say("nothing is wrong")
