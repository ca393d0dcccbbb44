"""A lease in an object store, as a chain of numbered files. Each file is called a link.

A process takes the lease by creating the file with the next number. If several processes create the same file, the
store lets only one succeed. Nothing more is required of the store. The holder adds a link from time to time to show
that it is alive. A process may take the lease if the last link says that the lease was given back, or if no new link
has appeared for ``TTL`` seconds by the process's own clock.

Clocks of different machines are never compared. The holder counts ``TTL`` from a time before it sent its last link. Any
other process counts from a time after it saw that link. So the holder stops before another process starts. Old links
are deleted in ascending order. So a process that has created a link checks that the previous link still exists. If it
does, no earlier link with the new number can have been deleted, and the process has the lease.

A machine can be suspended after it has checked its clock, and before it sends a write. So the lease alone does not
prevent a late write of an earlier holder. A process that takes a lease that was not given back also creates the commit
files that the earlier holder would create next (:func:`pgcdc_assets.log.commit.shut_out`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import psutil

from pgcdc_assets.core.formats import reading
from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import LeaseLost, MachineError, StoreFailed
from pgcdc_assets.store import storage
from pgcdc_assets.store.base import Guard, Lease

TTL: Final = 75.0
"""Seconds without a new link after which the lease is free."""
RENEWED: Final = 30.0
"""Seconds between two links of a living holder. An idle lake therefore sends two requests per minute."""
_MARGIN: Final = 5.0
"""A holder stops this many seconds before ``TTL`` is over, because clocks do not run equally fast."""
_SKEW: Final = 60.0
"""Seconds by which the store's clock may differ from this machine's clock. It affects only what other processes read
about the holder, and never who may take the lease."""
_KEPT: Final = 10
"""How many of the newest links are kept, so that a process that has read the chain a short time ago finds the next
link."""
_FRESH_SECONDS: Final = 20.0
"""For this many seconds after a process has read the chain, the link that follows the last link that it read is
certainly not deleted. So the process can continue with that link, and need not list the folder."""
_WATCH_SECONDS: Final = 1.0
_DELETE: Final = "if no process of pgcdc works on this lake, delete this file"
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that continues while the machine sleeps, if the system has such a clock."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """The content of one file of a chain."""

    number: int
    given_back: bool = False
    text: str = ""
    host: str = field(default_factory=socket.gethostname)
    process: str = field(default_factory=lambda: _process(os.getpid()))
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A random value, so that no two links have the same content."""

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @property
    def of_ended_process(self) -> bool:
        """Whether a process of this host wrote the link, and has ended. May be wrong, because two hosts may have the
        same name."""
        return self.host == socket.gethostname() and self.process != _process(int(self.process.partition(".")[0]))


