"""Runs one function over many specs as one Spark job; holds both the driver's part and the workers' part.

It is separate from the session because a worker imports this module for every job, and should not pay for importing
the driver's modules.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.failures import of_the_machine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Spec = TypeVar("Spec")
Result = TypeVar("Result")


def run_tasks(session: SparkSession, task: Callable[[Spec], Result], specs: Sequence[Spec]) -> list[Result]:
    """Run ``task`` once per spec, each in a Spark task of its own; returns the results in the order of the specs.

    Task, specs and results are pickled, and each spec goes only to its own Spark task; ``task`` should be a function
    of a module. It may run more than once for a spec (a retried or speculative attempt): what it writes must have
    unique names, and only what the returned results name counts. The job is collected exactly once. A task's
    PgcdcError, and the error of what the system refuses to all tasks alike, is raised here as itself.
    """
    if not specs:
        return []
    packed = [pickle.dumps(spec) for spec in specs]
    attempts = session.sparkContext.parallelize(packed, len(packed)).map(lambda spec: _attempt(task, spec)).collect()
    for failed, result in attempts:
        if failed:
            raise pickle.loads(result)
    return [pickle.loads(result) for _, result in attempts]


def _attempt(task: Callable[[Any], Any], packed: bytes) -> tuple[bool, bytes]:
    """One spec's result, pickled. Our errors are returned as values, because Spark would turn them into text."""
    try:
        result, failed = task(pickle.loads(packed)), False
    except PgcdcError as error:
        result, failed = error, True
    except OSError as error:
        refused = of_the_machine(error)
        if refused is None:
            raise
        result, failed = refused, True
    return failed, pickle.dumps(result)
