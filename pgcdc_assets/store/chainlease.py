"""A lease in an object store: a place that one process holds, by a chain of numbered files.

The process that creates the next number holds the place. Of several processes that create the same number only one
succeeds; the store must ensure no more than this. The holder adds numbers to show that it lives. Another process takes
the place by creating the next number, if the last number says that the place was given back, or if no new number came
for ``TTL`` seconds by its own clock.

Clocks of different machines are never compared. The holder counts from before it sent its last number, and the other
process from after it saw that number, so the holder's time ends first. Old numbers are deleted in ascending order. So
if the number below still exists, a process that creates a number is the first to create it.

A machine can be suspended after it has read the clock and before it sends a request. So a process that inherits a place
that was not given back also creates the files that the earlier holder would have to create next
(:func:`pgcdc_assets.log.commit.shut_out`).
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
"""Seconds without a new link after which a place is free."""
RENEWED: Final = 30.0
"""Seconds between two links that show that the holder lives: two requests per minute on an idle lake."""
_MARGIN: Final = 5.0
"""Seconds by which a holder ends its time early, because clocks do not run equally fast."""
_SKEW: Final = 60.0
"""Seconds by which the store's clock may differ from ours. Only messages depend on it."""
_KEPT: Final = 10
"""How many of the newest numbers stay, so that a process that has just read the chain finds the next number."""
_FRESH_SECONDS: Final = 20.0
"""Seconds after a read of the chain in which the next number is certainly not deleted."""
_WATCH_SECONDS: Final = 1.0
_DELETE: Final = "if no process of pgcdc works on this lake, delete this file"
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that also counts while the machine sleeps, if the system has such a clock."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """The content of one number of a chain."""

    number: int
    given_back: bool = False
    text: str = ""
    host: str = field(default_factory=socket.gethostname)
    process: str = field(default_factory=lambda: _process(os.getpid()))
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Makes the content unique."""

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @property
    def of_ended_process(self) -> bool:
        """Whether a process of this host wrote the link and has ended. Not a proof: two hosts may have one name."""
        return self.host == socket.gethostname() and self.process != _process(int(self.process.partition(".")[0]))


class Chain:
    """The numbers of one place, as this process has seen them. Safe for several threads."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._last: Link | None = None
        self._looked = self._since = float("-inf")
        self._forgotten = 0
        self._lock = threading.Lock()

    def look(self) -> tuple[Link | None, float]:
        """The last link or None, and for how many seconds this process has known that it is the last link."""
        with self._lock:
            began = _now()
            found = self._newest() if began - self._looked > _FRESH_SECONDS else self._following(self._last)
            if found != self._last or self._since == float("-inf"):
                self._last, self._since = found, _now()
            self._looked = began
            return found, began - self._since

    def age(self, link: Link) -> float:
        """Seconds since the link was created, by the store's clock, which may differ from ours."""
        entry = storage.head(self._named(link.number))
        return 0.0 if entry is None else time.time() - entry.placed

    def append(self, link: Link) -> None:
        """Add the link. FileExistsError if its number exists, or has existed."""
        storage.store_of(self.place).create(self._named(link.number), link.to_bytes())
        if not self._follows(link.number):
            storage.store_of(self.place).delete([self._named(link.number)])
            self._looked = float("-inf")
            raise FileExistsError(f"{self.place} has passed {link.number}")
        with self._lock:
            self._last, self._since, self._looked = link, _now(), _now()
        self._forget(link.number - _KEPT)

    def _follows(self, number: int) -> bool:
        """Whether a number that was just created is the newest, and was not created and deleted before."""
        if number == 1:
            return self._numbers() == [1]
        return storage.exists(self._named(number - 1))

    def _numbers(self) -> list[int]:
        # Other files in this place are not ours.
        return [int(entry.name) for entry in storage.list_after(self.place) if entry.name.isdecimal()]

    def _forget(self, newest: int) -> None:
        """Delete the numbers up to ``newest``. Numbers that cannot be deleted now are deleted by a later call."""
        try:
            storage.store_of(self.place).delete(map(self._named, range(self._forgotten + 1, newest + 1)))
        except (OSError, StoreFailed) as error:
            _log.warning("old numbers of %s stay: %s", self.place, error)
        else:
            self._forgotten = max(newest, self._forgotten)

    def _newest(self) -> Link | None:
        numbers = self._numbers()
        self._forgotten = numbers[0] - 1 if numbers else 0
        for number in reversed(numbers):
            # If the number has been deleted since the listing, there are newer numbers.
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
                raise ValueError("not of this number")
            # This reads the other fields, so a malformed field raises here.
            _ = link.of_ended_process
            return link

    def _named(self, number: int) -> Location:
        return self.place / f"{number:020}"


