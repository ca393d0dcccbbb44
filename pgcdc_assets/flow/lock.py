"""One writer per lake.

A lock in the lake is the truth about who writes, not Dagster's run status. On a file system the kernel frees it when
the process ends, in whatever way; in an object store it ends with the signs of life (:mod:`pgcdc_assets.store.lease`).
Every command, run, backfill and maintenance that writes takes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.errors import LockHeld, MachineError
from pgcdc_assets.store import lease, storage
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.processname import ProcessName


@dataclass(frozen=True)
class LockHolder:
    """The process that holds the lock."""

    pid: int
    command: str
    serves: bool = False
    """Whether it does what other commands ask for (:mod:`pgcdc_assets.flow.requests`)."""
    process: ProcessName | None = field(default=None, compare=False)
    """None where an earlier version holds it."""

    def __str__(self) -> str:
        return f"`pgcdc {self.command}` ({self.process.told if self.process else f'pid {self.pid}'})"

    @property
    def is_here(self) -> bool:
        """Whether ``pid`` is a number of this host, and of this container."""
        return self.process is not None and self.process.is_here


@contextmanager
def lake_lock(layout: Layout, command: str, *, serves: bool = False) -> Iterator[None]:
    """Hold the lake's lock during the block. If another process holds it, LockHeld names its pid and command.

    ``serves``: the holder does what other commands ask of it meanwhile.
    """
    refusal = lambda: f"{holder(layout) or 'another process'} is writing to this lake"  # noqa: E731
    with sole(layout, layout.lock, refusal, guarding=layout.root) as held:
        own = ProcessName.own()
        held.say(json.dumps({"pid": own.pid, "command": command, "serves": serves, "process": str(own)}))
        if held.inherited_as is not None:
            # Here, for Dagster's definitions ask only who holds the lake, and load nothing that writes tables.
            from pgcdc_assets.log.fencing import shut_out

            shut_out(layout, held.inherited_as)
        yield


@contextmanager
def sole(
    layout: Layout, place: Location, refusal: Callable[[], str], *, guarding: Location | None = None
) -> Iterator[Lease]:
    """Hold a place of the lake during the block. If another process holds it, LockHeld has the text of ``refusal``.

    ``guarding``: see :func:`pgcdc_assets.store.lease.held`.
    """
    with ExitStack() as stack:
        try:
            storage.make_private(layout.root)
            found = stack.enter_context(lease.held(place, guarding=guarding))
        except OSError as error:
            raise unwritable(layout, error) from None
        if found is None:
            raise LockHeld(refusal(), thing=str(layout.root))
        yield found


def unwritable(layout: Layout, error: OSError) -> MachineError:
    """The error for a lake whose folders cannot be made or written."""
    do = "name a folder of yours in the setting `lake`, or let its owner run it"
    return MachineError(f"cannot be written: {error.strerror}", thing=f"lake {layout.root}", do=do)


def holder(layout: Layout) -> LockHolder | None:
    """The process that writes to the lake now; None if there is none."""
    text = lease.text_of_holder(layout.lock)
    if text is None:
        return None
    try:
        content = json.loads(text)
        # A lock of an earlier version lacks these fields: its sync serves nobody.
        process = ProcessName.parse(content["process"]) if "process" in content else None
        return LockHolder(int(content["pid"]), str(content["command"]), bool(content.get("serves", False)), process)
    except (ValueError, KeyError, TypeError, AttributeError):
        return LockHolder(0, "unknown")


def silence(layout: Layout) -> float:
    """Seconds since anybody took the lake, said that it lives, or gave the lake back; infinite if nobody ever has."""
    return lease.silent_for(layout.lock)
