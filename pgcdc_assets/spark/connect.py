"""Spark Connect: a session of a server elsewhere (``sc://host:15002``), which has no JVM and no RDD here.

Tasks need no more of Spark than to be run once each, so they run as they do elsewhere. The server has its own settings:
memory, cores and jars are what it was started with.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pyarrow as pa

from pgcdc_assets.errors import MachineError
from pgcdc_assets.settings import ARCHIVE, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PYTHON: Final = "spark.sql.execution.pyspark.python"
UNPACKED: Final = "pgcdc_env"
"""The folder, in an executor's working directory, into which Spark unpacks the archive."""

_PORT: Final = 15002
"""Spark's default."""
_CONNECT_SECONDS: Final = 10
_LEAVES: Final = "spark.sql.leafNodeDefaultParallelism"
_MOST_TASKS: Final = "100000"
"""Rows that the client sends are cut into so many partitions at most: each row is a task of its own."""
_RESULT: Final = "place long, kind string, result binary"
_LOCAL: Final = re.compile(r"local(?:-cluster)?\[(\d+)(?:,(\d+))?")


def is_connected(session: SparkSession) -> bool:
    return type(session).__module__.startswith("pyspark.sql.connect.")


def connected(settings: Settings) -> SparkSession:
    """A session of the server that the setting names. Raises MachineError if the client's packages are missing, or if
    the server does not answer."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    _refuse_deaf_server(settings.master)
    try:
        session: SparkSession = SparkSession.builder.remote(settings.master).appName("pgcdc_assets").getOrCreate()
        session.conf.set(_LEAVES, _MOST_TASKS)
        if archive := settings.spark.get(ARCHIVE):
            session.addArtifacts(f"{Path(archive).absolute()}#{UNPACKED}", archive=True)
            session.conf.set(PYTHON, f"./{UNPACKED}/bin/python")
        for key, value in settings.spark.items():
            if key.startswith("spark.sql."):
                session.conf.set(key, value)
    except ImportError as error:
        raise MachineError(f"lacks a package ({error.name})", thing="Spark Connect",
                           do="install pgcdc_assets[connect]") from None  # fmt: skip
    except PySparkException as error:
        # Its text quotes the URL.
        reason = error.getCondition() or type(error).__name__
        raise MachineError(f"did not take the session: {reason}", thing="Spark Connect",
                           do="see that the server runs, and the setting `spark`") from error  # fmt: skip
    return session


def _refuse_deaf_server(url: str) -> None:
    """Raise MachineError unless somebody listens there: Spark's own client tries again for ten minutes."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or _PORT), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise MachineError(f"cannot be reached ({error.strerror or type(error).__name__})",
                           thing=f"Spark Connect server {parts.hostname}:{parts.port or _PORT}",
                           do="see that it runs, and the setting `spark`") from None  # fmt: skip


def collected(
    session: SparkSession, attempt: Callable[[bytes], tuple[str, bytes]], packed: Sequence[bytes]
) -> list[tuple[str, bytes]]:
    """What ``attempt`` returns for each of ``packed``, in their order: each in a task of its own, which gets no
    other."""

    def attempts(batches: Any) -> Any:
        import pyarrow

        for batch in batches:
            for place, one in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                kind, result = attempt(one)
                yield pyarrow.RecordBatch.from_arrays(
                    [pyarrow.array([place], pyarrow.int64()), pyarrow.array([str(kind)]),
                     pyarrow.array([result], pyarrow.binary())], ["place", "kind", "result"]
                )  # fmt: skip

    specs = pa.table({"place": pa.array(range(len(packed)), pa.int64()), "spec": pa.array(packed, pa.binary())})
    done = session.createDataFrame(specs).mapInArrow(attempts, _RESULT).toArrow().sort_by("place")
    return list(zip(done["kind"].to_pylist(), done["result"].to_pylist(), strict=True))


def parallelism(session: SparkSession) -> int:
    """How many tasks the server's settings let run at a time: it does not tell how many there are."""

    def setting(name: str) -> int:
        value = session.conf.get(name, "") or ""
        return int(value) if value.isdecimal() else 0

    if told := setting("spark.default.parallelism") or setting("spark.cores.max"):
        return told
    each = setting("spark.executor.cores") or 1
    local = _LOCAL.match(session.conf.get("spark.master", "") or "")
    of_master = int(local[1]) * int(local[2] or 1) if local else 0
    return max(
        2, of_master, each * setting("spark.executor.instances"), each * setting("spark.dynamicAllocation.maxExecutors")
    )
