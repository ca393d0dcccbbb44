"""The commands that only look: status, verify. They work while a sync runs."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from pgcdc_assets.cli.arguments import TableType, as_json
from pgcdc_assets.cli.lines import say, visible
from pgcdc_assets.savedcatalog import load_catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgcdc_assets.checks.status import Status
    from pgcdc_assets.checks.verify import ComparisonPoint, TableReport, VerifyReport
    from pgcdc_assets.cli.console import ConsoleProgress
    from pgcdc_assets.core.lsn import Lsn
    from pgcdc_assets.core.names import TableName
    from pgcdc_assets.flow.hold import HoldRequest
    from pgcdc_assets.log.receive.announce import Announcement
    from pgcdc_assets.settings import Settings

_POLL_SECONDS = 0.2


@click.command()
@as_json
def status(as_json: bool) -> int:
    """Slot health, positions, lag, and the state of every table."""
    from pgcdc_assets.checks.status import status as look
    from pgcdc_assets.settings import Settings

    found = look(Settings.load())
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print_status(found)
    return 0 if found.ok else 1


@click.command()
@click.argument("tables", nargs=-1, type=TableType(), metavar="[TABLE]...")
@as_json
def verify(tables: tuple[TableName, ...], as_json: bool) -> int:
    """Compare source and mirrors, every row and value, at one LSN, while writes go on."""
    from pgcdc_assets.cli.console import ConsoleProgress
    from pgcdc_assets.cli.jobs import run_sync
    from pgcdc_assets.project import started_source
    from pgcdc_assets.settings import Settings

    settings = Settings.load()
    conninfo = started_source(settings)
    progress = ConsoleProgress()
    with progress.shown("verify"):
        report = verified(
            settings,
            conninfo,
            tables or None,
            progress,
            lambda lsn: run_sync(progress, command="verify", until=str(lsn)),
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report)
    return 0 if report.ok else 1


def verified(
    settings: Settings,
    conninfo: str,
    tables: tuple[TableName, ...] | None,
    progress: ConsoleProgress,
    sync_to: Callable[[Lsn], None],
) -> VerifyReport:
    """Verify. Whoever writes to the lake makes a boundary at the snapshot's LSN; if nobody writes, ``sync_to`` is
    called."""
    from pgcdc_assets.checks.source_facts import renamed
    from pgcdc_assets.checks.verify import verify
    from pgcdc_assets.errors import SetupNeeded
    from pgcdc_assets.flow import hold, lock
    from pgcdc_assets.settings import CATALOG_FILE
    from pgcdc_assets.source.connect.connection import connect
    from pgcdc_assets.source.positions import flush_lsn
    from pgcdc_assets.source.slot.slotstatus import usable_slot

    catalog = load_catalog(CATALOG_FILE)
    if catalog is None:
        raise SetupNeeded("there is no saved catalog", thing=str(CATALOG_FILE))
    with connect(conninfo) as conn:
        usable_slot(conn, catalog.identity.slot, two_phase=settings.two_phase)
        unseen, now = renamed(conn, catalog.tables), flush_lsn(conn)
    if unseen and lock.holder(settings.layout) is None:
        # Their mirrors go on under the new names first, and are compared under these.
        sync_to(now)
        catalog = load_catalog(CATALOG_FILE) or catalog

    def told(report: TableReport) -> None:
        said = "equal" if report.equal else "not known to be equal" if report.explained else "NOT equal"
        progress.note(f"verify: {report.table}: {said}, {report.source_rows:,} rows")

    with hold.placed(settings.layout) as request:
        return verify(
            settings,
            catalog,
            tables,
            lambda lsn: _reach(lsn, settings, request, sync_to),
            conninfo=conninfo,
            on_table=told,
            on_wait=progress.waiting,
        )


def _reach(lsn: Lsn, settings: Settings, request: HoldRequest, sync_to: Callable[[Lsn], None]) -> ComparisonPoint:
    """The consistent point at exactly ``lsn``."""
    from pgcdc_assets.core.states import TableState
    from pgcdc_assets.errors import LakeError, LockHeld
    from pgcdc_assets.flow import lock, sentinel
    from pgcdc_assets.points.points import ConsistentPoints
    from pgcdc_assets.points.states import TableStates

    request.at(lsn)
    points = ConsistentPoints(settings.layout)
    states = TableStates(settings.layout)
    while not points.has(lsn):
        stored = states.all().values()
        if stored and not any(row.state.readable or row.state is TableState.COPYING for row in stored):
            raise LakeError("follows no table: all are set aside", thing=str(settings.lake), do="see `pgcdc status`")
        if sentinel.read(settings.layout).paused:
            raise sentinel.apply_paused(settings.layout)
        if lock.holder(settings.layout) is not None:
            time.sleep(_POLL_SECONDS)
            continue
        try:
            sync_to(lsn)
        except LockHeld:
            continue
        if not points.has(lsn):
            raise LakeError("was reached, but no table could be brought to it", lsn=lsn, do="see `pgcdc status`")
    point = points.at(lsn)
    assert point is not None
    return point


def print_report(report: VerifyReport) -> None:
    """A table on stdout, then the rows that differ, by key."""
    width = max((len(visible(str(table.table))) for table in report.tables), default=5)
    say(f"{'table':<{width}}  {'source':>12}  {'mirror':>12}  at {report.lsn}")
    for table in report.tables:
        said = "equal" if table.equal else _difference(table)
        say(f"{visible(str(table.table)):<{width}}  {table.source_rows:>12,}  {table.mirror_rows:>12,}  {said}")
    for table in report.tables:
        for example in table.examples:
            key = ", ".join(f"{name}={value}" for name, value in example.key.items())
            columns = f": {', '.join(example.columns)}" if example.columns else ""
            say(f"{table.table}: {example.kind} ({key}){columns}")


def _difference(table: TableReport) -> str:
    counts = {"missing": table.missing, "extra": table.extra, "different": table.different}
    found = [f"{count:,} {name}" for name, count in counts.items() if count]
    return "; ".join([*([", ".join(found)] if found else []), *([table.reason] if table.reason else [])])


def _in_progress(found: Announcement) -> str:
    """The transactions that are received before their commit."""
    from pgcdc_assets.checks.facts import span

    number = f"{found.number} transaction{'s' * (found.number != 1)}, {found.bytes:,} bytes received"
    return f"{number}; the oldest, xid {found.xid}, for {span(found.age)}, from {found.lsn} on"


def _print_status(found: Status) -> None:
    data = found.to_json()
    slot = data["slot"]
    if slot:
        reader = f"read by pid {slot['active_pid']}" if slot["active"] else "read by nobody now"
        say(f"slot {slot['name']}: wal_status {slot['wal_status']}, {reader}")
        done = slot["decoded"]
        say(
            f"decoded              {done['total_txns']:,} transactions, {done['total_bytes']:,} bytes; spilled on the "
            f"source {done['spill_bytes']:,}, streamed {done['stream_bytes']:,}"
        )
        say(f"confirmed_flush_lsn  {slot['confirmed_flush_lsn'] or '-'}")
    if found.in_progress is not None:
        say(f"in progress          {_in_progress(found.in_progress)}")
    for kept in data["prepared"]:
        what = f"xid {kept['xid']}, {kept['changes']:,} changes, since {kept['prepared']}"
        say(f"prepared             {visible(kept['gid'])}: {what}")
    say(f"transform_lsn        {data['transform_lsn'] or '-'}")
    behind = "" if data["lag_bytes"] is None else f"  ({data['lag_bytes']:,} bytes of WAL behind the source)"
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
    if not data["problems"]:
        say("nothing is wrong")
