"""Records how the last operations on a lake ended, so that ``status`` can report it. The holder of the lake's lock
replaces one small file when an operation begins and when it ends. If the file shows an operation in progress while no
process holds the lock, the operation was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Self

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError, PgcdcError, RangeGap, StoreFailed, UnknownTable, UsageError
from pgcdc_assets.flow import lock
from pgcdc_assets.store import storage

KILLED: Final = "its process was killed, or the machine lost power"
GOES_ON: Final = "run it again: it continues where it stopped"
_RECORD_EVERY: Final = timedelta(minutes=1)
"""The least time between two successes that a sync in follow mode records. Each record is a write to the lake."""
_MISTAKES: Final = (UsageError, UnknownTable, RangeGap)
"""Errors that only the caller's arguments cause. They are not recorded, because nothing is wrong with the lake."""


class OperationKind(StrEnum):
    """Kinds of operations. When an operation succeeds, the recorded failure of its kind is deleted."""

    SYNC = "sync"
    """The operation ``sync``, which includes copies."""
    REPAIR = "repair"
    BACKFILL = "backfill"
    MAINTENANCE = "maintenance"
    FORGETTING = "forgetting"


@dataclass(frozen=True)
class UnderWay:
    """An operation that has begun. Times are UTC."""

    command: str
    pid: int
    began: datetime


@dataclass(frozen=True)
class Failure:
    """The error that ended an operation, with the fields of :class:`PgcdcError`: names and LSNs, never secrets."""

    command: str
    at: datetime
    what: str
    thing: str | None = None
    lsn: str | None = None
    do: str = GOES_ON


@dataclass(frozen=True)
class Outcome:
    """The last outcome of one kind of operations."""

    succeeded: datetime | None = None
    """When an operation last succeeded. In follow mode, a sync also records a success, at most once a minute, when the
    mirrors have applied the whole log and a point lists them."""
    failed: Failure | None = None
    """The last failure after ``succeeded``."""
    under_way: UnderWay | None = None
    applied_to: Lsn | None = None
    """The LSN up to which the last sync has applied the change log, so that the next sync has nothing to do for the
    batches below it, although the newest point may be below them. None if the sync is in progress, or ended before it
    had applied the whole log."""

    def to_json(self) -> dict[str, Any]:
        """The outcome as ``status`` prints it."""
        failed, under_way = self.failed, self.under_way
        return {
            "succeeded_at": None if self.succeeded is None else self.succeeded.isoformat(),
            "failed": None if failed is None else vars(failed) | {"at": failed.at.isoformat()},
            "under_way": None if under_way is None else vars(under_way) | {"began": under_way.began.isoformat()},
        }

    def stored(self) -> dict[str, Any]:
        """The outcome as the file contains it."""
        return self.to_json() | {"applied_to": self.applied_to}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        at, failed, under_way = data["succeeded_at"], data["failed"], data["under_way"]
        applied_to = data.get("applied_to")
        return cls(
            None if at is None else datetime.fromisoformat(at),
            None if failed is None else Failure(**{**failed, "at": datetime.fromisoformat(failed["at"])}),
            None if under_way is None
            else UnderWay(**{**under_way, "began": datetime.fromisoformat(under_way["began"])}),
            None if applied_to is None else Lsn(applied_to),
        )  # fmt: skip

    def ended(self) -> Outcome:
        """This outcome, as it must be read when no process holds the lock: if an operation is recorded as in progress,
        it was killed, and counts as failed."""
        if self.under_way is None:
            return self
        killed = Failure(self.under_way.command, self.under_way.began, KILLED)
        return replace(self, failed=killed, under_way=None)


def read(layout: Layout) -> dict[str, Outcome]:
    """The outcomes by kind (:class:`OperationKind`); empty if there is no file. LakeError if it is unreadable."""
    outcomes = _load(layout)
    if any(outcome.under_way for outcome in outcomes.values()) and lock.holder(layout) is None:
        # Read again: since the first read, the operation may have ended, or another operation may have begun.
        again = _load(layout)
        return {
            kind: outcome.ended() if outcome.under_way == outcomes.get(kind, Outcome()).under_way else outcome
            for kind, outcome in again.items()
        }
    return outcomes


