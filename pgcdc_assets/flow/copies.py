"""Makes the snapshot copies of one run, while the run continues to apply changes. A **round** copies all tables that
wait for a copy, under one snapshot, in a separate thread. If another session altered or locked a table during its copy,
the next round copies it again."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Catalog, Table, relations_of
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyOutdated, PgcdcError, RightLacking
from pgcdc_assets.failures import Whose, of_one_table, whose
from pgcdc_assets.flow.catalogwatch import unread_comments
from pgcdc_assets.flow.work import Work
from pgcdc_assets.mirror.target import CopyCount, CopyReport, Failures
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.setup.rights import lacking_rights
from pgcdc_assets.source.slot.blockers import Blocker
from pgcdc_assets.source.snapshot.export import exported_snapshot, shown_tables

_GRANTED = "when these statements have run, the next sync copies the table"


@dataclass(frozen=True)
class Copied:
    table: Table
    """The table as the snapshot's catalog shows it."""
    report: CopyReport


class CopyCancelled(Exception):
    """The run ends before its copies are complete. Raised in the copies' thread."""


@dataclass(frozen=True)
class CopyChannel:
    """Messages between the copies' thread and the run's thread."""

    committed: queue.SimpleQueue[Copied] = field(default_factory=queue.SimpleQueue)
    notes: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """Messages for the user."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def raise_if_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise CopyCancelled

    def waiting(self, holders: Sequence[Blocker]) -> None:
        """Report the transactions that the snapshot waits for. CopyCancelled if the run has ended."""
        self.raise_if_cancelled()
        self.notes.put(f"waits for {', '.join(str(holder) for holder in holders) or 'a transaction on the source'}")


def copy(
    work: Work, conninfo: str, names: Sequence[TableName], channel: CopyChannel, count: CopyCount
) -> Failures:  # fmt: skip
    """Copy the tables under one exported snapshot; runs in the copies' thread. Returns the tables that were not copied,
    and why. Tables that our role may not read are left out before the snapshot is taken.

    Before any row is committed, the state ``copying`` is stored with the snapshot's LSN. After a crash, a mirror whose
    ``snapshot_lsn`` is below the stored LSN still holds an older copy, so the table is copied again."""
    lacking = _lacking_rights(work.catalog, conninfo, names)
    names = [name for name in names if name not in lacking]
    if not names:
        return lacking
    channel.notes.put("copying 1 table" if len(names) == 1 else f"copying {len(names)} tables")
    with exported_snapshot(conninfo, on_wait=channel.waiting) as snapshot:
        shown, outdated = shown_tables(snapshot, names, work.catalog.publications)
        for leaf in (f"table {table.name}: {leaf}" for table in shown.values() for leaf in table.outside):
            channel.notes.put(leaf)
        work.progress.copying(shown.values(), snapshot.consistent_point)
        for name in sorted(name for name, table in shown.items() if not table.comments_read):
            channel.notes.put(unread_comments(name))

        def committed(report: CopyReport) -> None:
            count.copied += 1
            channel.committed.put(Copied(shown[report.table], report))

        # Spark takes seconds to start, and the run may have ended during that time.
        work.session()
        channel.raise_if_cancelled()
        failed = work.target.copy(
            [table for name, table in shown.items() if name not in outdated], snapshot, committed, count
        )
        return {**lacking, **outdated, **failed}


def _lacking_rights(catalog: Catalog, conninfo: str, names: Sequence[TableName]) -> Failures:
    """The tables that our role may not read completely. The rights on partitions are checked too, for the partitions
    that the last catalog check found."""
    wanted = set(names)
    stored = {table.name: sorted(relations_of([table]) - {table.oid} if table.partitioned else {table.oid})
              for table in catalog.tables if table.name in wanted}  # fmt: skip
    with connect(conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
        found = lacking_rights(conn, stored)
    return {name: RightLacking(what, thing=f"table {name}", do=_GRANTED) for name, what in found.items()}


COPY_ROUNDS = 3
"""A run copies a table at most this many times, if somebody alters the table during or right after each copy."""


class Copies:
    """The rounds of copies of one run, one after another. Every method is called in the run's own thread. ``follow``:
    the run is in follow mode. A table that could not be copied is then tried again at each regular catalog check."""

    def __init__(self, work: Work, conninfo: str, *, follow: bool) -> None:
        self._work = work
        self._conninfo = conninfo
        self._follow = follow
        self.channel = CopyChannel()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._round: Future[Failures] | None = None
        self._asked: Sequence[TableName] = ()
        """The tables of the present or the last round."""
        self.count = CopyCount()
        """The progress of the present or the last round."""
        self._rounds: Counter[TableName] = Counter()
        """How many copies of each table this run has begun; at COPY_ROUNDS, the table is not copied again. In follow
        mode, a committed copy resets the count of its table, and :meth:`allow_again` resets all counts."""
        self.failure: PgcdcError | None = None
        """The first failure that ends the copies of this run. The run raises it once the other tables have caught
        up."""
        self.made: list[Copied] = []
        self.paused = False
        """Whether no round may begin, because applying is paused."""

    @property
    def under_way(self) -> bool:
        return self._round is not None

    @property
    def ended(self) -> bool:
        """Whether the last round that was begun has ended, so that it commits no more copies. :meth:`close` must then
        be called."""
        return self._round is not None and self._round.done()

    @property
    def highest(self) -> Lsn:
        """The highest consistent point of the committed copies; ZERO if there are none."""
        return max((copied.report.consistent_point for copied in self.made), default=ZERO)

    def begin(self, but: Collection[TableName] = ()) -> None:
        """Begin a round with the tables that wait for a copy, except the tables ``but``. Does nothing while a round is
        in progress, while applying is paused, or after a :attr:`failure`. A later round or the next run then copies the
        tables."""
        if self._round is not None or self.failure is not None or self.paused:
            return
        names = [table.name for table in self._work.progress.waiting() if table.name not in but]
        names = [name for name in names if self._worth_a_copy(name)]
        if names:
            self._rounds.update(names)
            self._asked = names
            self.count = CopyCount(len(names))
            self._round = self._pool.submit(copy, self._work, self._conninfo, names, self.channel, self.count)

    def allow_again(self) -> None:
        """At a regular catalog check in follow mode without a copy in progress, reset all counts of copies."""
        if self._follow and self._round is None:
            self._rounds.clear()

    def take_committed(self) -> Iterator[Copied]:
        """Yield the copies that were committed since the last call, and show the user the messages (``notes``) of the
        copies' thread."""
        while not self.channel.notes.empty():
            self._work.say("snapshot", self.channel.notes.get())
        while not self.channel.committed.empty():
            copied = self.channel.committed.get()
            if self._follow:
                del self._rounds[copied.table.name]
            self.made.append(copied)
            yield copied

    def close(self) -> set[TableName]:
        """Handle the failures of a round that has :attr:`ended`. Returns the tables that another session altered or
        locked during their copy, and that the next round tries again."""
        assert self._round is not None
        ended, self._round = self._round, None
        try:
            failures = ended.result()
        except PgcdcError as error:
            self._fail(error)
            return set()
        return self._sorted(failures)

    def begin_next(self, again: set[TableName]) -> None:
        """Begin the next round, with the tables to try ``again`` and the tables that were not in the last round."""
        self.begin(but=set(self._asked) - again)

    def cancel(self) -> None:
        """Cancel a round in progress, and wait for its end, because no copy may be committed after the run has released
        the lake's lock."""
        self.channel.cancelled.set()
        while self._round is not None and not self._round.done():
            # The cancellation is repeated, because a copy can be cancelled only while it has a Spark job.
            self._work.target.cancel_copies()
            wait_for([self._round], timeout=1)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _worth_a_copy(self, name: TableName) -> bool:
        """Whether this run may copy the table once more. The limit COPY_ROUNDS ends the copies of a table that other
        sessions alter all the time."""
        if self._rounds[name] < COPY_ROUNDS:
            return True
        if not self._follow:
            why = f"was altered after or during each of its {COPY_ROUNDS} copies in this run"
            self._fail(CopyOutdated(why, thing=f"table {name}", do="run `pgcdc sync` when it is no longer altered"))
        return False

    def _sorted(self, failures: Failures) -> set[TableName]:
        """Handle the failures of a round. Returns the tables that another session altered or locked, and that may be
        copied again at once. Other failures may not occur at a later try, for example if a right is granted. After such
        a failure, a run in follow mode tries the table again at the next regular catalog check. Any other run ends with
        the failure, once the other tables have caught up."""
        again: set[TableName] = set()
        for name, failure in failures.items():
            if whose(failure) is not Whose.WAITS:
                self._not_copied(name, failure)
                continue
            new = self._work.progress.not_copied(name, failure.what)
            if self._rounds[name] < COPY_ROUNDS and not isinstance(failure, RightLacking):
                self._work.say("snapshot", f"copied again, because {failure.thing} {failure.what}", name)
                again.add(name)
            elif not self._follow:
                if name in self._work.progress:
                    self._fail(failure)
            elif new:
                what = f"the copy is postponed until the next catalog check: {failure.thing} {failure.what}"
                self._work.say("snapshot", what, name)
        return again

    def _not_copied(self, name: TableName, failure: PgcdcError) -> None:
        """Set the table aside if the failure concerns only this table. Otherwise the failure ends the copies."""
        reason, progress = of_one_table(failure), self._work.progress
        if reason is None or name not in progress:
            self._fail(failure)
            return
        progress.put_aside(name, progress[name].replay_lsn, reason)
        self._work.say("snapshot", f"{name} is set aside: {reason}", name)

    def _fail(self, error: PgcdcError) -> None:
        self.failure = self.failure or error
        self._work.say("snapshot", f"failed: {error}")
