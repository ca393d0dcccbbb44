"""Delta's jars: what pyspark lacks, resolved once, kept in a private cache.

delta-spark's wheel carries no jar. ``--packages`` would ask Maven Central at every start and pull 33
jars, 25 of which stand in pyspark already. So the resolver that pyspark ships (Ivy) is run once, with
settings and a cache of its own (a ``~/.m2`` that holds a pom without its jar breaks the usual chain),
and with everything excluded that pyspark has.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pyspark

from pgcdc_assets.errors import MachineError

SCALA = "2.13"
OLDEST_JAVA = 17
"""Spark 4 runs on Java 17 and later."""
REPOSITORY_VARIABLE = "DEFAULT_ARTIFACT_REPOSITORY"
"""Spark's own variable for a mirror of Maven Central."""
RESOLVE_SECONDS = 600

_VERSION = re.compile(r"-\d[^-]*(-[^-]*)?\.jar$")
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def delta_jars() -> list[Path]:
    """The jars to add to pyspark's own, in name order; fetched on first use.

    Raises MachineError for a missing or old Java, a cache that cannot be written, no network.
    """
    folder = _cache() / "jars" / _release()
    if not folder.is_dir():
        java = java_command()
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _fetch(java, folder)
    return sorted(folder.glob("*.jar"))


def java_command() -> str:
    """The ``java`` that Spark will start, known to be new enough."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    install = f"install Java {OLDEST_JAVA} (a JRE is enough) and set JAVA_HOME to it"
    if java is None or not os.access(java, os.X_OK):
        where = "under JAVA_HOME" if home else "on the PATH"
        raise MachineError(f"no `java` {where}", thing="Java", do=install)
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = _JAVA_VERSION.search(told)
    if found is None:
        raise MachineError(f"`{java} -version` tells no version", thing="Java", do=install)
    if int(found[1]) < OLDEST_JAVA:
        raise MachineError(f"`{java}` is Java {found[1]}, too old for Spark {pyspark.__version__}",
                           thing="Java", do=install)  # fmt: skip
    return java


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pgcdc_assets"


def _spark_line() -> str:
    return ".".join(pyspark.__version__.split(".")[:2])


def _release() -> str:
    return f"delta-{version('delta-spark')}_{pyspark.__version__}_{SCALA}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process fetches, the others wait for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(java: str, folder: Path) -> None:
    """Resolve into a folder beside the right one, then rename: a half-filled one is never seen."""
    try:
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    try:
        _resolve(java, draft)
        (draft / "jars").rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _resolve(java: str, work: Path) -> None:
    own = Path(pyspark.__file__).parent / "jars"
    ivy = next(own.glob("ivy-*.jar"))
    (work / "settings.xml").write_text(_settings(work / "ivy"))
    (work / "ivy.xml").write_text(_wanted(own))
    command = [
        java, "-cp", str(ivy), "org.apache.ivy.Main", "-warn", "-settings", str(work / "settings.xml"),
        "-ivy", str(work / "ivy.xml"), "-confs", "default", "-retrieve", f"{work}/jars/[artifact]-[revision].[ext]",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise _unreachable(f"did not answer within {RESOLVE_SECONDS} s") from None
    if done.returncode != 0 or not list((work / "jars").glob("delta-spark*.jar")):
        raise _unreachable(_first_warning(done.stdout + done.stderr))


def _settings(cache: Path) -> str:
    # Without a root of its own, Ivy's Maven resolver reads Maven Central.
    mirror = os.environ.get(REPOSITORY_VARIABLE)
    root = f" root={quoteattr(mirror)}" if mirror else ""
    return (
        '<ivysettings><settings defaultResolver="central"/>'
        f"<caches defaultCacheDir={quoteattr(str(cache))}/>"
        f'<resolvers><ibiblio name="central" m2compatible="true"{root}/></resolvers>'
        "</ivysettings>"
    )


def _wanted(own: Path) -> str:
    """Delta's artifact without any module that stands in pyspark, in whatever version."""
    present = sorted({_VERSION.sub("", jar.name) for jar in own.glob("*.jar")})
    excludes = "".join(f"<exclude module={quoteattr(module)}/>" for module in present)
    artifact = f"delta-spark_{_spark_line()}_{SCALA}"
    return (
        '<ivy-module version="2.0"><info organisation="pgcdc_assets" module="lake"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        f'<dependency org="io.delta" name="{artifact}" rev="{version("delta-spark")}" conf="default->default"/>'
        f"{excludes}</dependencies></ivy-module>"
    )


def _first_warning(told: str) -> str:
    """The first line of substance that Ivy tells under its heading."""
    lines = (line.strip() for line in told.splitlines())
    return next((line for line in lines if line and not line.startswith("::")), "the resolver told nothing")


def _unreachable(reason: str) -> MachineError:
    return MachineError(
        f"could not be fetched: {reason}",
        thing=f"Delta Lake {version('delta-spark')} for Spark {_spark_line()}",
        do=f"connect to the network once (13 MB from Maven Central), or name a mirror in {REPOSITORY_VARIABLE}",
    )


def _unwritable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot be written ({error.strerror})", thing=f"cache {folder}", do="set XDG_CACHE_HOME to a folder of yours"
    )
