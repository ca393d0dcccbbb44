"""One writer per lake.

A file lock beside the lake is the truth about who writes, not Dagster's run status: the kernel frees
it with the process, however that ends. Every command, run, backfill and maintenance that writes takes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import LockHeld, MachineError
from pgcdc_assets.flow import filelock


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock."""

    pid: int
    command: str


@contextmanager
def lake_lock(layout: Layout, command: str) -> Iterator[None]:
    """Be the one writer for the time of the block; LockHeld names pid and command of another."""
    try:
        file = filelock.opened(layout.lock)
    except OSError as error:
        raise MachineError(f"cannot be written: {error.strerror}", thing=str(layout.root)) from None
    with file:
        if not filelock.taken(file):
            other = holder(layout)
            who = f"`pgcdc {other.command}` (pid {other.pid})" if other else "another process"
            raise LockHeld(f"{who} is writing to this lake", thing=str(layout.root))
        file.truncate(0)
        json.dump({"pid": os.getpid(), "command": command}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def holder(layout: Layout) -> Holder | None:
    """Who writes to the lake now, or None."""
    text = filelock.text_of_holder(layout.lock)
    if text is None:
        return None
    try:
        content = json.loads(text)
        return Holder(int(content["pid"]), str(content["command"]))
    except (ValueError, KeyError, TypeError):
        return Holder(0, "unknown")
