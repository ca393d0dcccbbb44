"""What must be the same on driver and workers, because each side unpickles what the other side has pickled."""

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
    """The versions of this process: our package with a digest of its code, Python's minor and pyarrow's major
    version."""
    return {
        OURS: f"{_version(OURS)} ({_code()})",
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyarrow": _version("pyarrow").partition(".")[0],
    }


def difference(there: Versions, here: Versions) -> str | None:
    """How a worker differs from the driver, as text; None if it does not differ."""
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
    """A short digest of the package's source: two checkouts may have the same version."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:7]
