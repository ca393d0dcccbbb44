"""One writer per lake.

A file lock beside the lake is the truth about who writes, not Dagster's run status: the kernel frees
it with the process, however that ends. Every command, run, backfill and maintenance that writes takes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.errors import LockHeld, MachineError
from pgcdc_assets.store import lease, storage
from pgcdc_assets.store.lease import Lease


@dataclass(frozen=True)
class LockHolder:
    """The process that holds the lock."""

    pid: int
    command: str
    serves: bool = False
    """It does what other commands ask for (:mod:`pgcdc_assets.flow.requests`)."""


@contextmanager
def lake_lock(layout: Layout, command: str, *, serves: bool = False) -> Iterator[None]:
    """Be the one writer for the time of the block; LockHeld names pid and command of another.

    One that ``serves`` does what others ask of it meanwhile.
    """
    with sole(layout, layout.lock, lambda: f"{_named(holder(layout))} is writing to this lake") as held:
        held.say(json.dumps({"pid": os.getpid(), "command": command, "serves": serves}))
        yield


@contextmanager
def sole(layout: Layout, place: Location, refusal: Callable[[], str]) -> Iterator[Lease]:
    """Be the one who holds a place of the lake, for the time of the block.

    LockHeld with what ``refusal`` says where another process has it.
    """
    with ExitStack() as stack:
        try:
            storage.make_private(layout.root)
            found = stack.enter_context(lease.held(place))
        except OSError as error:
            raise unwritable(layout, error) from None
        if found is None:
            raise LockHeld(refusal(), thing=str(layout.root))
        yield found


def _named(other: LockHolder | None) -> str:
    return f"`pgcdc {other.command}` (pid {other.pid})" if other else "another process"


def unwritable(layout: Layout, error: OSError) -> MachineError:
    """The error for a lake whose folders cannot be made or written."""
    do = "name a folder of yours in the setting `lake`, or let its owner run it"
    return MachineError(f"cannot be written: {error.strerror}", thing=f"lake {layout.root}", do=do)


def holder(layout: Layout) -> LockHolder | None:
    """Who writes to the lake now, or None."""
    text = lease.text_of_holder(layout.lock)
    if text is None:
        return None
    try:
        content = json.loads(text)
        # A lock of an earlier version does not say so: its sync serves nobody.
        return LockHolder(int(content["pid"]), str(content["command"]), bool(content.get("serves", False)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return LockHolder(0, "unknown")
