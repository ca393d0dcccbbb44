"""One attempt at a task, in a worker. Every job imports this module there, so it must not import Spark or the driver's
part.

The result begins with its kind; the rest is pickled.
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
    """With the name of the worker's host, and an error that the driver raises unchanged."""
    OTHER = "other"
    """Nothing was tried. With the name of the worker's host, and how the worker differs from the driver."""


def attempted(packed: bytes, driver: Versions) -> tuple[str, bytes]:
    """The result of one task. Our errors are returned as values, because Spark would turn them into text."""
    if (other := difference(versions(), driver)) is not None:
        return Kind.OTHER, pickle.dumps((socket.gethostname(), other))
    try:
        task, spec = pickle.loads(packed)
        return Kind.DONE, pickle.dumps(task(spec))
    except PgcdcError as error:
        failed = error
    except OSError as error:
        if (refused := of_the_machine(error)) is None:
            raise
        failed = refused
    return Kind.FAILED, pickle.dumps((socket.gethostname(), failed))
