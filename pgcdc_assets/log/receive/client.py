"""The parent's side of the receiver process: starts it, sends orders, and reads events."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from typing import IO

from pgcdc_assets import logs
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import PgcdcError, ReceiverDied
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.messages import Event, EventName, Order, OrderName, ReceiverSettings, read_line
from pgcdc_assets.store import storage

_ALLOCATION = {
    # Python, libpq and Arrow use one malloc arena, and return freed pages to the system. Measured with a transaction of
    # 2,000,000 rows: a peak of 220 MB of memory instead of 285 MB.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2 << 20),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
STOP_SECONDS = 5.0
"""How long the receiver may take to stop before it is killed. It first finishes the current batch, which takes about a
second. If it takes longer, it is stuck or has a slow disk. It can be killed safely at any time."""


class ReceiverProcess:
    """Starts and controls the receiver process. Sends orders as lines to the receiver's stdin. If the parent process
    dies, the receiver's stdin is closed, and the receiver stops."""

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
        """Start the receiver process. Its errors are raised by :meth:`events`. Raises LeaseLost if another process may
        have taken over the lake."""
        leader = ChangeLog(self._layout).leader
        # This raises LeaseLost unless this process still had the lake's lease when it read ``leader``. If another
        # process takes the lake over later, the log gets a newer leader, and the commits of our receiver fail.
        storage.assure(self._layout.root)
        # The receiver is in its own session, so a terminal's interrupt (SIGINT) reaches only this process, which then
        # sends the order STOP to the receiver.
        logging, descriptors = logs.for_child()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pgcdc_assets.log.receive.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True, env={**os.environ, **_ALLOCATION, **logging}, pass_fds=descriptors,
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

    # Orders, as :class:`OrderName` describes them ---------------------------------------------------

    def until(self, lsn: Lsn) -> None:
        self._order(OrderName.UNTIL, lsn)

    def follow(self) -> None:
        self._order(OrderName.FOLLOW)

    def mark(self, lsn: Lsn) -> None:
        self._order(OrderName.MARK, lsn)

    def report_apply(self, lsn: Lsn) -> None:
        self._order(OrderName.REPORT_APPLY, lsn)

    def stop(self) -> None:
        """Send the order STOP, and wait until the process has ended. It is killed if it has not ended after
        ``STOP_SECONDS``. Its last events can still be read."""
        self._stopped = True
        self._order(OrderName.STOP)
        self.join(STOP_SECONDS)

    def kill(self) -> None:
        self._stopped = True
        self.join(0)

    def join(self, seconds: float) -> None:
        """Wait until the process ends. Kill it if it has not ended after ``seconds``."""
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
        """Wait, at most ``seconds``, until the receiver has sent an event or an error, or has ended."""
        if not self._early and not self._ended:
            with contextlib.suppress(queue.Empty):
                self._early.append(self._events.get(timeout=max(seconds, 0)))

    def events(self, timeout: float) -> list[Event]:
        """The events since the last call. Waits up to ``timeout`` seconds for the first event. If there are no more
        events, raises the error with which the receiver ended. Raises ReceiverDied if the receiver ended unexpectedly
        and sent no error."""
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

    # Helper methods ---------------------------------------------------------------------------------

    def _order(self, name: OrderName, lsn: Lsn = ZERO) -> None:
        self._send(Order(name, lsn).to_line())

    def _send(self, line: bytes) -> None:
        if self._child is None or self._child.stdin is None or self._child.stdin.closed:
            return
        # If the receiver has ended, events() raises its error.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(line)
            self._child.stdin.flush()

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
