"""Carries out the verdicts of the catalog check (:mod:`pgcdc_assets.structure.verdict`): gives mirrors new structures
and names, sets tables aside, or makes tables wait for a new copy. Mirrors are changed in a separate thread, while the
turns of other tables continue.

A renamed table needs no new copy, because the log names tables by OID, and a renamed table keeps its OID. So its mirror
continues under the new name, and later changes are applied from the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.reports import StructureChange
from pgcdc_assets.flow.work import Work
from pgcdc_assets.structure.record import TableRecord
from pgcdc_assets.structure.successor import alike, successor, with_leaves
from pgcdc_assets.structure.verdict import AfterRows, Later, Recopy, Reshape, SetAside, Stay, Verdict


@dataclass(frozen=True)
class MirrorChange:
    """A change of a mirror. ``after``: the table after the change. ``what``: what was changed on the source. When the
    change has ended, ``version`` is the mirror's new version, or ``failure`` says why it failed."""

    after: Table
    what: str
    former: TableName | None = None
    """The mirror's former name, if the mirror is renamed."""
    version: int = -1
    failure: str | None = None


class StructureChanges:
    """The changes of mirrors in one run. They are made one by one in a separate thread. All methods are called in the
    run's own thread."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reshape")
        self._in_progress: list[tuple[MirrorChange, Future[int]]] = []

    @property
    def in_progress(self) -> bool:
        return bool(self._in_progress)

    def carry_out(self, found: Verdict, record: TableRecord, now: Table, position: Callable[[], Lsn]) -> None:
        """Carry out the verdict on a table. ``now``: the table in the catalog. ``position`` returns an LSN of the
        source after the catalog check."""
        progress, name = self._work.progress, now.name
        match found:
            case SetAside(reason, refused=True):
                progress.refuse(now, reason)
            case SetAside(reason) if record.unread is not None:
                self._work.put_aside(name, record.replay_lsn, reason)
            case SetAside(reason):
                if record.followed or record.reason != reason:
                    progress.put_aside(name, self._work.log.position(), reason)
            case Recopy(reason, restructured):
                lsn = self._work.log.position()
                progress.must_copy(name, lsn, reason)
                if restructured:
                    change = StructureChange(name, reason, record.table, now, lsn, copied=True)
                    self._work.observer.restructured(change)
            case Reshape():
                self._reshape(found, record, now, position())
            case AfterRows(what):
                since = progress.columns_came(name, now.marks.columns, position)
                if record.replay_lsn >= since:
                    self._reshape(Reshape(what), record, now, since)
            case Stay():
                progress.unchanged(name, now)
            case Later():
                pass

    def _reshape(self, found: Reshape, record: TableRecord, now: Table, since: Lsn) -> None:
        """Begin to change the mirror to the structure of ``now``. The source certainly has this structure at ``since``,
        and may have had it earlier."""
        if found.leaves:
            # Above the mirror's position, the feed may have rows of a leaf partition that was removed from the table.
            # They must not be applied.
            self._work.feeds.open(record.table).end_at(record.replay_lsn)
        after = (with_leaves if found.leaves else successor)(record.table, now, since)
        self._work.progress.reshaping(after.name)
        by_metadata = self._work.settings.schema_changes == "metadata" and not found.leaves
        done = self._pool.submit(self._work.target.reshape, record.table, after, by_metadata=by_metadata)
        self._in_progress.append((MirrorChange(after, found.what), done))

    def rename(self, record: TableRecord) -> None:
        """Begin to continue a mirror under its table's new name. The mirror under the former name stays: if the rename
        fails, it can be tried again."""
        assert record.former is not None
        self._work.progress.reshaping(record.table.name)
        what = f"was renamed from {record.former}"
        self._work.say("watch", f"table {record.table.name}: {what}, so its mirror is renamed too", record.table.name)
        change = partial(self._work.target.rename, record.former, record.table, record.version, record.replay_lsn)
        self._in_progress.append((MirrorChange(record.table, what, record.former), self._pool.submit(change)))

    def ended(self) -> Iterator[MirrorChange]:
        """Yield the changes that have ended since the last call. If a change failed for its table alone, it has
        ``failure``. Any other error is raised."""
        for change, done in [one for one in self._in_progress if one[1].done()]:
            self._in_progress.remove((change, done))
            with contained() as failed:
                change = replace(change, version=done.result())
            yield change if failed.reason is None else replace(change, failure=failed.reason)

    def cancel(self) -> None:
        """Cancel the changes in progress, and wait until they have ended, because nothing may be committed after the
        lake's lock is released. If a change was committed before it could be cancelled, the next run finds it in the
        mirror."""
        for _, done in self._in_progress:
            done.cancel()
        while left := [done for _, done in self._in_progress if not done.done()]:
            # The cancellation is repeated, because a change can be cancelled only while it has a Spark job.
            self._work.target.cancel_copies()
            wait_for(left, timeout=1)
        self._in_progress.clear()
        self._pool.shutdown(wait=True)

    def take_in(self, change: MirrorChange, seen_at: Lsn) -> bool:
        """Record a change that has ended. Returns whether its table is then followed. ``seen_at``: the LSN of the
        catalog check that showed the new name of a renamed table."""
        return self._reshaped(change) if change.former is None else self._renamed(change, change.former, seen_at)

    def _reshaped(self, change: MirrorChange) -> bool:
        """Record a change of structure. If it failed, the table is set aside. False if the table is not followed."""
        progress, name = self._work.progress, change.after.name
        if name not in progress or not progress[name].reshaping:
            return False
        if change.failure is not None and progress[name].followed:
            progress.put_aside(name, progress[name].replay_lsn, change.failure)
            self._work.say("watch", f"{name} is set aside, so its mirror no longer changes: {change.failure}", name)
            return False
        before, after = progress[name].table, change.after
        if not progress.reshaped(after, change.version):
            return False
        since = after.since
        self._report(change, before, since)
        self._work.say("watch", f"table {name}: {change.what}; {_done(before, after)}, as of LSN {since}", name, since)
        return True

    def _renamed(self, change: MirrorChange, former: TableName, seen_at: Lsn) -> bool:
        """Record that a mirror was renamed. If the mirror could not be renamed, record that its table waits for a copy.
        Returns False if the table is not followed."""
        progress, name = self._work.progress, change.after.name
        if name not in progress:
            return False
        # Above the mirror's position, the feed of this name may have rows of the table that had the name before.
        self._work.feeds.restart_if_unreadable(change.after)
        self._work.feeds.open(change.after).end_at(progress[name].replay_lsn)
        if change.failure is not None:
            why = f"its mirror could not be renamed from {former}: {change.failure}"
            self._work.say("watch", f"table {name} will be copied, because {why}", name)
            progress.request_copy([name])
        if not progress.renamed(name, former, change.version):
            return False
        self._report(change, replace(change.after, name=former), seen_at)
        return True

    def _report(self, change: MirrorChange, before: Table, since: Lsn) -> None:
        name, after = change.after.name, change.after
        self._work.observer.restructured(
            StructureChange(name, change.what, before, after, since, False, change.version)
        )


def _done(before: Table, after: Table) -> str:
    """A text that says whether the mirror has changed. It has not changed if, for example, a column was renamed and
    renamed back."""
    leaves, now = ({leaf.oid for leaf in table.leaves} for table in (before, after))
    if alike(before, after) and leaves == now:
        return "the change was undone, so the mirror is unchanged"
    return "the mirror has the new structure"
