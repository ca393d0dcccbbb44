"""Finds out how many tasks run at a time, and waits until a cluster's executors have registered.

Until an executor has registered, Spark reports a parallelism of 2 for any cluster.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from pgcdc_assets.core.settingvalues import is_local
from pgcdc_assets.errors import MachineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTOR_SECONDS: Final = 600.0
"""Time limit for the first executor. A cluster that adds machines on demand takes minutes."""
_SETTLED_SECONDS: Final = 3.0
"""Executors of one application register almost together. If none follows for this long, all have registered."""
_POLL_SECONDS: Final = 0.1
_DYNAMIC: Final = "spark.dynamicAllocation.enabled"
_CAN_START: Final = "check in its UI whether it has the cores and the memory that `spark.executor.*` request"


def beside(session: SparkSession) -> bool:
    """Whether the tasks run on the driver's machine, in its environment."""
    return is_local(session.sparkContext.master)


def cores(session: SparkSession) -> int:
    """Returns how many tasks can run at a time, on registered executors or those that Spark may add on demand."""
    context = session.sparkContext
    standing = max(1, int(context.defaultParallelism))
    if is_local(context.master):
        return standing
    conf = context.getConf()
    most = conf.get("spark.dynamicAllocation.maxExecutors", "") if conf.get(_DYNAMIC, "false") == "true" else ""
    of_most = int(most) * int(conf.get("spark.executor.cores", "1")) if most.isdecimal() else 0
    return max(standing, of_most)


def await_executors(session: SparkSession, seconds: float = EXECUTOR_SECONDS) -> None:
    """Waits until the executors have registered. With dynamic allocation it does not wait, because executors start
    later, on demand. Raises MachineError if no executor registers, or if the cluster ends the application."""
    context = session.sparkContext
    if is_local(context.master) or context.getConf().get(_DYNAMIC, "false") == "true":
        return
    thing, deadline = f"Spark cluster {context.master}", time.monotonic() + seconds
    standing, grown = 0, time.monotonic()
    while not standing or time.monotonic() - grown < _SETTLED_SECONDS:
        if context._jsc.sc().isStopped():
            raise MachineError("ended the application before an executor started", thing=thing, do=_CAN_START)
        if standing < (now := _registered(context)):
            standing, grown = now, time.monotonic()
        if not standing and time.monotonic() > deadline:
            raise MachineError(f"has started no executor in {seconds:.0f} s", thing=thing, do=_CAN_START)
        if standing and _all(context, standing):
            return
        time.sleep(_POLL_SECONDS)


def _registered(context: Any) -> int:
    """Returns the number of registered executors. The memory status also lists the driver."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1


def _all(context: Any, standing: int) -> bool:
    """Whether all executors that the settings request have registered."""
    conf = context.getConf()
    if wanted := conf.get("spark.executor.instances", ""):
        return standing >= int(wanted)
    most = conf.get("spark.cores.max", "")
    return bool(most) and int(context.defaultParallelism) >= int(most)
