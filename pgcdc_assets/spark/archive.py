"""Packs this environment as an archive that Spark unpacks for its executors: pgcdc_assets, and what its tasks import.

``lib/`` holds the installed files of these packages, unchanged. ``bin/python`` is a script that starts the node's own
Python of the same minor version with these packages. An archive of the virtual environment is not used, because it
would also contain Dagster and pyspark, which no task needs, and would depend on the path of the driver's Python.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import pgcdc_assets
from pgcdc_assets.errors import MachineError
from pgcdc_assets.spark.attempt import PACKAGE, versions

NAME: Final = "pgcdc_env.tar.gz"
OF_TASKS: Final = ("numpy", "pyarrow", "pyroaring", "obstore", "psycopg", "psycopg-binary", "pyyaml", "deltalake")
"""The packages that tasks import. A test imports all modules that tasks use, from an archive alone."""
PYTHON_VARIABLE: Final = "PGCDC_ASSETS_PYTHON"
"""The environment variable with the path of a node's Python. It is needed if this Python is not on the PATH under its
usual name, such as ``python3.12``."""

_NOT_NEEDED: Final = re.compile(r"(^|/)(__pycache__|tests)/|^pyarrow/(include|src)/|\.(pth|pyi|pxd|pyx)$|^__editable__")
_REQUIRED: Final = re.compile(r"[A-Za-z0-9._-]+")
_COMPRESSION: Final = 3
"""The gzip level. Level 6 takes three times as long and saves a twentieth of the size."""
_SCRIPT: Final = """\
#!/bin/sh
# The node's own {python}, with the packages of this archive before all others.
here=$(cd "$(dirname "$0")/.." && pwd) || exit 1
python=${{{variable}:-{python}}}
command -v "$python" >/dev/null 2>&1 || {{ echo "pgcdc: no {python} on the PATH of $(hostname)" >&2; exit 127; }}
PYTHONPATH="$here/lib${{PYTHONPATH:+:$PYTHONPATH}}" exec "$python" -s "$@"
"""


@dataclass(frozen=True)
class Packed:
    path: Path
    bytes: int
    packages: dict[str, str]


def pack(to: Path) -> Packed:
    """Writes the archive. Raises MachineError if a package is missing or writing fails, and then writes nothing."""
    found = _needed()
    draft = ""
    try:
        handle, draft = tempfile.mkstemp(prefix=".pack-", dir=to.parent)
        with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=_COMPRESSION) as tar:
            for name, path in _files(found):
                tar.add(path, f"lib/{name}", recursive=False)
            _add_script(tar)
        os.chmod(draft, 0o644)
        os.replace(draft, to)
    except OSError as error:
        Path(draft).unlink(missing_ok=True) if draft else None
        raise MachineError(
            f"cannot be written: {error.strerror}", thing=str(to), do="choose another file with -o"
        ) from None
    return Packed(to, to.stat().st_size, {one.metadata["Name"]: one.version for one in found})


def _needed() -> list[Distribution]:
    """Returns pgcdc_assets, the packages that its tasks import, and the packages that these require."""
    found: dict[str, Distribution] = {PACKAGE: _installed(PACKAGE)}
    todo = list(OF_TASKS)
    while todo:
        name = todo.pop()
        key = _normal(name)
        if key in found:
            continue
        found[key] = _installed(name)
        # If a requirement has a marker (for a Python version or a system) and is not installed here, the marker does
        # not apply here, so the requirement is not needed.
        for line in found[key].requires or ():
            required = _REQUIRED.match(line)
            if required and "extra ==" not in line and (";" not in line or _is_installed(required[0])):
                todo.append(required[0])
    return list(found.values())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise MachineError("is not installed here", thing=f"package {name}", do="install pgcdc_assets again") from None


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _files(found: list[Distribution]) -> Iterator[tuple[str, Path]]:
    """Yields each file's name in ``lib/`` and its path. Reads the folder of pgcdc_assets directly, because an editable
    installation does not list its modules."""
    root = Path(pgcdc_assets.__file__).parent
    for one in found:
        for file in one.files or ():
            name, path = file.as_posix(), Path(str(one.locate_file(file)))
            if not (name.startswith(("../", f"{PACKAGE}/")) or _NOT_NEEDED.search(name)) and path.is_file():
                yield name, path
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent).as_posix()
        if path.is_file() and not _NOT_NEEDED.search(name):
            yield name, path


def _add_script(tar: tarfile.TarFile) -> None:
    python = f"python{versions()['Python']}"
    content = _SCRIPT.format(python=python, variable=PYTHON_VARIABLE).encode()
    entry = tarfile.TarInfo("bin/python")
    entry.size, entry.mode, entry.mtime = len(content), 0o755, int(Path(sys.executable).stat().st_mtime)
    tar.addfile(entry, io.BytesIO(content))
