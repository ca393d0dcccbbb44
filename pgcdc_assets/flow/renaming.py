"""Renames the mirror of a table that was renamed or moved to another schema, without a copy.

A renamed relation keeps its OID, and the log's rows find their table by the OID. So the mirror's rows stay correct
under the new name, and later changes follow from the log. Points list the table under its new name at or above the LSN
of the catalog check that showed this name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.reports import Restructured
from pgcdc_assets.flow.reshaping import Reshaped
from pgcdc_assets.flow.work import Work
from pgcdc_assets.structure.record import TableRecord


def rename(work: Work, entries: Sequence[TableRecord]) -> None:
    """Begin to rename the mirrors that still have their tables' former names. The mirror at the former place is not
    changed, so if the run dies, the next run begins again."""
    for entry in entries:
        assert entry.former is not None
        work.progress.reshaping(entry.table.name)
        what = f"was called {entry.former}"
        work.observer.progress("watch", f"table {entry.table.name}: {what}, and its mirror goes on under the new name")
        work.reshapes.begin_rename(entry, entry.former, what)


def land(work: Work, renamed: Reshaped, since: Lsn) -> bool:
    """Take in a mirror that has been renamed; returns whether its table is followed. If not, the table waits for a
    copy. ``since``: the LSN of the catalog check that showed the new name."""
    name, former = renamed.after.name, renamed.former
    assert former is not None
    if name not in work.progress:
        return False
    # Rows in this feed that are not applied yet belong to the table that had the name before.
    work.feeds.begin_anew_if_unreadable(renamed.after)
    work.feeds.open(renamed.after).end_at(work.progress[name].replay_lsn)
    if renamed.failure is not None:
        what = f"table {name} is copied: the mirror of {former} cannot go on: {renamed.failure}"
        work.observer.progress("watch", what)
        work.progress.request_copy([name])
    if not work.progress.renamed(name, former, renamed.version):
        return False
    before = replace(renamed.after, name=former)
    work.observer.restructured(Restructured(name, renamed.what, before, renamed.after, since, False, renamed.version))
    return True
