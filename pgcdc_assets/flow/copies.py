"""The copies of one run: begun beside its turns, taken in as they land, tried again if somebody altered or locked the
table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyOutdated, PgcdcError, RightLacking
from pgcdc_assets.failures import Whose, of_one_table, whose
from pgcdc_assets.flow.copying import Copied, CopyChannel, copy
from pgcdc_assets.flow.work import Work
from pgcdc_assets.mirror.target import Failures

COPY_ROUNDS = 3
"""The most copies of a table, each under a new snapshot, if somebody alters it during each of them or right after."""


@dataclass(frozen=True)
class RoundEnd:
    """Tables of a round that were not copied because somebody altered or locked them."""

    again: set[TableName] = field(default_factory=set)
    """To be tried again at once."""


class Copies:
    """One round at a time copies the tables that wait, under one snapshot, in a thread of its own. Every method runs in
    the run's own thread. ``follow``: the run goes on, and tries tables again after a rest."""

    def __init__(self, work: Work, conninfo: str, *, follow: bool) -> None:
        self._work = work
        self._conninfo = conninfo
        self._follow = follow
        self.channel = CopyChannel()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._round: Future[Failures] | None = None
        self._asked: Sequence[TableName] = ()
        """The tables of the round that is under way, or was the last."""
        self._rounds: Counter[TableName] = Counter()
        """How often the copy of each table was begun: in this run, or, if the run follows, since a copy of it landed or
        since the last regular look with no copy under way."""
        self.failure: PgcdcError | None = None
        """The first failure that is not one table's: no further round begins, and the run raises it once the other
        tables have caught up."""
        self.made: list[Copied] = []
        self.paused = False
        """No round begins for now."""

    @property
    def under_way(self) -> bool:
        return self._round is not None

    @property
    def ended(self) -> bool:
        """Whether the round under way has ended: nothing more of it lands, and :meth:`close` says how it went."""
        return self._round is not None and self._round.done()

    @property
    def highest(self) -> Lsn:
        """The consistent point of the last copy that landed; ZERO before any did."""
        return max((copied.report.consistent_point for copied in self.made), default=ZERO)

    def begin(self, but: Collection[TableName] = ()) -> None:
        """Begin a round with the tables that wait for a copy, unless copies are under way, paused or have failed: then
        a later round or the next run copies them."""
        if self._round is not None or self.failure is not None or self.paused:
            return
        names = [table.name for table in self._work.progress.waiting() if table.name not in but]
        names = [name for name in names if self._worth_a_copy(name)]
        if names:
            self._rounds.update(names)
            self._asked = names
            self._round = self._pool.submit(copy, self._work, self._conninfo, names, self.channel)

    def rested(self) -> None:
        """Note that a regular look begins: a run that follows tries all tables anew, unless a copy is under way."""
        if self._follow and self._round is None:
            self._rounds.clear()

    def landed(self) -> Iterator[Copied]:
        """The copies that were committed since the last call. Reports the notes of the copies' thread, too."""
        while not self.channel.notes.empty():
            self._say(self.channel.notes.get())
        while not self.channel.landed.empty():
            copied = self.channel.landed.get()
            if self._follow:
                del self._rounds[copied.table.name]
            self.made.append(copied)
            yield copied

    def close(self) -> RoundEnd:
        """Close a round that has :attr:`ended`. A table that cannot be copied does not keep the others from catching
        up."""
        assert self._round is not None
        ended, self._round = self._round, None
        try:
            failures = ended.result()
        except PgcdcError as error:
            self._fail(error)
            return RoundEnd()
        return self._sorted(failures)

    def begin_next(self, end: RoundEnd) -> None:
        """Begin the round after this one: with the tables to be tried again, and those that were found meanwhile."""
        self.begin(but=set(self._asked) - end.again)

    def give_up(self) -> None:
        """End a round under way, and wait for its end: it must not commit once the lock is free."""
        self.channel.given_up.set()
        while self._round is not None and not self._round.done():
            # Repeated, because the copy may be before its first job, or between two.
            self._work.target.cancel_copies()
            wait_for([self._round], timeout=1)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _worth_a_copy(self, name: TableName) -> bool:
        """Whether the table may be copied once more: under a storm of DDL, copies without a limit would never end."""
        if self._rounds[name] < COPY_ROUNDS:
            return True
        if not self._follow:
            why = f"was altered after or during each of its {COPY_ROUNDS} copies in this run"
            self._fail(CopyOutdated(why, thing=f"table {name}", do="run `pgcdc sync` when its definition rests"))
        return False

    def _sorted(self, failures: Failures) -> RoundEnd:
        """Find the failures that another copy may help: somebody altered or locked those tables. A right that is
        lacking does not come by itself: such a table is tried again at the next regular look.

        A run that follows tries them again and again, with rests. Any other run fails in the end, as with any other
        failure.
        """
        end = RoundEnd()
        for name, failure in failures.items():
            if whose(failure) is not Whose.WAITS:
                self._not_copied(name, failure)
                continue
            new = self._work.progress.not_copied(name, failure.what)
            if self._rounds[name] < COPY_ROUNDS and not isinstance(failure, RightLacking):
                self._say(f"again, for {failure.thing} {failure.what}")
                end.again.add(name)
            elif not self._follow:
                if name in self._work.progress:
                    self._fail(failure)
            elif new:
                self._say(f"left for later: {failure.thing} {failure.what}")
        return end

    def _not_copied(self, name: TableName, failure: PgcdcError) -> None:
        """A failure of this table's copy alone sets the table aside; a run that follows goes on with the others."""
        reason, progress = of_one_table(failure), self._work.progress
        if reason is None or name not in progress:
            self._fail(failure)
            return
        progress.put_aside(name, progress[name].replay_lsn, reason)
        self._say(f"{name} is set aside: {reason}")

    def _fail(self, error: PgcdcError) -> None:
        self.failure = self.failure or error
        self._say(f"failed: {error}")

    def _say(self, message: str) -> None:
        self._work.observer.progress("snapshot", message)
