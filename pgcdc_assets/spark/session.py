"""Spark's session, and everything that needs the JVM's driver: sessions per commit, jobs, settings.

Every setting is made in the builder: ``newSession()`` inherits those, but not what ``conf.set`` changed.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.core.location import Location
from pgcdc_assets.errors import LakeError, MachineError, SettingsError, SparkDied
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.jars import delta_jars
from pgcdc_assets.spark.maven import java_command

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
DRIVER_MEMORY = "2g"
"""Heap of the driver, which in local mode runs the merges too; the tasks' Arrow memory lies outside it."""

TXN_APP_ID = "spark.databricks.delta.write.txnAppId"
TXN_VERSION = "spark.databricks.delta.write.txnVersion"

_LOGGING = Path(__file__).with_name("log4j2.properties")


def spark_session(settings: Settings) -> SparkSession:
    """The process's session with Delta; a running session is used as it is, if it has Delta.

    Raises MachineError if Java or the jars are missing, SettingsError if the master cannot work on this lake,
    LakeError if a running session has no Delta.
    """
    if SparkContext._active_spark_context is not None:
        running: SparkSession = SparkSession.builder.getOrCreate()
        _refuse_without_delta(running)
        return running
    master = settings.spark.get("master", "local[*]")
    refuse_remote_master(settings.layout.root, master)
    java_command()
    # Spark takes the tasks' Python only from the environment.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("pgcdc_assets").master(master)
    for key, value in _configuration(settings, master).items():
        builder = builder.config(key, value)
    try:
        session = _started(builder)
    except (PySparkException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MachineError(f"did not start: {reason}", thing="Spark") from error
    return session


def _started(builder: SparkSession.Builder) -> SparkSession:
    """Start the session in a thread of its own. In the main thread PySpark would replace our SIGINT handler, which
    interrupts whatever goes on; and a caller that waits here can be interrupted meanwhile."""
    started: Future[SparkSession] = Future()

    def start() -> None:
        try:
            started.set_result(builder.getOrCreate())
        except BaseException as error:  # noqa: BLE001 - raised to the caller that waits
            started.set_exception(error)

    # What py4j logs about an interrupted call is of no use: our own errors report it.
    logging.getLogger("py4j").addHandler(logging.NullHandler())
    logging.getLogger("py4j").propagate = False
    threading.Thread(target=start, name="spark-start", daemon=True).start()
    return started.result()


def stop_session(session: SparkSession) -> None:
    """Cancel what runs and stop the session; the JVM itself ends with this process. Stopping twice is fine."""
    context = session.sparkContext
    if context._jsc is None or _jvm_ended(0):
        return
    context.cancelAllJobs()
    session.stop()


def cancel_jobs(session: SparkSession) -> None:
    """End every job that runs in this session's Spark; their callers see them fail."""
    session.sparkContext.cancelAllJobs()


@contextmanager
def jvm_death_told() -> Iterator[None]:
    """Raise SparkDied instead of the error that py4j raises when the JVM has ended."""
    try:
        yield
    except (Py4JError, ConnectionError) as error:
        # The JVM's sockets close a moment before its process has ended.
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


def refuse_remote_master(lake: Location, master: str) -> None:
    """Raise SettingsError unless the master is local: executors on other machines would write to their own disks."""
    if not master.startswith("local"):
        raise SettingsError(
            f"{master} cannot be used with a lake on a local path ({lake})",
            thing="setting `spark`",
            do="use master local[*]",
        )


def table_session(session: SparkSession, app_id: str, version: int) -> SparkSession:
    """A session for one commit on one table, because its application transaction would leak into the next write.

    Delta skips the write if the table has this version of ``app_id`` or a higher one, so check before.
    """
    own = session.newSession()
    own.conf.set(TXN_APP_ID, app_id)
    own.conf.set(TXN_VERSION, str(int(version)))
    return own


def cores(session: SparkSession) -> int:
    """How many tasks run at a time."""
    return max(1, int(session.sparkContext.defaultParallelism))


def _refuse_without_delta(session: SparkSession) -> None:
    if EXTENSION not in (session.conf.get("spark.sql.extensions", "") or ""):
        raise LakeError("the process runs a Spark session without Delta Lake", thing="Spark", do="stop it first")


@cache
def _local_folder() -> str:
    """Spark's folder for spilled rows while this process lives. A folder that Spark makes would be open to all."""
    folder = tempfile.mkdtemp(prefix="pgcdc-spark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _configuration(settings: Settings, master: str) -> dict[str, str]:
    """The session's settings. The user's settings override ours, except those that correctness needs."""
    jars = [str(jar) for jar in delta_jars()]
    cores = str(os.cpu_count() or 1)
    base = {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": _local_folder(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} -XX:-UsePerfData",
        "spark.sql.shuffle.partitions": cores,
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
        # The defaults are for tables of thousands of files: 50 partitions cost seconds at every commit.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.databricks.delta.snapshotCache.storageLevel": "MEMORY_ONLY",
    }
    jars_at = "spark.driver.extraClassPath" if master.startswith("local") else "spark.jars"
    needed = {
        jars_at: (":" if master.startswith("local") else ",").join(jars),
        "spark.sql.extensions": EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        # Without it, Spark's pushed-down filters turn the ten days that the calendar skipped in October 1582 into other
        # days, and skip rows.
        "spark.sql.datetime.java8API.enabled": "true",
        "spark.sql.caseSensitive": "false",
        "spark.sql.ansi.enabled": "true",
        "spark.databricks.delta.schema.autoMerge.enabled": "false",
        "spark.databricks.delta.autoCompact.enabled": "false",
        "spark.databricks.delta.optimizeWrite.enabled": "false",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }
    user = {key: value for key, value in settings.spark.items() if key != "master"}
    return {**base, **user, **needed}
