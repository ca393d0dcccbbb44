"""The settings of a Spark session: our settings, the user's settings, and settings that a cluster's executors need."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from pgcdc_assets.core.settingvalues import is_local
from pgcdc_assets.settings import ARCHIVE, MASTER, Settings
from pgcdc_assets.spark.jars import delta_jars

EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
DRIVER_MEMORY: Final = "2g"
"""Heap of the driver. The tasks' Arrow memory is outside the heap."""
PYTHON: Final = "spark.pyspark.python"
ARCHIVES: Final = "spark.archives"
SNAPSHOTS: Final = {
    # The defaults suit tables of thousands of files: 50 partitions cost seconds at every commit and first read.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.databricks.delta.snapshotCache.storageLevel": "MEMORY_ONLY",
}
UNPACKED: Final = "pgcdc_env"
"""The folder in an executor's working directory in which Spark unpacks the archive."""

_LOGGING = Path(__file__).with_name("log4j2.properties")
_LOOPBACK: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def configuration(settings: Settings) -> dict[str, str]:
    """Returns the session's settings. The user's settings override ours, except settings that correctness needs."""
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
        # Otherwise Spark's pushed-down filters shift dates in the ten days that October 1582 lacked, and miss rows.
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
    """Creates the folder of Spark's spilled rows, deleted at exit. All users can read a folder that Spark creates."""
    folder = tempfile.mkdtemp(prefix="pgcdc-spark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
