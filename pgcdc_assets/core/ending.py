"""Ends a process within ten seconds of a signal, even if it hangs. The process is first asked to end at a boundary,
where a later run can continue. If the process does not reach a boundary in time, its main thread is interrupted. If the
process still does not end (a library call ignores signals, or a thread waits for a dead server), it exits at once. That
does no harm, because all that pgcdc writes stays correct if the process is killed at any moment."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

BOUNDARY_SECONDS = 6.0
"""If the process is not at a boundary this many seconds after the first signal, its main thread is interrupted."""
END_SECONDS = 9.0
"""Seconds from the first signal to the end of the process."""
SECOND_SECONDS = 1.5
"""Seconds from the second signal, which interrupts the main thread, to the end of the process."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CODE = 1
_CURSOR = b"\x1b[?25h"
"""The escape sequence that shows the terminal's cursor again, which the progress line hides."""
_WORD = b"pgcdc: ended before all threads had stopped; nothing is half done, and the next run continues the work\n"


class Ending:
    """Handles the signals that ask this process to end. Each process has one instance: :data:`ENDING`."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a signal has asked the process to end."""
        self._owned = False
        self._terminal = 2
        self._generation = 0

    def own(self) -> None:
        """Let signals end this process even if a thread or library call hangs. Must be called in the main thread, and
        only in a process that pgcdc has started."""
        self._owned = True
        # A duplicate of stderr, because a run later redirects stderr itself to a file, for the output of libraries.
        self._terminal = os.dup(2)
        heard, told = os.pipe()
        os.set_blocking(told, False)
        # Python's handlers run only in the main thread, and only after the current library call returns.
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(heard,), name="signals", daemon=True).start()

    @contextmanager
    def at_boundary(self, stop: threading.Event, *, boundary: float | None = BOUNDARY_SECONDS) -> Iterator[None]:
        """During the block, SIGINT and SIGTERM set ``stop``, to end at a boundary. After a second signal, or after
        ``boundary`` seconds, the main thread is interrupted. Does nothing in other threads than the main thread."""

        def handle(number: int, frame: FrameType | None) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            self.asked = True
            stop.set()
            if boundary is not None:
                # Nothing here may take a lock, because the interrupted thread may hold it.
                _thread.start_new_thread(self._interrupt, (self._generation, boundary))

        with self._handled(handle):
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """During the block, SIGINT and SIGTERM raise KeyboardInterrupt in the main thread, as SIGINT usually does."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.asked = True
            raise KeyboardInterrupt

        with self._handled(handle):
            yield

    @contextmanager
    def _handled(self, handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            # A planned interrupt then does nothing, because the block that it should interrupt has ended.
            self._generation += 1
            # A process that pgcdc has not started, such as Dagster's or a test's, continues after the block.
            self.asked &= self._owned

    def _interrupt(self, generation: int, seconds: float) -> None:
        time.sleep(seconds)
        if generation == self._generation:
            # This sends a real signal, because only a signal ends a wait of the main thread.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _hear(self, heard: int) -> None:
        """End the process ``END_SECONDS`` after the first signal, or ``SECOND_SECONDS`` after the second signal."""
        seconds = END_SECONDS
        while True:
            for number in os.read(heard, 64):
                if number in SIGNALS:
                    self.asked = True
                    _thread.start_new_thread(self._end, (seconds,))
                    seconds = SECOND_SECONDS

    def _end(self, seconds: float) -> None:
        time.sleep(seconds)
        with suppress(OSError):
            os.write(self._terminal, (_CURSOR if os.isatty(self._terminal) else b"") + _WORD)
        os._exit(CODE)


ENDING = Ending()
