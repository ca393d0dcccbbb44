"""How a command gets work out of the sync that holds the lake's lock, instead of being refused.

Who finds the lock held by a sync that follows writes what it wants into the request, a file that it keeps locked for
as long as it waits: so the request of a command that died, or was interrupted, is none. The sync looks for it between
two turns, does the work as its own, and writes the answer into another file, by the request's number. There is one
request at a time.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, TypeVar

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LakeError, PgcdcError, of_plain
from pgcdc_assets.flow.lock import sole
from pgcdc_assets.flow.plain import from_plain, to_plain
from pgcdc_assets.store import lease, storage

R = TypeVar("R")


class Job(StrEnum):
    """The jobs that can be asked for."""

    SNAPSHOT = "snapshot"
    """Copy ``tables`` anew."""
    REPAIR = "repair"
    """``span`` of one table."""
    CHECK = "check"
    """Check that the log holds ``span``."""
    DERIVE = "derive"
    """The feeds of ``tables`` for ``span``."""
    MESSAGES = "messages"
    """The feed of messages for ``span``."""
    APPLY = "apply"
    """``span`` to ``tables``."""
    MAINTAIN = "maintain"


@dataclass(frozen=True)
class Request:
    job: Job
    command: str
    """Who asks, as the lake's lock would name it."""
    tables: Sequence[TableName] = ()
    span: LsnRange | None = None
    max_seconds: float | None = None
    pid: int = field(default_factory=os.getpid)
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"`pgcdc {self.command}` (pid {self.pid})"

    def to_text(self) -> str:
        """One line: a text without its end is still being written."""
        return json.dumps(to_plain(self)) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """None for one that is not whole, or that another version wrote."""
        if not text.endswith("\n"):
            return None
        try:
            request: Self = from_plain(cls, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, PgcdcError):
            return None
        return request


@dataclass(frozen=True)
class Answer:
    """A report, or the error that ended the work."""

    number: str
    report: Any = None
    """The report in the form of :func:`to_plain`."""
    error: dict[str, str | None] | None = None

    @classmethod
    def of_error(cls, number: str, error: PgcdcError) -> Self:
        return cls(number, error=error.to_plain())

    def result(self, kind: type[R]) -> R:
        """The report; or raises the error, as if the work had been done here."""
        if self.error is not None:
            raise of_plain(self.error, otherwise=LakeError)
        report: R = from_plain(kind, self.report)
        return report


@contextmanager
def placed(layout: Layout, request: Request) -> Iterator[None]:
    """Ask for the time of the block; LockHeld where another command asks already."""
    with sole(
        layout, layout.request, lambda: f"{current(layout) or 'another command'} asks the running sync already"
    ) as held:  # fmt: skip
        storage.delete([layout.answer])
        held.say(request.to_text())
        yield


def current(layout: Layout) -> Request | None:
    """The request of a command that waits now, if there is one: the sync's side."""
    text = lease.text_of_holder(layout.request)
    return None if text is None else Request.from_text(text)


def answered(layout: Layout, answer: Answer) -> None:
    """The sync's side: let the command have it."""
    storage.replace(layout.answer, json.dumps(vars(answer)).encode())


def answer_to(layout: Layout, request: Request) -> Answer | None:
    """The answer to this very request, once it is there."""
    with suppress(FileNotFoundError):
        data = json.loads(storage.read(layout.answer))
        if data["number"] == request.number:
            return Answer(**data)
    return None
