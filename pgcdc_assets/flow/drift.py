"""Looks in the catalog for what no LSN shows: at the start of a run, as ranges close, and now and then while idle."""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.flow.work import Work
from pgcdc_assets.source.catalog.drift import Drift, Remedy, table_changes


def watch(work: Work, live: Sequence[Table]) -> None:
    """Compare each table, as at its copy, with the catalog now. Raises EmptyPublication where nothing is left.

    Tables that lost or gained rows behind the stream, and those that were published since, wait for a copy
    afterwards, also where they had been set aside; those that cannot be followed exactly are set aside; those
    that the stream no longer carries are followed no further. All are told.
    """
    refuse_emptied(work.catalog, live)
    now = {table.name: table for table in live}
    for name in work.progress.gone(now):
        work.observer.progress("watch", f"table {name}: is not published any more, or was dropped")
    for name in work.progress.found(live):
        work.observer.progress("watch", f"table {name}: is published now")
    for entry in [*work.progress.followed(), *work.progress.set_aside()]:
        found = [change for change in table_changes(entry.table, now.get(entry.table.name))
                 if entry.state.readable or change.action is Remedy.COPY]  # fmt: skip
        for change in found:
            if change.action in (Remedy.COPY, Remedy.SET_ASIDE):
                work.observer.progress("watch", str(change))
        live_table = now.get(entry.table.name)
        if live_table is not None and (reason := work.target.refusal(live_table)) is not None:
            work.progress.refuse(live_table, reason)
        elif entry.refused:
            work.progress.request_copy([entry.table.name])
        elif copy := _first(found, Remedy.COPY):
            work.progress.must_copy(copy.table, work.log.position(), copy.what)
        elif aside := _first(found, Remedy.SET_ASIDE):
            work.progress.put_aside(aside.table, work.log.position(), aside.what)


def refuse_emptied(catalog: Catalog, live: Sequence[Table]) -> None:
    """Going on would look well while every change is lost."""
    if not live:
        raise EmptyPublication("lists no table any more", thing=f"publication {catalog.publication}",
                               do="add the tables back, or run `pgcdc setup`")  # fmt: skip


def _first(changes: Sequence[Drift], action: Remedy) -> Drift | None:
    return next((change for change in changes if change.action is action), None)
