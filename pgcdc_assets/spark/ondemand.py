"""One Spark session for all parts of a run, started by the first of them that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkOnDemand:
    """Calling it gives the session. A run without changes never starts one."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._starting = threading.Lock()
        """Copies and turns ask from threads of their own."""
        self.started: SparkSession | None = None
        """None while nothing has needed it."""

    def __call__(self) -> SparkSession:
        with self._starting:
            if self.started is None:
                self.started = self._start()
            return self.started
