"""Lets a command have its work done by the sync that holds the lake's lock, instead of being refused.

A command that finds the lock held by a sync that follows writes what it wants into a file, the request, and keeps that
file locked while it waits. So the request of a command that died, or was interrupted, is no longer in force. The sync
looks for a request between two turns, does the work as its own, and writes the answer, with the request's number, into
another file. There is one request at a time.
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
    HEAL = "heal"
    """Follow ``tables`` again, which were set aside."""
    REPAIR = "repair"
    """Repair ``span`` of one table."""
    CHECK = "check"
    """Check that the log holds ``span``."""
    DERIVE = "derive"
    """Derive the feeds of ``tables`` for ``span``."""
    MESSAGES = "messages"
    """Derive the feed of messages for ``span``."""
    APPLY = "apply"
    """Apply ``span`` to ``tables``."""
    MAINTAIN = "maintain"
    FORGET = "forget"
    """Delete the mirrors of ``tables``, which are not followed any more."""


@dataclass(frozen=True)
class Request:
    job: Job
    command: str
    """The command that asks, as the lake's lock would name it."""
    tables: Sequence[TableName] = ()
    span: LsnRange | None = None
    max_seconds: float | None = None
    pid: int = field(default_factory=os.getpid)
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"`pgcdc {self.command}` (pid {self.pid})"

    def to_text(self) -> str:
        """One line: a text without its newline is still being written."""
        return json.dumps(to_plain(self)) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """The request; None for a text that is not whole, or that another version wrote."""
        if not text.endswith("\n"):
            return None
        try:
            request: Self = from_plain(cls, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, PgcdcError):
            return None
        return request


@dataclass(frozen=True)
class Answer:
    """A report, the error that ended the work, or, before either, why the work waits."""

    number: str
    report: Any = None
    """The report in the form of :func:`to_plain`."""
    error: dict[str, str | None] | None = None
    waits: str | None = None
    """Words for a person; another answer follows."""

    @classmethod
    def of_error(cls, number: str, error: PgcdcError) -> Self:
        return cls(number, error=error.to_plain())

    def result(self, kind: type[R]) -> R:
        """The report. An error is raised, as if the work had been done here."""
        if self.error is not None:
            raise of_plain(self.error, otherwise=LakeError)
        report: R = from_plain(kind, self.report)
        return report


@contextmanager
def placed(layout: Layout, request: Request) -> Iterator[None]:
    """Keep the request in force during the block; LockHeld if another command asks already."""
    with sole(
        layout, layout.request, lambda: f"{current(layout) or 'another command'} asks the running sync already"
    ) as held:  # fmt: skip
        storage.delete([layout.answer])
        held.say(request.to_text())
        yield


def current(layout: Layout) -> Request | None:
    """The sync's side: the request of a command that waits now, if there is one."""
    text = lease.text_of_holder(layout.request)
    return None if text is None else Request.from_text(text)


def answered(layout: Layout, answer: Answer) -> None:
    """The sync's side: write the answer for the command."""
    storage.replace(layout.answer, json.dumps(vars(answer)).encode())


def answer_to(layout: Layout, request: Request) -> Answer | None:
    """The answer to this very request; None before it is there."""
    with suppress(FileNotFoundError):
        data = json.loads(storage.read(layout.answer))
        if data["number"] == request.number:
            return Answer(**data)
    return None
