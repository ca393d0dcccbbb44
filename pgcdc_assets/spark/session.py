"""Starts and stops the Spark session, which all parts of a run share, and cancels its jobs."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import LOCAL
from pgcdc_assets.core.settingvalues import is_local
from pgcdc_assets.errors import LakeError, MachineError, SparkDied
from pgcdc_assets.settings import LOCAL_MASTER, Settings
from pgcdc_assets.spark.configuration import EXTENSION, SNAPSHOTS, configuration, reading, worker_python
from pgcdc_assets.spark.executors import await_executors, cores
from pgcdc_assets.spark.jars import java_command

PARTITIONS = "spark.sql.shuffle.partitions"


class SparkOnDemand:
    """Starts the session at the first call, and returns it. A run without work for Spark never starts a session."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._starting = threading.Lock()
        """A lock, because copies and turns request the session in different threads."""
        self.started: SparkSession | None = None

    def __call__(self) -> SparkSession:
        with self._starting:
            if self.started is None:
                self.started = self._start()
            return self.started


def spark_session(settings: Settings) -> SparkSession:
    """Returns the process's session with Delta. A running session is used unchanged if it has Delta. Raises
    MachineError if Java, the jars or a cluster's executors are missing. Raises LakeError if a running session has no
    Delta, or if its executors would write to their own disks."""
    if SparkContext._active_spark_context is not None:
        running: SparkSession = SparkSession.builder.getOrCreate()
        _refuse_without_delta(running)
        _refuse_far_executors(running, settings)
        return running
    java_command()
    # Spark reads the path of the tasks' Python only from the environment.
    os.environ["PYSPARK_PYTHON"] = worker_python(settings)
    builder = SparkSession.builder.appName("pgcdc_assets").master(settings.master)
    for key, value in configuration(settings).items():
        builder = builder.config(key, value)
    try:
        session = _started(builder)
    except (PySparkException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MachineError(f"did not start: {reason}", thing="Spark") from error
    try:
        await_executors(session)
    except BaseException:
        # Otherwise the session would continue to request executors from the cluster.
        stop_session(session)
        raise
    if PARTITIONS not in settings.spark:
        session.conf.set(PARTITIONS, str(cores(session)))
    return session


def delta_session(options: Mapping[str, str] | None = None) -> SparkSession:
    """Returns a session with Delta Lake for readers of a lake, or the process's running session. ``options``: settings
    of Spark, like ``spark.driver.memory``; the default master is ``local[*]``. Raises MachineError if Java or the jars
    are missing. Raises LakeError if a running session has no Delta."""
    builder = SparkSession.builder
    if SparkContext._active_spark_context is None:
        java_command()
        given = {"spark.app.name": "pgcdc_reader", "spark.master": LOCAL_MASTER, **SNAPSHOTS, **(options or {})}
        for key, value in {**given, **reading(given["spark.master"])}.items():
            builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    _refuse_without_delta(session)
    return session


def _started(builder: SparkSession.Builder) -> SparkSession:
    """Starts the session in a new thread. In the main thread, PySpark would replace our handler of SIGINT."""
    started: Future[SparkSession] = Future()

    def start() -> None:
        try:
            started.set_result(builder.getOrCreate())
        except BaseException as error:  # noqa: BLE001 - raised to the caller that waits
            started.set_exception(error)

    # Our own errors report an interrupted call, so py4j's log lines about it are dropped.
    logging.getLogger("py4j").addHandler(logging.NullHandler())
    logging.getLogger("py4j").propagate = False
    threading.Thread(target=start, name="spark-start", daemon=True).start()
    return started.result()


def stop_session(session: SparkSession) -> None:
    """Cancels running jobs and stops the session. The JVM ends with this process. May be called twice."""
    context = session.sparkContext
    if context._jsc is None or _jvm_ended(0):
        return
    context.cancelAllJobs()
    session.stop()


def cancel_jobs(session: SparkSession) -> None:
    """Cancels every running job of the session. The jobs' callers get an error."""
    session.sparkContext.cancelAllJobs()


@contextmanager
def jvm_death_told() -> Iterator[None]:
    """Raises SparkDied instead of py4j's error if the JVM has ended."""
    try:
        yield
    except (Py4JError, ConnectionError) as error:
        # The JVM's sockets close a moment before its process ends.
        if isinstance(error, Py4JJavaError) or not _jvm_ended(5):
            raise
        raise SparkDied("ended while it was used", thing="Spark's JVM") from error


def _jvm_ended(seconds: float) -> bool:
    """Whether the JVM that this process started has ended, or ends within ``seconds``."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _refuse_without_delta(session: SparkSession) -> None:
    if EXTENSION not in (session.conf.get("spark.sql.extensions", "") or ""):
        raise LakeError("the process runs a Spark session without Delta Lake", thing="Spark", do="stop it first")


def _refuse_far_executors(session: SparkSession, settings: Settings) -> None:
    master = session.sparkContext.master
    if settings.layout.root.scheme == LOCAL and not (settings.lake_shared or is_local(master)):
        raise LakeError(
            f"the process runs a session on {master}, whose executors would write to their own disks instead of "
            f"{settings.lake}", thing="Spark", do="stop it first, or see `lake_shared`",
        )  # fmt: skip
