"""Changes structures and names of mirrors in a separate thread, while the turns of other tables go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.failures import contained
from pgcdc_assets.mirror.target import Target
from pgcdc_assets.structure.record import TableRecord


@dataclass(frozen=True)
class Reshaped:
    """A change of a mirror that has ended, with the mirror's version, or the reason why it failed."""

    after: Table
    what: str
    """The change on the source, in words."""
    version: int
    former: TableName | None = None
    """The mirror's former name, if its name was changed."""
    failure: str | None = None


@dataclass(frozen=True)
class _UnderWay:
    after: Table
    what: str
    former: TableName | None
    done: Future[int]

    def ended(self, version: int = -1, failure: str | None = None) -> Reshaped:
        return Reshaped(self.after, self.what, version, self.former, failure)


class Reshapes:
    """The changes of mirrors in one run. They are made one after the other, in a separate thread. Every method runs in
    the run's own thread."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reshape")
        self._under_way: list[_UnderWay] = []

    @property
    def any(self) -> bool:
        """Whether any change is in progress."""
        return bool(self._under_way)

    def begin(self, before: Table, after: Table, what: str, *, by_metadata: bool = False) -> None:
        done = self._pool.submit(self._target.reshape, before, after, by_metadata=by_metadata)
        self._under_way.append(_UnderWay(after, what, None, done))

    def begin_rename(self, entry: TableRecord, former: TableName, what: str) -> None:
        rename = partial(self._target.rename, former, entry.table, entry.version, entry.replay_lsn)
        self._under_way.append(_UnderWay(entry.table, what, former, self._pool.submit(rename)))

    def landed(self) -> Iterator[Reshaped]:
        """The changes that have ended since the last call. Raises a failure that concerns more than one table."""
        for one in [one for one in self._under_way if one.done.done()]:
            self._under_way.remove(one)
            with contained() as failed:
                version = one.done.result()
            yield one.ended(version) if failed.reason is None else one.ended(failure=failed.reason)

    def give_up(self) -> None:
        """Cancel the changes in progress, and wait until they have ended, because nothing may be committed after the
        lock is released. If a change was committed just before, the mirror itself records it."""
        for one in self._under_way:
            one.done.cancel()
        while left := [one.done for one in self._under_way if not one.done.done()]:
            # Repeated, because a change that has no Spark job at this moment cannot be cancelled.
            self._target.cancel_copies()
            wait_for(left, timeout=1)
        self._under_way.clear()
        self._pool.shutdown(wait=True)
