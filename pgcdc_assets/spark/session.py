"""Starts and stops the Spark session, which all parts of a run share, and cancels its jobs. Its settings are pgcdc's
settings, the user's settings, and settings that a cluster's executors need."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import LOCAL
from pgcdc_assets.core.settingvalues import is_local
from pgcdc_assets.errors import LakeError, MachineError, SparkDied
from pgcdc_assets.settings import ARCHIVE, LOCAL_MASTER, MASTER, Settings
from pgcdc_assets.spark.jars import delta_jars, java_command
from pgcdc_assets.spark.tasks import await_executors, cores

PARTITIONS = "spark.sql.shuffle.partitions"


class SparkOnDemand:
    """Starts the session at the first call, and returns it. A run without work for Spark never starts a session."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._starting = threading.Lock()
        """A lock, because copies and the apply of changes request the session in different threads."""
        self.started: SparkSession | None = None

    def __call__(self) -> SparkSession:
        with self._starting:
            if self.started is None:
                self.started = self._start()
            return self.started


EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
DRIVER_MEMORY: Final = "2g"
"""Heap of the driver. The tasks' Arrow memory is outside the heap."""
PYTHON: Final = "spark.pyspark.python"
ARCHIVES: Final = "spark.archives"
SNAPSHOTS: Final = {
    # Delta's default of 50 partitions is for tables with thousands of files. For the small tables here, it would cost
    # seconds at every commit and first read.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.databricks.delta.snapshotCache.storageLevel": "MEMORY_ONLY",
}
UNPACKED: Final = "pgcdc_env"
"""The folder in an executor's working directory in which Spark unpacks the archive."""

_LOGGING = Path(__file__).with_name("log4j2.properties")
_LOOPBACK: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def configuration(settings: Settings) -> dict[str, str]:
    """Returns the session's settings. The user's settings override pgcdc's, except the settings that pgcdc needs to
    read and write values correctly."""
    master = settings.master
    base = {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.local.dir": _local_folder(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} -XX:-UsePerfData",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
        **SNAPSHOTS,
    }
    if is_local(master):
        base |= {**_LOOPBACK, "spark.sql.shuffle.partitions": str(os.cpu_count() or 1)}
    needed = {
        **reading(master),
        "spark.databricks.delta.schema.autoMerge.enabled": "false",
        "spark.databricks.delta.autoCompact.enabled": "false",
        "spark.databricks.delta.optimizeWrite.enabled": "false",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }
    user = {key: value for key, value in settings.spark.items() if key not in (MASTER, ARCHIVE)}
    if "spark.jars" in user and "spark.jars" in needed:
        needed["spark.jars"] += f",{user['spark.jars']}"
    return {**base, **user, **_archives(settings), **needed}


def reading(master: str) -> dict[str, str]:
    """Returns the settings with which a session reads all values of mirrors correctly. Fetches Delta's jars at the
    first use."""
    jars = [str(jar) for jar in delta_jars()]
    return {
        **({"spark.driver.extraClassPath": ":".join(jars)} if is_local(master) else {"spark.jars": ",".join(jars)}),
        "spark.sql.extensions": EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        # Otherwise Spark's pushed-down filters shift dates in the ten days that the calendar skipped in October 1582,
        # and miss rows.
        "spark.sql.datetime.java8API.enabled": "true",
        "spark.sql.caseSensitive": "false",
        "spark.sql.ansi.enabled": "true",
    }


def worker_python(settings: Settings) -> str:
    """Returns the path of the tasks' Python: the user's choice, the archive's Python, or else the driver's own."""
    if given := settings.spark.get(PYTHON):
        return given
    if ARCHIVE in settings.spark:
        return f"./{UNPACKED}/bin/python"
    return os.environ.get("PYSPARK_PYTHON") or sys.executable


def _archives(settings: Settings) -> dict[str, str]:
    archive = settings.spark.get(ARCHIVE)
    if archive is None:
        return {}
    # An absolute path, because the driver may have another working directory when it sends the archive.
    archive = archive if "://" in archive else str(Path(archive).absolute())
    own = settings.spark.get(ARCHIVES)
    return {ARCHIVES: ",".join([f"{archive}#{UNPACKED}", *([own] if own else [])])}


@cache
def _local_folder() -> str:
    """Creates a private folder for rows that Spark spills to disk, and deletes it at exit. Spark itself would create a
    folder that all users can read."""
    folder = tempfile.mkdtemp(prefix="pgcdc-spark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def spark_session(settings: Settings) -> SparkSession:
    """Returns the process's session with Delta: the running session, unchanged, or a new one. Raises MachineError if
    Java, the jars or a cluster's executors are missing. Raises LakeError if the running session has no Delta, or if its
    executors would write to their own disks instead of the lake."""
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
    """Returns a session with Delta Lake for readers of a lake: the process's running session, or a new one.
    ``options``: settings of Spark for a new session, like ``spark.driver.memory``; the default master is ``local[*]``.
    Raises MachineError if Java or the jars are missing. Raises LakeError if the running session has no Delta."""
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
    """Starts the session in a new thread. In the main thread, PySpark would replace pgcdc's handler of SIGINT."""
    started: Future[SparkSession] = Future()

    def start() -> None:
        try:
            started.set_result(builder.getOrCreate())
        except BaseException as error:  # noqa: BLE001 - raised to the caller that waits
            started.set_exception(error)

    # pgcdc reports an interrupted call by its own errors, so py4j's log lines about it are dropped.
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
        raise LakeError(
            "this process already has a Spark session without Delta Lake", thing="Spark", do="stop that session first"
        )


def _refuse_far_executors(session: SparkSession, settings: Settings) -> None:
    master = session.sparkContext.master
    if settings.layout.root.scheme == LOCAL and not (settings.lake_shared or is_local(master)):
        raise LakeError(
            f"this process already has a session on {master}: its executors would write to their own disks, not to "
            f"{settings.lake}", thing="Spark",
            do="stop that session first, or set `lake_shared: true` if the executors see that folder",
        )  # fmt: skip