@dataclass
class Operation:
    """An operation in progress, for the code that carries it out."""

    succeed: Callable[[], None] = lambda: None
    """Records a success before the operation's end, which may be days away."""
    failures: list[PgcdcError] = field(default_factory=list)
    """Failures of parts of the operation. The other parts succeeded."""
    renewed: list[str] = field(default_factory=list)
    """Tables that were copied again. The recorded failure of a repair or backfill is deleted if it names one of
    them."""
    given_up: Callable[[], bool] = lambda: False
    """Whether the operation was stopped, so that its end is not recorded as a success."""
    applied_to: Lsn | None = None
    """See :attr:`Outcome.applied_to`. A sync sets it at its end."""


@contextmanager
def recorded(layout: Layout, kind: OperationKind, command: str, say: Callable[[str], None]) -> Iterator[Operation]:
    """Record how the block ends. The caller holds the lake's lock. Errors in the caller's arguments and interrupts are
    not recorded: the earlier outcome stays. If the record cannot be written, ``say`` reports this and the block
    continues, because the disk may be full and the block may be the maintenance that frees space."""
    book = _Book(layout, kind, command, say)
    operation = Operation(book.succeeded)
    book.begun()
    try:
        yield operation
    except _MISTAKES:
        raise
    except PgcdcError as error:
        book.failed(error)
        raise
    except Exception as error:
        # The error's text is left out, because it may contain row values. The caller gets the traceback.
        book.failed(LakeError(f"unexpected {type(error).__name__}", do="see the traceback in the log of the Dagster "
                              "run, or in .pgcdc/failure.txt"))  # fmt: skip
        raise
    else:
        if operation.failures:
            book.failed(operation.failures[0], more=len(operation.failures) - 1)
        elif not operation.given_up():
            book.succeeded()
        book.renewed(operation.renewed)
    finally:
        book.closed(operation.applied_to)


class _Book:
    def __init__(self, layout: Layout, kind: OperationKind, command: str, say: Callable[[str], None]) -> None:
        self._layout, self._kind, self._command, self._say = layout, kind, command, say
        try:
            # This process holds the lock, so an operation that the file shows as in progress was killed.
            self._all = {name: outcome.ended() for name, outcome in _load(layout).items()}
        except LakeError as error:
            say(str(error))
            self._all = {}
        self._fresh = True

    def begun(self) -> None:
        self._write(under_way=UnderWay(self._command, os.getpid(), _now()), applied_to=None)

    def succeeded(self) -> None:
        now, last = _now(), self._outcome.succeeded
        if self._fresh or last is None or now - last >= _RECORD_EVERY or self._outcome.failed is not None:
            self._fresh = False
            self._write(succeeded=now, failed=None)

    def failed(self, error: PgcdcError, more: int = 0) -> None:
        what = f"{error.what} (and {more} more)" if more else error.what
        lsn = None if error.lsn is None else str(error.lsn)
        self._write(failed=Failure(self._command, _now(), what, error.thing, lsn, error.do or GOES_ON))

    def renewed(self, tables: Sequence[str]) -> None:
        for kind in (OperationKind.REPAIR, OperationKind.BACKFILL):
            failed = self._all.get(kind, Outcome()).failed
            if failed is not None and failed.thing in tables:
                self._all[kind] = replace(self._all[kind], failed=None)

    def closed(self, applied_to: Lsn | None) -> None:
        self._write(under_way=None, applied_to=applied_to)

    @property
    def _outcome(self) -> Outcome:
        return self._all.get(self._kind, Outcome())

    def _write(self, **changed: Any) -> None:
        self._all[self._kind] = replace(self._outcome, **changed)
        try:
            told = {kind: one.stored() for kind, one in self._all.items()}
            storage.replace(self._layout.outcomes, json.dumps(told, indent=1).encode())
        except OSError as error:
            self._say(f"{self._layout.outcomes}: cannot be written: {error.strerror}")
        except StoreFailed as error:
            self._say(str(error))


def _load(layout: Layout) -> dict[str, Outcome]:
    path = layout.outcomes
    try:
        return {str(kind): Outcome.from_json(data) for kind, data in json.loads(storage.read(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, *MALFORMED) as error:
        raise LakeError(f"cannot be read: {type(error).__name__}", thing=str(path), do="the next sync replaces it") \
            from None  # fmt: skip


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
