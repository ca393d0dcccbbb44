"""What driver and workers must have alike: specs and results are pickled, and each side takes the other's apart."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

OURS: Final = "pgcdc_assets"
Versions = dict[str, str]


@cache
def versions() -> Versions:
    """Of this process: our package with its very code, Python's minor version, pyarrow's major one."""
    return {
        OURS: f"{_version(OURS)} ({_code()})",
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyarrow": _version("pyarrow").partition(".")[0],
    }


def difference(there: Versions, here: Versions) -> str | None:
    """What a worker has otherwise than the driver, in words; None if nothing."""
    for name, wanted in here.items():
        if (found := there.get(name, "none")) != wanted:
            return f"has {name} {found}, and the driver {wanted}"
    return None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _code() -> str:
    """A short digest of the package's source: two checkouts may bear the same version."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:7]
