"""The driver's part of a Spark job that runs one function over many specs (its inputs). Also finds out how many tasks
can run at a time, and waits for a cluster's executors. Before they have registered, Spark reports a parallelism of 2
for any cluster."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pgcdc_assets.core.settingvalues import is_local
from pgcdc_assets.errors import MachineError
from pgcdc_assets.spark.attempt import Kind, versions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Spec = TypeVar("Spec")
Result = TypeVar("Result")

_GIVE: Final = (
    "give the executors the driver's environment: make an archive with `pgcdc pack`, and set it in `spark: "
    "{archive: ...}`; or use an image with the same versions, and set its Python in `spark.pyspark.python`"
)
_HOST: Final = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor \w+\)")
_NO_PYTHON: Final = re.compile(r'Cannot run program "([^"]+)"')
_OTHER_PYTHON: Final = re.compile(r"PYTHON_VERSION_MISMATCH\D+(\d\.\d+)")
_NO_MODULE: Final = re.compile(r"No module named '?(pyspark|pgcdc_assets)\b")


class TaskSum(Generic[Result]):
    """A sum over the results of a job's tasks, which shows progress, because it grows whenever a task ends."""

    def __init__(self, session: SparkSession, number: Callable[[Result], int]) -> None:
        """``number``: a function that is called in the worker with a task's result, and returns the number to add to
        the sum. It must be defined at the top level of a module, because it is pickled."""
        self.number = number
        self.sum = session.sparkContext.accumulator(0)

    @property
    def value(self) -> int:
        return int(self.sum.value)


def run_tasks(
    session: SparkSession, task: Callable[[Spec], Result], specs: Sequence[Spec], sums: Sequence[TaskSum[Result]] = ()
) -> list[Result]:
    """Runs ``task`` once per spec, each in its own Spark task. Returns the results in the order of the specs.

    Task, specs and results are pickled, so ``task`` must be a function at the top level of a module. It may run more
    than once for a spec (a retried or speculative attempt). So the files that it writes must have unique names, and the
    caller may use only the files that the returned results name. ``sums`` grow with each task that ends.

    Raises the PgcdcError of a task unchanged. Raises MachineError for errors of the system, such as a full disk, and
    for an executor whose Python or packages differ from the driver's.
    """
    if not specs:
        return []
    packed = [pickle.dumps((task, spec)) for spec in specs]
    try:
        attempts = session.sparkContext.parallelize(packed, len(packed)).map(_attempt(sums)).collect()
    except Exception as error:
        # PySpark keeps only the text from the worker. The host's name is in the Java error that PySpark handled.
        if (unfit := _unfit(f"{error} {error.__context__}")) is None:
            raise
        raise unfit from error
    here = beside(session)
    return [_result(kind, result, here=here) for kind, result in attempts]


def _attempt(sums: Sequence[TaskSum[Any]] = ()) -> Callable[[bytes], tuple[str, bytes]]:
    """Returns the function that a worker calls. It is sent by value, so it works even in a worker without
    pgcdc_assets."""
    driver = versions()
    grown = [(one.sum, pickle.dumps(one.number)) for one in sums]

    def attempt(packed: bytes) -> tuple[str, bytes]:
        import pickle

        try:
            from pgcdc_assets.spark.attempt import attempted
        except ImportError as error:
            import socket
            from importlib.metadata import PackageNotFoundError, version

            try:
                found = f"has pgcdc_assets {version('pgcdc_assets')}, but the driver has {driver['pgcdc_assets']}"
            except PackageNotFoundError:
                found = "has no pgcdc_assets"
            return "other", pickle.dumps((socket.gethostname(), f"{found} ({error})"))
        kind, result = attempted(packed, driver)
        for total, number in grown if kind == "done" else ():
            total.add(pickle.loads(number)(pickle.loads(result)))
        return kind, result

    return attempt


def _result(kind: str, packed: bytes, *, here: bool) -> Any:
    """Unpacks a result, or raises its error. ``here``: whether the workers run on the driver's machine; errors then
    name no host."""
    found = pickle.loads(packed)
    if kind == Kind.DONE:
        return found
    host, failed = found
    if kind == Kind.OTHER:
        raise MachineError(failed, thing=f"executor on {host}", do=_GIVE)
    if isinstance(failed, MachineError) and not here:
        # A full disk, or an object store without credentials, may be a problem of that host alone, so the error names
        # the host.
        failed.what += f", on the executor on {host}"
    raise failed


def _unfit(told: str) -> MachineError | None:
    """Returns the error for a worker that Spark could not start or that refused the task; otherwise None."""
    host = _HOST.search(told)
    thing = f"executor on {host[1]}" if host else "executor"
    if found := _NO_PYTHON.search(told):
        return MachineError(f"has no Python at {found[1]}", thing=thing, do=_GIVE)
    if found := _OTHER_PYTHON.search(told):
        return MachineError(f"has Python {found[1]}, but the driver has {versions()['Python']}", thing=thing, do=_GIVE)
    if found := _NO_MODULE.search(told):
        return MachineError(f"has no {found[1]}", thing=thing, do=_GIVE)
    return None


EXECUTOR_SECONDS: Final = 600.0
"""Time limit for the first executor. A cluster that adds machines on demand takes minutes."""
_SETTLED_SECONDS: Final = 3.0
"""Executors of one application register almost at the same time. If no further executor registers for this long, all
have registered."""
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
