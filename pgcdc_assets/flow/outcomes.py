"""How the last operations on a lake ended, kept beside it, so that ``status`` knows what nobody looked at.

One small file, written whole by the holder of the lake's lock when an operation begins and when it ends. A process
that is killed leaves its begin: that without a holder of the lock is an operation that did not end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Self

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import LakeError, PgcdcError, RangeGap, UnknownTable, UsageError
from pgcdc_assets.flow import lock
from pgcdc_assets.store import storage

KILLED: Final = "did not end: its process was killed, or the machine lost its power"
GOES_ON: Final = "run it again: it goes on from what is durable"
_MISTAKES: Final = (UsageError, UnknownTable, RangeGap)
"""Errors of whoever asked, and reported to them: nothing is wrong with the lake."""


class OperationKind(StrEnum):
    """Operations of a kind stand for each other: once one succeeds, an earlier failure is history."""

    SYNC = "sync"
    """Copies too: every sync makes those that are due."""
    REPAIR = "repair"
    BACKFILL = "backfill"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True)
class UnderWay:
    """An operation that has begun. Times are UTC."""

    command: str
    pid: int
    began: datetime


@dataclass(frozen=True)
class Failure:
    """The error that ended an operation, as :class:`PgcdcError` has it; names and LSNs, never secrets."""

    command: str
    at: datetime
    what: str
    thing: str | None = None
    lsn: str | None = None
    do: str = GOES_ON


@dataclass(frozen=True)
class Outcome:
    """The end of the operations of one kind."""

    succeeded: datetime | None = None
    """When one was last seen to do its work; a sync that follows is, whenever it is level."""
    failed: Failure | None = None
    """Since then."""
    under_way: UnderWay | None = None

    def to_json(self) -> dict[str, Any]:
        failed, under_way = self.failed, self.under_way
        return {
            "succeeded_at": None if self.succeeded is None else self.succeeded.isoformat(),
            "failed": None if failed is None else vars(failed) | {"at": failed.at.isoformat()},
            "under_way": None if under_way is None else vars(under_way) | {"began": under_way.began.isoformat()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        at, failed, under_way = data["succeeded_at"], data["failed"], data["under_way"]
        return cls(
            None if at is None else datetime.fromisoformat(at),
            None if failed is None else Failure(**{**failed, "at": datetime.fromisoformat(failed["at"])}),
            None if under_way is None
            else UnderWay(**{**under_way, "began": datetime.fromisoformat(under_way["began"])}),
        )  # fmt: skip

    def ended(self) -> Outcome:
        """The outcome when nobody is working: an operation under way was killed."""
        if self.under_way is None:
            return self
        killed = Failure(self.under_way.command, self.under_way.began, KILLED)
        return replace(self, failed=killed, under_way=None)


def read(layout: Layout) -> dict[str, Outcome]:
    """By kind, in words that :class:`OperationKind` has; empty for a lake without the file.

    LakeError where it is unreadable.
    """
    outcomes = _load(layout)
    if any(outcome.under_way for outcome in outcomes.values()) and lock.holder(layout) is None:
        # Read again: an operation may have ended between the two looks, or another have begun.
        again = _load(layout)
        return {
            kind: outcome.ended() if outcome.under_way == outcomes.get(kind, Outcome()).under_way else outcome
            for kind, outcome in again.items()
        }
    return outcomes


@dataclass
class Operation:
    """One that is under way, for whoever does it."""

    succeed: Callable[[], None] = lambda: None
    """It does its work: earlier failures are history, though it may go on for days."""
    renew: Callable[[Sequence[str]], None] = lambda tables: None
    """It has copied these tables anew: the same, before its end."""
    within: Callable[[OperationKind, str], AbstractContextManager[Operation]] = lambda kind, command: nullcontext(
        Operation()
    )
    """Another operation, done meanwhile by the same process, for the command that asked for it."""
    failures: list[PgcdcError] = field(default_factory=list)
    """What it could not do while it did the rest."""
    renewed: list[str] = field(default_factory=list)
    """Tables that it copied anew: what could not be repaired of them is history."""
    given_up: Callable[[], bool] = lambda: False
    """Whether somebody stopped it, so that its end proves nothing."""


@contextmanager
def recorded(layout: Layout, kind: OperationKind, command: str, say: Callable[[str], None]) -> Iterator[Operation]:
    """Keep how the block ends. The lake's lock is held.

    A mistake of whoever asked is no failure, and one who interrupts it knows: what was known before stands.
    A disk that does not take the note is told by ``say``, and stops nothing: maintenance may be what frees it.
    """
    with _kept(_Book(layout, kind, command, say)) as operation:
        yield operation


@contextmanager
def _kept(book: _Book) -> Iterator[Operation]:
    operation = Operation(book.succeeded, book.renew, lambda kind, command: _kept(book.beside(kind, command)))
    book.begun()
    try:
        yield operation
    except _MISTAKES:
        raise
    except PgcdcError as error:
        book.failed(error)
        raise
    except Exception as error:
        # Its text may hold values; the traceback is told where the operation was asked for.
        book.failed(LakeError(f"unexpected {type(error).__name__}", do="the traceback is with the run, or in "
                              ".pgcdc/failure.txt"))  # fmt: skip
        raise
    else:
        if operation.failures:
            book.failed(operation.failures[0], more=len(operation.failures) - 1)
        elif not operation.given_up():
            book.succeeded()
        book.renewed(operation.renewed)
    finally:
        book.closed()


class _Book:
    """The file, as one operation writes to it."""

    def __init__(self, layout: Layout, kind: OperationKind, command: str, say: Callable[[str], None]) -> None:
        self._layout, self._kind, self._command, self._say = layout, kind, command, say
        try:
            # The lock is ours: whatever is under way there was killed.
            self._all = {name: outcome.ended() for name, outcome in _load(layout).items()}
        except LakeError as error:
            say(str(error))
            self._all = {}
        self._fresh = True

    def beside(self, kind: OperationKind, command: str) -> _Book:
        """Of an operation of another kind within this one: both write what both know."""
        book = copy(self)
        book._kind, book._command, book._fresh = kind, command, True
        return book

    def begun(self) -> None:
        self._write(under_way=UnderWay(self._command, os.getpid(), _now()))

    def succeeded(self) -> None:
        if self._fresh or self._outcome.failed is not None:
            self._fresh = False
            self._write(succeeded=_now(), failed=None)

    def failed(self, error: PgcdcError, more: int = 0) -> None:
        what = f"{error.what} (and {more} more)" if more else error.what
        lsn = None if error.lsn is None else str(error.lsn)
        self._write(failed=Failure(self._command, _now(), what, error.thing, lsn, error.do or GOES_ON))

    def renewed(self, tables: Sequence[str]) -> None:
        for kind in (OperationKind.REPAIR, OperationKind.BACKFILL):
            failed = self._all.get(kind, Outcome()).failed
            if failed is not None and failed.thing in tables:
                self._all[kind] = replace(self._all[kind], failed=None)

    def renew(self, tables: Sequence[str]) -> None:
        self.renewed(tables)
        self._write()

    def closed(self) -> None:
        self._write(under_way=None)

    @property
    def _outcome(self) -> Outcome:
        return self._all.get(self._kind, Outcome())

    def _write(self, **changed: Any) -> None:
        self._all[self._kind] = replace(self._outcome, **changed)
        try:
            _save(self._layout, self._all)
        except OSError as error:
            self._say(f"{self._layout.outcomes}: cannot be written: {error.strerror}")


def _save(layout: Layout, outcomes: Mapping[str, Outcome]) -> None:
    """Whole or not at all, whenever the power goes."""
    told = {kind: one.to_json() for kind, one in outcomes.items()}
    storage.replace(layout.outcomes, json.dumps(told, indent=1).encode())


def _load(layout: Layout) -> dict[str, Outcome]:
    path = layout.outcomes
    try:
        return {str(kind): Outcome.from_json(data) for kind, data in json.loads(storage.read(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LakeError(f"cannot be read: {type(error).__name__}", thing=str(path), do="the next sync writes it anew") \
            from None  # fmt: skip


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
