"""What no LSN shows, looked for in the catalog: at a run's start, and as ranges close."""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.work import Work
from pgcdc_assets.source.watch import Action, Change, table_changes


def watch(work: Work, live: Sequence[Table]) -> list[TableName]:
    """Compare each followed table, as at its copy, with the catalog now.

    Tables that lost or gained rows behind the stream are returned, to be copied anew; those that cannot
    be followed exactly are set aside; those that the stream no longer carries are followed no further. All
    are told.
    """
    now = {table.name: table for table in live}
    for name in work.progress.gone(now):
        work.observer.progress("watch", f"table {name}: is not published any more, or was dropped")
    anew: list[TableName] = []
    for entry in work.progress.followed():
        found = table_changes(entry.table, now.get(entry.table.name))
        for change in found:
            if change.action in (Action.COPY, Action.SET_ASIDE):
                work.observer.progress("watch", str(change))
        if copy := _first(found, Action.COPY):
            anew.append(copy.table)
        elif aside := _first(found, Action.SET_ASIDE):
            work.progress.put_aside(aside.table, work.log.position(), aside.what)
    work.progress.request_copy(anew)
    return anew


def _first(changes: Sequence[Change], action: Action) -> Change | None:
    return next((change for change in changes if change.action is action), None)
