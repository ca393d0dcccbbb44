"""Delta's jars that pyspark lacks, resolved once and kept in a private cache.

delta-spark's wheel contains no jar. ``--packages`` would ask Maven Central at every start and fetch 33 jars, 25 of
which pyspark already has. So the resolver runs once, and excludes everything that pyspark has.

The jars run in a JVM that holds the source's password. So each jar is compared with its SHA-256 in ``jars.sha256``:
when it is fetched, and at each start.
"""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import pyspark

from pgcdc_assets.errors import MachineError
from pgcdc_assets.spark.maven import Artifact, cached, retrieve

SCALA = "2.13"
_VERSION = re.compile(r"-\d[^-]*(-[^-]*)?\.jar$")
_HASHES = Path(__file__).with_name("jars.sha256")
"""In the format of ``sha256sum``."""


def delta_jars() -> list[Path]:
    """The jars to add to pyspark's own, in name order; fetched on first use.

    Raises MachineError for a missing or old Java, a cache that cannot be written, a missing network, or a jar that is
    not the one that this version was tested with.
    """
    delta = version("delta-spark")
    folder = cached(f"jars/delta-{delta}_{pyspark.__version__}_{SCALA}", _fetch)
    _check(folder)
    return sorted(folder.glob("*.jar"))


def pinned() -> dict[str, str]:
    """The SHA-256 of each jar, in hex, by file name."""
    lines = (line.split() for line in _HASHES.read_text().splitlines())
    return {name: digest for digest, name in lines}


def _check(folder: Path) -> None:
    """Raise MachineError unless the folder holds exactly the pinned jars."""
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in folder.glob("*.jar")}
    expected = pinned()
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        raise MachineError(
            f"does not match its SHA-256 in {_HASHES.name}", thing=f"jar {folder / wrong[0]}",
            do=f"do not run it; find out who changed it, delete {folder}, and start again to fetch the jars",
        )  # fmt: skip


def _fetch(folder: Path) -> None:
    """Fetch Delta's artifact without the modules that pyspark already has, in any version."""
    line = ".".join(pyspark.__version__.split(".")[:2])
    delta = version("delta-spark")
    own = Path(pyspark.__file__).parent / "jars"
    artifact = Artifact(
        "io.delta", f"delta-spark_{line}_{SCALA}", delta, title=f"Delta Lake {delta} for Spark {line}", size="13 MB"
    )
    retrieve(artifact, folder, without={_VERSION.sub("", jar.name) for jar in own.glob("*.jar")})
    _check(folder)