class ChainLease(Lease, Guard):
    """A lease, held from its first link to the link that gives the place back."""

    pause = 15.0

    def __init__(self, chain: Chain, before: Link | None) -> None:
        """FileExistsError if another process took the place. ``before`` is the chain's last link."""
        self._chain = chain
        self._lock = threading.Lock()
        self._link = Link(0 if before is None else before.number)
        self._until = float("-inf")
        self._lost = False
        self._add("")
        self.inherited_as = None if before is None or before.given_back else self._link.number

    def check(self) -> None:
        """LeaseLost unless it is certain that no other process can have taken the place yet."""
        if self._lost or _now() > self._until:
            raise self._loss()

    def confirm(self) -> None:
        """LeaseLost if another process has taken the place."""
        link, _ = self._chain.look()
        if link is None or link.number > self._link.number:
            raise self._loss()

    def write(self, text: str) -> None:
        """Replace the text. LeaseLost if another process has taken the place."""
        try:
            self._add(text)
        except FileExistsError:
            raise self._loss() from None

    def _loss(self) -> LeaseLost:
        holder, _ = self._chain.look()
        self._lost = holder is None or holder.number > self._link.number
        to = f", to {holder.text or 'another process'} on {holder.host}" if holder is not None and self._lost else ""
        return LeaseLost(f"was not renewed in time, and is lost{to}", thing=f"lease {self._chain.place}")

    def renew(self, ended: threading.Event) -> None:
        """Add a link every ``RENEWED`` seconds, until ``ended`` is set or the lease is lost."""
        while not ended.wait(RENEWED):
            try:
                self._add(self._link.text)
            except FileExistsError:
                self._lost = True
                return
            except (OSError, StoreFailed) as error:
                # The next attempt is after RENEWED seconds. If all attempts fail, the lease ends by itself.
                _log.warning("%s was not renewed: %s", self._chain.place, error)

    def give_back(self) -> None:
        """Give the place back. If that fails, the place is free once the lease's time is over."""
        try:
            with suppress(FileExistsError), self._lock:
                self._chain.append(Link(self._link.number + 1, given_back=True))
        except (OSError, StoreFailed) as error:
            _log.warning("%s was not given back: %s", self._chain.place, error)

    def _add(self, text: str) -> None:
        with self._lock:
            began = _now()
            link = Link(self._link.number + 1, text=text)
            self._chain.append(link)
            self._link, self._until = link, began + TTL - _MARGIN


@contextmanager
def held(
    place: Location, *, guarding: Location | None = None, at_once: bool = False
) -> Iterator[ChainLease | None]:  # fmt: skip
    """See :func:`pgcdc_assets.store.lease.held`. Waits until the lease of a silent holder has certainly ended."""
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
    """The place once it is free; None if another process holds it or may hold it."""
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
    """Seconds by this machine's own clock, never comparable with another machine's."""
    return time.clock_gettime(_CLOCK)


def _process(pid: int) -> str:
    """Names a process of this host. A later process with the same pid has another name."""
    try:
        return f"{pid}.{psutil.Process(pid).create_time()}"
    except psutil.Error:
        return ""
