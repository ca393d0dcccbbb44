"""The parent's side of the receiver process."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from typing import IO

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import PgcdcError, ReceiverDied
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.messages import Event, EventName, Order, OrderName, ReceiverSettings, read_line
from pgcdc_assets.store import storage

_ALLOCATION = {
    # One malloc arena, and freed pages returned to the system, for Python, libpq and Arrow. Measured with a transaction
    # of 2,000,000 rows: a peak of 220 MB instead of 285 MB.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2 << 20),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
STOP_SECONDS = 5.0
"""Time for a stop. It comes after the current batch, and so takes about a second. A process that takes longer is stuck
or has a slow disk; killing it is safe at any point."""


class ReceiverProcess:
    """Owns the receiver process, which reads orders as lines on its stdin. Its stdin ends if we die."""

    def __init__(self, settings: ReceiverSettings) -> None:
        self._settings = settings
        self._layout = Layout.of(settings.lake)
        self._child: subprocess.Popen[bytes] | None = None
        self._events: queue.SimpleQueue[Event | PgcdcError | None] = queue.SimpleQueue()
        self._early: list[Event | PgcdcError | None] = []
        self._failure: PgcdcError | None = None
        self._ended = False
        self._stopped = False

    def start(self) -> None:
        """Start the process. :meth:`events` reports problems. LeaseLost if another process may have taken the lake."""
        leader = ChangeLog(self._layout).leader
        # This proves that we held the lake when we read ``leader``. If we are suspended and another process takes the
        # lake, the log gets a newer leader, and refuses our receiver.
        storage.assure(self._layout.root)
        # The receiver has its own session: a terminal's interrupt reaches only us, and we stop it at a boundary.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pgcdc_assets.log.receive.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, **_ALLOCATION},
        )  # fmt: skip
        assert self._child.stdout is not None
        threading.Thread(target=self._read, args=(self._child.stdout,), name="receiver-events", daemon=True).start()
        self._send(replace(self._settings, leader=leader).to_line())

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    # Orders -----------------------------------------------------------------------------------------

    def until(self, lsn: Lsn) -> None:
        """Receive up to ``lsn``, then end."""
        self._order(OrderName.UNTIL, lsn)

    def follow(self) -> None:
        """Cancel a goal that is not reached yet."""
        self._order(OrderName.FOLLOW)

    def mark(self, lsn: Lsn) -> None:
        """Record the log up to ``lsn`` (a known boundary), send ``complete``, and continue."""
        self._order(OrderName.MARK, lsn)

    def report_apply(self, lsn: Lsn) -> None:
        """Every mirror has reached ``lsn``: report this to the source as apply."""
        self._order(OrderName.REPORT_APPLY, lsn)

    def stop(self) -> None:
        """Stop the process at a boundary, and wait until it has ended. Its last events can still be read."""
        self._stopped = True
        self._order(OrderName.STOP)
        self.join(STOP_SECONDS)

    def kill(self) -> None:
        self._stopped = True
        self.join(0)

    def join(self, seconds: float) -> None:
        """Wait until the process ends. Kill it after ``seconds``."""
        if self._child is None:
            return
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()

    # Events -----------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Wait until there is something for :meth:`events`, at most ``seconds``."""
        if not self._early and not self._ended:
            try:
                self._early.append(self._events.get(timeout=seconds) if seconds > 0 else self._events.get_nowait())
            except queue.Empty:
                return

    def events(self, timeout: float) -> list[Event]:
        """The events since the last call. Waits up to ``timeout`` seconds for a first event. After the last event
        raises the receiver's error, or ReceiverDied if the receiver ended without an error and unasked."""
        self.wait(timeout)
        taken: list[Event] = []
        while True:
            try:
                item = self._early.pop(0) if self._early else self._events.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._ended = True
            elif isinstance(item, PgcdcError):
                self._failure = item
            else:
                taken.append(item)
        if not taken and self._ended and self._failure is not None:
            raise self._failure
        return taken

    # Within -----------------------------------------------------------------------------------------

    def _order(self, name: OrderName, lsn: Lsn = ZERO) -> None:
        self._send(Order(name, lsn).to_line())

    def _send(self, line: bytes) -> None:
        if self._child is None or self._child.stdin is None or self._child.stdin.closed:
            return
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except BrokenPipeError:
            # The receiver has ended; events() raises the reason.
            return

    def _read(self, stdout: IO[bytes]) -> None:
        arrived = failed = False
        for line in stdout:
            item = read_line(line)
            failed = failed or isinstance(item, PgcdcError)
            arrived = arrived or (isinstance(item, Event) and item.name == EventName.ARRIVED)
            self._events.put(item)
        stdout.close()
        assert self._child is not None
        code = self._child.wait()
        if not failed and (code != 0 or not (arrived or self._stopped)) and not (self._stopped and code < 0):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self._events.put(ReceiverDied(how, thing="receiver process"))
        self._events.put(None)