class Chain:
    """The links of one lease, as far as this process has read them. Threads may share the object."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._last: Link | None = None
        self._looked = self._since = float("-inf")
        self._forgotten = 0
        self._lock = threading.Lock()

    def look(self) -> tuple[Link | None, float]:
        """Reads the chain. Returns the last link (None if there is no link), and how many seconds ago this process
        first saw that it is the last link."""
        with self._lock:
            began = _now()
            found = self._newest() if began - self._looked > _FRESH_SECONDS else self._following(self._last)
            if found != self._last or self._since == float("-inf"):
                self._last, self._since = found, _now()
            self._looked = began
            return found, began - self._since

    def age(self, link: Link) -> float:
        """Seconds since the link was created, by the store's clock, which may differ from this machine's clock."""
        entry = storage.head(self._named(link.number))
        return 0.0 if entry is None else time.time() - entry.placed

    def append(self, link: Link) -> None:
        """Add a link. Raises FileExistsError if its number exists or has ever existed."""
        storage.store_of(self.place).create(self._named(link.number), link.to_bytes())
        if not self._follows(link.number):
            storage.store_of(self.place).delete([self._named(link.number)])
            self._looked = float("-inf")
            raise FileExistsError(f"{self.place} already has a link above number {link.number}")
        with self._lock:
            self._last, self._since, self._looked = link, _now(), _now()
        self._forget(link.number - _KEPT)

    def _follows(self, number: int) -> bool:
        """Whether the link that was just created is new, and not the second link with this number. It is new if the
        link with the previous number still exists, because links are deleted in ascending order."""
        if number == 1:
            return self._numbers() == [1]
        return storage.exists(self._named(number - 1))

    def _numbers(self) -> list[int]:
        # Ignore files whose names are not numbers.
        return [int(entry.name) for entry in storage.list_after(self.place) if entry.name.isdecimal()]

    def _forget(self, newest: int) -> None:
        """Delete the links up to number ``newest``. An error is only logged, because a later call deletes these links
        too."""
        try:
            storage.store_of(self.place).delete(map(self._named, range(self._forgotten + 1, newest + 1)))
        except (OSError, StoreFailed) as error:
            _log.warning("old files of the lease %s could not be deleted, pgcdc tries again: %s", self.place, error)
        else:
            self._forgotten = max(newest, self._forgotten)

    def _newest(self) -> Link | None:
        numbers = self._numbers()
        self._forgotten = numbers[0] - 1 if numbers else 0
        for number in reversed(numbers):
            # The link may have been deleted after the listing, because there are newer links.
            if (found := self._read(number)) is not None:
                return self._following(found)
        return None

    def _following(self, last: Link | None) -> Link | None:
        while (found := self._read(1 + (0 if last is None else last.number))) is not None:
            last = found
        return last

    def _read(self, number: int) -> Link | None:
        try:
            content = storage.read(self._named(number))
        except FileNotFoundError:
            return None
        with reading(self._named(number), MachineError, _DELETE):
            link = Link(**json.loads(content))
            if link.number != number or not isinstance(link.text, str):
                raise ValueError("its number is not the number in the file's name")
            # This property uses the other fields. So a malformed field raises an error here, which ``reading`` handles.
            _ = link.of_ended_process
            return link

    def _named(self, number: int) -> Location:
        return self.place / f"{number:020}"


class ChainLease(Lease, Guard):
    """A lease that this process has taken. It is held until :meth:`give_back`, or until it is lost."""

    pause = 15.0

    def __init__(self, chain: Chain, before: Link | None) -> None:
        """Takes the lease. ``before``: the chain's last link. Raises FileExistsError if another process was first."""
        self._chain = chain
        self._lock = threading.Lock()
        self._link = Link(0 if before is None else before.number)
        self._until = float("-inf")
        self._lost = False
        self._add("")
        self.inherited_as = None if before is None or before.given_back else self._link.number

    def check(self) -> None:
        """Raises LeaseLost if another process may have taken the lease."""
        if self._lost or _now() > self._until:
            raise self._loss()

    def confirm(self) -> None:
        """Reads the chain, and raises LeaseLost if another process has taken the lease."""
        link, _ = self._chain.look()
        if link is None or link.number > self._link.number:
            raise self._loss()

    def write(self, text: str) -> None:
        """Replace the text. Raises LeaseLost if another process has taken the lease."""
        try:
            self._add(text)
        except FileExistsError:
            raise self._loss() from None

    def _loss(self) -> LeaseLost:
        holder, _ = self._chain.look()
        self._lost = holder is None or holder.number > self._link.number
        to = f" to {holder.text or 'another process'} on {holder.host}" if holder is not None and self._lost else ""
        return LeaseLost(f"was not renewed in time, and is lost{to}", thing=f"lease {self._chain.place}")

    def renew(self, ended: threading.Event) -> None:
        """Add a link every ``RENEWED`` seconds, until ``ended`` is set or the lease is lost."""
        while not ended.wait(RENEWED):
            try:
                self._add()
            except FileExistsError:
                self._lost = True
                return
            except (OSError, StoreFailed) as error:
                # Try again after RENEWED seconds. If this fails until the lease expires, check() raises LeaseLost.
                _log.warning("the lease %s could not be renewed, pgcdc tries again: %s", self._chain.place, error)

    def give_back(self) -> None:
        """Give the lease back. If this fails, other processes can take the lease after ``TTL`` seconds."""
        try:
            with suppress(FileExistsError), self._lock:
                self._chain.append(Link(self._link.number + 1, given_back=True))
        except (OSError, StoreFailed) as error:
            _log.warning(
                "the lease %s could not be released, so it expires in about a minute: %s", self._chain.place, error
            )

    def _add(self, text: str | None = None) -> None:
        """Add a link with ``text`` or, without it, with the text of the last link."""
        with self._lock:
            began = _now()
            link = Link(self._link.number + 1, text=self._link.text if text is None else text)
            self._chain.append(link)
            self._link, self._until = link, began + TTL - _MARGIN


@contextmanager
def held(
    place: Location, *, guarding: Location | None = None, at_once: bool = False
) -> Iterator[ChainLease | None]:  # fmt: skip
    """See :func:`pgcdc_assets.store.lease.held`. If the holder seems to be dead, waits until its lease has certainly
    ended."""
    lease = _taken(_chain(place), at_once=at_once)
    if lease is None:
        yield None
        return
    ended = threading.Event()
    thread = threading.Thread(target=lease.renew, args=[ended], name="lease", daemon=True)
    with ExitStack() as stack:
        stack.callback(lease.give_back)
        stack.callback(thread.join)
        stack.callback(ended.set)
        if guarding is not None:
            stack.enter_context(storage.guarded(guarding, lease))
        thread.start()
        yield lease


def text_of_holder(place: Location) -> str | None:
    """See :func:`pgcdc_assets.store.lease.text_of_holder`."""
    chain = _chain(place)
    link, known = chain.look()
    if link is None or link.given_back or known > TTL or chain.age(link) > TTL + _SKEW:
        return None
    return link.text


def silent_for(place: Location) -> float:
    """See :func:`pgcdc_assets.store.lease.silent_for`."""
    chain = _chain(place)
    link, _ = chain.look()
    return float("inf") if link is None else chain.age(link)


def _taken(chain: Chain, *, at_once: bool) -> ChainLease | None:
    """Takes the lease. None if another process holds it. If the holder seems to be dead, waits until the lease is free;
    with ``at_once``, returns None instead."""
    link, known = chain.look()
    if not (link is None or link.given_back):
        if chain.age(link) < 2 * RENEWED and not link.of_ended_process:
            return None
        number = link.number
        if at_once and known < TTL:
            return None
        while known < TTL:
            time.sleep(_WATCH_SECONDS)
            link, known = chain.look()
            if link is not None and not link.given_back and link.number != number:
                return None
            if link is None or link.given_back:
                break
    try:
        return ChainLease(chain, link)
    except FileExistsError:
        return None


@cache
def _chain(place: Location) -> Chain:
    return Chain(place)


def _now() -> float:
    """Seconds by this machine's own clock. They cannot be compared with the clock of a different machine."""
    return time.clock_gettime(_CLOCK)


def _process(pid: int) -> str:
    """A name for a process of this host. A later process with the same pid has a different name."""
    try:
        return f"{pid}.{psutil.Process(pid).create_time()}"
    except psutil.Error:
        return ""
