"""One Spark session for all parts of a run, started when the first part needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkOnDemand:
    """Call it to get the session. A run without changes never starts a session."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._starting = threading.Lock()
        """Copies and turns ask for the session in different threads."""
        self.started: SparkSession | None = None
        """None until something has needed the session."""

    def __call__(self) -> SparkSession:
        with self._starting:
            if self.started is None:
                self.started = self._start()
            return self.started
