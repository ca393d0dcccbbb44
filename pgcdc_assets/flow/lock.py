"""The lake's lock: there is one writer per lake. A sync in follow mode pauses for commands that need the lock.

Every process that writes to the lake takes the lock. So the lock, not the status of a Dagster run, decides who writes.
On a file system, the kernel releases the lock when the process ends or is killed. In an object store, the lock ends
when its holder stops renewing it (:mod:`pgcdc_assets.store.lease`). A sync in follow mode would hold the lock for days.
So it "gives way":

1. A command that finds the lock held by such a sync takes a second lock of the lake, ``layout.waiting``.
2. Between two turns the sync sees that this second lock is held (:func:`waiting`). The sync finishes the copies in
   progress, and ends its run at a boundary, which releases the lake's lock.
3. The command takes the lock, releases ``layout.waiting``, and does its work.
4. The sync waits until no command waits for the lake or holds it (:func:`free_again`), and then begins its next run. A
   sync with a time limit ends instead: the sensor, or the user who set the limit, starts the next sync.

If either process dies, its locks are released, and the other process continues.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.errors import LockHeld, MachineError
from pgcdc_assets.store import lease, storage
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.lease import ProcessName


@dataclass(frozen=True)
class LockHolder:
    """The process that holds the lock."""

    pid: int
    command: str
    gives_way: bool = False
    """Whether the holder ends its run when a command waits for the lake."""
    process: ProcessName | None = field(default=None, compare=False)
    """The holder's unique name; None if the lock's text does not contain it."""

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process"
        return f"`pgcdc {self.command}` ({self.process.told if self.process else f'pid {self.pid}'})"

    @property
    def is_here(self) -> bool:
        """Whether the process runs on this host and in this container."""
        return self.process is not None and self.process.is_here


@contextmanager
def lake_lock(layout: Layout, command: str, *, gives_way: bool = False) -> Iterator[None]:
    """Hold the lake's lock during the block. If another process holds it, LockHeld names its pid and command.
    ``gives_way``: this process ends its run, and releases the lock, when a command waits for the lake."""
    refusal = lambda: f"{holder(layout) or 'another process'} is writing to this lake"  # noqa: E731
    with sole(layout, layout.lock, refusal, guarding=layout.root) as held:
        own = ProcessName.own()
        held.write(json.dumps({"pid": own.pid, "command": command, "gives_way": gives_way, "process": str(own)}))
        if held.inherited_as is not None:
            # Imported here, because `log.commit` loads deltalake, and Dagster's definitions import `flow.lock` only to
            # read the lock's holder.
            from pgcdc_assets.log.commit import shut_out

            shut_out(layout, held.inherited_as)
        yield


@contextmanager
def lake_in_turn(layout: Layout, command: str, say: Callable[[str], None], stop: threading.Event) -> Iterator[None]:
    """Hold the lake's lock during the block. If a sync in follow mode holds the lock, wait until the sync releases it.
    LockHeld if another process holds the lock, another command waits already, or ``stop`` is set during the wait."""
    with ExitStack() as lake:
        try:
            lake.enter_context(lake_lock(layout, command))
        except LockHeld:
            found = holder(layout)
            if found is not None and not found.gives_way:
                raise
            refusal = lambda: f"{waiting(layout) or 'another command'} already waits for this lake"  # noqa: E731
            with sole(layout, layout.waiting, refusal) as place:
                place.write(str(LockHolder(os.getpid(), command)))
                say(f"waits for {found or 'the sync'}, which releases the lake after its current turn and copies")
                while not stop.wait(storage.pace(layout.root)):
                    with suppress(LockHeld):
                        lake.enter_context(lake_lock(layout, command))
                        break
                else:
                    raise
        yield


def waiting(layout: Layout) -> str | None:
    """The command that waits for the lake, as text for a message; None if no command waits, or if its text is empty."""
    return lease.text_of_holder(layout.waiting) or None


def free_again(layout: Layout, stop: threading.Event) -> bool:
    """After this process has released the lock for a command, wait until no process holds the lock or waits for it.
    False if ``stop`` is set during the wait. LockHeld if another sync in follow mode has taken the lock."""
    while not stop.is_set():
        found = holder(layout)
        if found is None and waiting(layout) is None:
            return True
        if found is not None and found.gives_way:
            raise LockHeld(f"{found} is writing to this lake", thing=str(layout.root))
        stop.wait(storage.pace(layout.root))
    return False


@contextmanager
def sole(
    layout: Layout, place: Location, refusal: Callable[[], str], *, guarding: Location | None = None
) -> Iterator[Lease]:
    """Hold one of the lake's locks, at ``place``, during the block. If another process holds this lock, raise LockHeld
    with the text that ``refusal`` returns. ``guarding``: see :func:`pgcdc_assets.store.lease.held`."""
    with ExitStack() as stack:
        try:
            storage.make_private(layout.root)
            found = stack.enter_context(lease.held(place, guarding=guarding))
        except OSError as error:
            raise unwritable(layout, error) from None
        if found is None:
            raise LockHeld(refusal(), thing=str(layout.root))
        yield found


def refuse_unwritable(layout: Layout) -> None:
    """Raise MachineError or StoreFailed if nothing can be written to the lake or, before it exists, to its location."""
    try:
        storage.probe(layout.root)
    except OSError as error:
        raise unwritable(layout, error) from None


def unwritable(layout: Layout, error: OSError) -> MachineError:
    """The error for a lake whose folders cannot be created or written."""
    do = "make it writable, or run as its owner; for a new project, change the setting `lake`"
    return MachineError(f"cannot be written: {error.strerror}", thing=f"lake {layout.root}", do=do)


def holder(layout: Layout) -> LockHolder | None:
    """The process that holds the lake's lock now; None if no process holds it."""
    text = lease.text_of_holder(layout.lock)
    if text is None:
        return None
    try:
        content = json.loads(text)
        process = ProcessName.parse(content["process"])
        return LockHolder(int(content["pid"]), str(content["command"]), bool(content["gives_way"]), process)
    except MALFORMED:
        return LockHolder(0, "unknown")


def nameless(layout: Layout) -> list[Location]:
    """The locks of the lake that some other program holds. pgcdc's processes write their name as soon as they take a
    lock. But any program that may open the file of a lock can lock it, and then pgcdc cannot take this lock."""
    return [place for place in (layout.lock, layout.hold, layout.waiting) if not lease.text_of_holder(place)
            and lease.is_locked(place) and not lease.text_of_holder(place)]  # fmt: skip


def silence(layout: Layout) -> float:
    """Seconds since a process last took, renewed or released the lake's lock; infinite if no process ever took it."""
    return lease.silent_for(layout.lock)
