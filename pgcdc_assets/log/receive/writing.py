"""The writing thread. It has one job at a time, so that memory is bounded even if the disk is slow."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Final

from pgcdc_assets.log.batch import Committed

_BUSY_SECONDS: Final = 0.3
"""Seconds between status updates while nothing is read because the writing thread is behind. A server asks for a status
at half of its timeout, and this request may be in the frames that are not read yet."""


class WritingThread:
    """``landed`` takes each commit. ``waiting`` is called repeatedly during a wait for a job. Both are called in the
    receiving thread."""

    def __init__(self, landed: Callable[[Committed], None], waiting: Callable[[], None]) -> None:
        self._landed = landed
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log-writer")
        self._job: Future[Committed | None] | None = None

    @property
    def busy(self) -> bool:
        return self._job is not None

    def submit(self, job: Callable[[], Committed | None]) -> None:
        """Start a job as soon as the previous job is done."""
        self.finish()
        self._job = self._thread.submit(job)

    def finish(self) -> None:
        """Wait for the job, for any length of time. The server receives status updates during the wait."""
        while self.busy:
            self.collect(_BUSY_SECONDS)
            if self.busy:
                self._waiting()

    def collect(self, seconds: float = 0) -> None:
        """Take the job's result if it comes within ``seconds``. Raises the job's exception."""
        if self._job is None:
            return
        wait_for([self._job], timeout=seconds)
        if self._job.done():
            committed, self._job = self._job.result(), None
            if committed is not None:
                self._landed(committed)

    def close(self) -> None:
        """Wait for the job, and discard its result."""
        self._thread.shutdown(wait=True, cancel_futures=True)
