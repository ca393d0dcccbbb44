"""The thread that writes, and the one job that it has at a time: so memory is bounded while the disk is slow."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Final

from pgcdc_assets.log.batch import Committed

_BUSY_SECONDS: Final = 0.3
"""Between status updates while nothing is read, because the writing thread is behind. A request for a status, which a
server sends at half of its timeout, may lie in what is not read yet."""


class WritingThread:
    """``landed`` takes each commit, in the receiving thread; ``waiting`` is called there during a wait for a job."""

    def __init__(self, landed: Callable[[Committed], None], waiting: Callable[[], None]) -> None:
        self._landed = landed
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log-writer")
        self._job: Future[Committed | None] | None = None

    @property
    def busy(self) -> bool:
        return self._job is not None

    def submit(self, job: Callable[[], Committed | None]) -> None:
        """Begin a job, once the one before is done."""
        self.finish()
        self._job = self._thread.submit(job)

    def finish(self) -> None:
        """Wait for the job, however slow the disk is: the server hears of us meanwhile."""
        while self.busy:
            self.collect(_BUSY_SECONDS)
            if self.busy:
                self._waiting()

    def collect(self, seconds: float = 0) -> None:
        """Take the job's result, if it comes in time; raises what it raised."""
        if self._job is None:
            return
        wait_for([self._job], timeout=seconds)
        if self._job.done():
            committed, self._job = self._job.result(), None
            if committed is not None:
                self._landed(committed)

    def close(self) -> None:
        """Wait for the job, and drop its result."""
        self._thread.shutdown(wait=True, cancel_futures=True)
