"""One attempt at a task, in a worker: imported there for every job, so it imports neither Spark nor the driver's part.

What it returns begins with its kind; the rest is pickled.
"""

from __future__ import annotations

import pickle
import socket
from enum import StrEnum

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.failures import of_the_machine
from pgcdc_assets.spark.versions import Versions, difference, versions


class Kind(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """With an error that the driver raises as itself."""
    OTHER = "other"
    """Nothing was tried: with the name of the worker's host, and what it has otherwise than the driver."""


def attempted(packed: bytes, driver: Versions) -> tuple[str, bytes]:
    """The result of one task. Our errors are returned as values, because Spark would turn them into text."""
    if (other := difference(versions(), driver)) is not None:
        return Kind.OTHER, pickle.dumps((socket.gethostname(), other))
    kind = Kind.FAILED
    try:
        task, spec = pickle.loads(packed)
        result, kind = task(spec), Kind.DONE
    except PgcdcError as error:
        result = error
    except OSError as error:
        result = of_the_machine(error)
        if result is None:
            raise
    return kind, pickle.dumps(result)
