"""One attempt at a task, in a Spark worker. Driver and worker unpickle each other's data, so both must have the same
versions of pgcdc_assets, Python and pyarrow.

Every job imports this module in the worker, so it must not import Spark or the driver's modules.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import sys
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.failures import of_the_machine

PACKAGE: Final = "pgcdc_assets"
Versions = dict[str, str]


class Kind(StrEnum):
    """What a task's result contains."""

    DONE = "done"
    """The value that the function returned."""
    FAILED = "failed"
    """The worker's host name, and an error that the driver raises unchanged."""
    OTHER = "other"
    """The worker's host name, and how the worker differs from the driver. The function was not called."""


def attempted(packed: bytes, driver: Versions) -> tuple[str, bytes]:
    """Runs the task. Returns the kind and the pickled content of the result. Errors are returned and not raised,
    because Spark would turn raised errors into text."""
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


@cache
def versions() -> Versions:
    """Returns the versions in this process: pgcdc_assets with a digest of its code, Python's minor version, and
    pyarrow's major version."""
    return {
        PACKAGE: f"{_version(PACKAGE)} ({_code()})",
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyarrow": _version("pyarrow").partition(".")[0],
    }


def difference(there: Versions, here: Versions) -> str | None:
    """Returns a text that says how a worker differs from the driver; None if it does not differ."""
    for name, wanted in here.items():
        if (found := there.get(name, "none")) != wanted:
            return f"has {name} {found}, but the driver has {wanted}"
    return None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _code() -> str:
    """Returns a short digest of the package's source, because two different checkouts may have the same version."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:7]
