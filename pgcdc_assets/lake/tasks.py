"""One function over many specs as one Spark job, and what of it runs in the workers.

Apart from the session: a worker imports this module for every job, and should not pay for the driver's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from pgcdc_assets.errors import PgcdcError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Spec = TypeVar("Spec")
Result = TypeVar("Result")

_COLUMNS = "place long, failed boolean, result binary"


def run_tasks(session: SparkSession, task: Callable[[Spec], Result], specs: Sequence[Spec]) -> list[Result]:
    """Run ``task`` once per spec, one Spark task each, and give the results back in the order of the specs.

    Task, specs and results are pickled; ``task`` should be a module's function. It may run more than once
    for a spec (a retried or speculative attempt): what it writes must carry unique names, and only what
    the returned results name counts. The job is collected exactly once. A PgcdcError of a task is raised
    here as itself.
    """
    if not specs:
        return []
    packed = [pickle.dumps(spec) for spec in specs]

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for place in batch.column(0).to_pylist():
                yield _attempt(task, packed[place], place)

    count = len(specs)
    collected = session.range(0, count, 1, count).mapInArrow(rows, _COLUMNS).collect()
    for row in collected:
        if row.failed:
            raise pickle.loads(bytes(row.result))
    return [pickle.loads(bytes(row.result)) for row in sorted(collected, key=lambda row: int(row.place))]


def _attempt(task: Callable[[Any], Any], packed: bytes, place: int) -> pa.RecordBatch:
    """One spec's result. Errors of ours travel as values: Spark would make text of them."""
    try:
        result, failed = task(pickle.loads(packed)), False
    except PgcdcError as error:
        result, failed = error, True
    columns = [pa.array([place], pa.int64()), pa.array([failed]), pa.array([pickle.dumps(result)], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, ["place", "failed", "result"])
