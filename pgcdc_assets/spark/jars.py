"""Delta's jars that pyspark lacks, resolved once and kept in a private cache.

delta-spark's wheel contains no jar. ``--packages`` would ask Maven Central at every start and pull 33
jars, 25 of which are in pyspark already. So the resolver is run once, and excludes everything that pyspark has.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pyspark

from pgcdc_assets.spark.maven import Artifact, cached, retrieve

SCALA = "2.13"
_VERSION = re.compile(r"-\d[^-]*(-[^-]*)?\.jar$")


def delta_jars() -> list[Path]:
    """The jars to add to pyspark's own, in name order; fetched on first use.

    Raises MachineError for a missing or old Java, a cache that cannot be written, or a missing network.
    """
    delta = version("delta-spark")
    folder = cached(f"jars/delta-{delta}_{pyspark.__version__}_{SCALA}", _fetch)
    return sorted(folder.glob("*.jar"))


def _fetch(folder: Path) -> None:
    """Fetch Delta's artifact without the modules that pyspark has, in whatever version."""
    line = ".".join(pyspark.__version__.split(".")[:2])
    delta = version("delta-spark")
    own = Path(pyspark.__file__).parent / "jars"
    artifact = Artifact(
        "io.delta", f"delta-spark_{line}_{SCALA}", delta, title=f"Delta Lake {delta} for Spark {line}", size="13 MB"
    )
    retrieve(artifact, folder, without={_VERSION.sub("", jar.name) for jar in own.glob("*.jar")})
