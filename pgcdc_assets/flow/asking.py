"""The command's side of a request: do the work, or have the sync that holds the lock do it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import LockHeld
from pgcdc_assets.flow import lock, requests
from pgcdc_assets.flow.requests import Answer, Request
from pgcdc_assets.store import storage

R = TypeVar("R")


def done(
    layout: Layout, request: Request, report: type[R], do: Callable[[], R], say: Callable[[str], None],
    stop: threading.Event | None = None,
) -> R:  # fmt: skip
    """What ``do`` returns under the lake's lock, or what the sync that holds it reports of the same work.

    If that sync ends or dies before it has answered, we do the work. LockHeld if the holder serves nobody, or serves
    another command already, or if ``stop`` is set while we wait: the request is withdrawn then.
    """
    while True:
        try:
            return do()
        except LockHeld:
            holder = lock.holder(layout)
            if holder is not None and not holder.serves:
                raise
        if holder is not None:
            say(f"asks {holder}, which writes to this lake")
            answer = _waited_for(layout, request, say, stop or threading.Event())
            if answer is not None:
                return answer.result(report)
            say("nobody answered: does it here")


def _waited_for(layout: Layout, request: Request, say: Callable[[str], None], stop: threading.Event) -> Answer | None:
    """The answer; None if the lock is no longer held by a process that serves. Says why the work waits, as it
    changes."""
    waits: str | None = None
    with requests.placed(layout, request):
        while True:
            # Read the holder before the answer: a holder that has ended has written all that it will.
            holder = lock.holder(layout)
            answer = requests.answer_to(layout, request)
            if answer is not None and answer.waits is not None:
                if answer.waits != waits:
                    say(waits := answer.waits)
                answer = None
            if answer is not None or holder is None or not holder.serves:
                return answer
            if stop.wait(storage.pace(layout.root)):
                what = f"{holder} was not waited for"
                do = "what it has begun it ends; run it again for the result"
                raise LockHeld(what, thing=str(layout.root), do=do)
