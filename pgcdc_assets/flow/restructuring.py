"""Goes on with a table whose structure has changed: by its mirror's own rows, by a new copy, or by somebody's word."""

from __future__ import annotations

from collections.abc import Callable

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.feed.table import FeedTable
from pgcdc_assets.flow.reports import Restructured
from pgcdc_assets.flow.reshaping import Reshaped
from pgcdc_assets.flow.standing import TableProgress
from pgcdc_assets.flow.work import Work
from pgcdc_assets.source.catalog.successor import alike, successor, with_leaves

PAGE_BYTES = 8192
"""Size of a page on the source, unless it was built otherwise."""


def restructure(work: Work, entry: TableProgress, now: Table, since: Lsn, what: str) -> None:
    """Follow a table to the structure that the catalog shows ``now``, which it had at ``since`` at the latest.

    ``what``: the change, in words. It is found by the catalog, or by a row that came under another structure. If the
    mirror has the new structure already and such rows still cannot be read, the table is copied.
    """
    if work.settings.schema_changes == "set_aside":
        work.progress.put_aside(now.name, since, what)
        return
    after = successor(entry.table, now, since)
    if isinstance(after, str):
        copy_by_itself(work, entry, now, since, f"{what} ({after})" if after not in what else what)
    elif entry.table.lineage is not None and alike(entry.table, now):
        copy_by_itself(work, entry, now, since, what)
    else:
        work.progress.reshaping(after.name)
        work.reshapes.begin(entry.table, after, what, by_metadata=work.settings.schema_changes == "metadata")


def widen(work: Work, entry: TableProgress, now: Table, position: Callable[[], Lsn], what: str) -> None:
    """Give a mirror the columns that came without a value in older rows, once no row from below has brought them.

    Rows tell such columns by themselves, as long as the mirror is not known to have another structure. Where these
    would cost more than a commit, or a copy, they come with the first row. ``position``: of the source, now.
    """
    if work.settings.schema_changes == "set_aside":
        return
    if isinstance(successor(entry.table, now, entry.replay_lsn), str):
        restructure(work, entry, now, position(), what)
        return
    seen = work.progress.widening(now.name, now.column_rows, position)
    if entry.replay_lsn >= seen:
        restructure(work, entry, now, seen, what)


def follow_partitions(
    work: Work, entry: TableProgress, now: Table, since: Lsn, without_rows: Callable[[int], bool], what: str
) -> None:  # fmt: skip
    """Follow a table of which partitions came or went, as the catalog shows ``now``: rows of those that went leave the
    mirror. Rows that a partition had when it came were in no stream; with one such the table is copied.

    A partition that is seen without a row, after it came, has had all rows that it ever gets in the stream.
    """
    known = {leaf.oid for leaf in entry.table.leaves}
    filled = next((leaf for leaf in now.leaves if leaf.oid not in known and not without_rows(leaf.oid)), None)
    if filled is not None:
        copy_by_itself(work, entry, now, since, f"has a new partition {filled.name}, with rows in it")
        return
    # Rows of a leaf that went may have been derived, and not applied yet.
    FeedTable(work.layout, work.identity, entry.table).end_at(entry.replay_lsn)
    after = with_leaves(entry.table, now, since)
    work.progress.reshaping(after.name)
    work.reshapes.begin(entry.table, after, what)


def copy_by_itself(work: Work, entry: TableProgress, now: Table, lsn: Lsn, what: str) -> None:
    """Have a table copied anew, unless it is so large that nobody may want that."""
    size, most = now.pages * PAGE_BYTES, work.settings.recopy_bytes
    if size <= most:
        work.progress.must_copy(now.name, lsn, what)
        work.observer.restructured(Restructured(now.name, what, entry.table, now, lsn, copied=True))
        return
    reason = f"{what}; it has {size >> 20} MiB, more than `recopy_bytes`, and waits for a word"
    if entry.reason != reason:
        work.progress.put_aside(now.name, lsn, reason)


def land(work: Work, reshaped: Reshaped) -> bool:
    """Take in a change of structure that has ended; returns whether the table goes on with it.

    A table that waits for a copy meanwhile, or was set aside, does not.
    """
    name = reshaped.after.name
    if name not in work.progress or not work.progress[name].reshaping:
        return False
    if reshaped.failure is not None and work.progress[name].state.readable:
        work.progress.put_aside(name, work.progress[name].replay_lsn, reshaped.failure)
        work.observer.progress("watch", f"{name} is set aside: {reshaped.failure}")
        return False
    before, after = work.progress[name].table, reshaped.after
    if not work.progress.reshaped(after, reshaped.version):
        return False
    lineage = after.lineage
    assert lineage is not None
    followed = Restructured(name, reshaped.what, before, after, Lsn(lineage.since), False, reshaped.version)
    work.observer.restructured(followed)
    work.observer.progress("watch", f"table {name}: {reshaped.what}; its mirror has followed, as of "
                           f"{Lsn(lineage.since)}", lsn=str(Lsn(lineage.since)))  # fmt: skip
    return True
