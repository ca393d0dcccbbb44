"""Carries out the verdict of the catalog check on a table, and takes in mirrors that have got another structure."""

from __future__ import annotations

from collections.abc import Callable

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.reports import Restructured
from pgcdc_assets.flow.reshaping import Reshaped
from pgcdc_assets.flow.work import Work
from pgcdc_assets.structure.record import TableRecord
from pgcdc_assets.structure.successor import alike, successor, with_leaves
from pgcdc_assets.structure.verdict import AfterRows, Later, Recopy, Reshape, SetAside, Stay, Verdict


def carry_out(work: Work, found: Verdict, record: TableRecord, now: Table, position: Callable[[], Lsn]) -> None:
    """Carry out the verdict on a table. ``now``: the table as the catalog shows it. ``position``: returns the source's
    present position."""
    name = now.name
    match found:
        case SetAside(reason, refused=True):
            work.progress.refuse(now, reason)
        case SetAside(reason):
            if record.followed or record.reason != reason:
                work.progress.put_aside(name, work.log.position(), reason)
        case Recopy(reason, restructured):
            lsn = work.log.position()
            work.progress.must_copy(name, lsn, reason)
            if restructured:
                work.observer.restructured(Restructured(name, reason, record.table, now, lsn, copied=True))
        case Reshape():
            _reshape(work, found, record, now, position())
        case AfterRows(what):
            since = work.progress.columns_came(name, now.marks.columns, position)
            if record.replay_lsn >= since:
                _reshape(work, Reshape(what), record, now, since)
        case Stay():
            work.progress.rest(name, now)
        case Later():
            pass


def _reshape(work: Work, found: Reshape, record: TableRecord, now: Table, since: Lsn) -> None:
    """Begin to change the mirror to the new structure, which the source has at ``since`` or already below."""
    if found.leaves:
        # The feed may hold rows of a removed leaf that are not applied yet.
        work.feeds.open(record.table).end_at(record.replay_lsn)
    after = (with_leaves if found.leaves else successor)(record.table, now, since)
    work.progress.reshaping(after.name)
    by_metadata = work.settings.schema_changes == "metadata" and not found.leaves
    work.reshapes.begin(record.table, after, found.what, by_metadata=by_metadata)


def land(work: Work, reshaped: Reshaped) -> bool:
    """Take in a change of structure that has ended; returns whether the table is followed with the new structure.

    It is not if the change failed, or if the table was set aside or has to be copied for another reason.
    """
    name = reshaped.after.name
    if name not in work.progress or not work.progress[name].reshaping:
        return False
    if reshaped.failure is not None and work.progress[name].followed:
        work.progress.put_aside(name, work.progress[name].replay_lsn, reshaped.failure)
        work.observer.progress("watch", f"{name} is set aside: {reshaped.failure}")
        return False
    before, after = work.progress[name].table, reshaped.after
    if not work.progress.reshaped(after, reshaped.version):
        return False
    since = Lsn(after.descent.since)
    work.observer.restructured(Restructured(name, reshaped.what, before, after, since, False, reshaped.version))
    done = _done(before, after)
    what = f"table {name}: {reshaped.what}; {done}, as of {since}"
    work.observer.progress("watch", what, lsn=str(since))
    return True


def _done(before: Table, after: Table) -> str:
    """What the mirror did. It did nothing if the catalog shows the old structure again, after a column was renamed and
    renamed back."""
    leaves, now = ({leaf.oid for leaf in table.leaves} for table in (before, after))
    if alike(before, after) and leaves == now:
        return "that was undone since, and its mirror stays as it was"
    return "its mirror has followed"
