"""Fetches artifacts of Maven Central once, into a private cache, with the resolver that pyspark ships (Ivy).

Ivy runs with its own settings and cache, because a ``~/.m2`` that holds a pom without its jar breaks the usual chain.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pyspark

from pgcdc_assets.errors import MachineError

OLDEST_JAVA = 17
"""Spark 4 runs on Java 17 and later."""
REPOSITORY_VARIABLE = "DEFAULT_ARTIFACT_REPOSITORY"
"""Spark's own variable for a mirror of Maven Central."""
RESOLVE_SECONDS = 600

_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True)
class Artifact:
    """Maven's coordinates. ``title`` and ``size`` are for the message if the artifact cannot be fetched."""

    organisation: str
    name: str
    revision: str
    title: str
    size: str


def java_command() -> str:
    """The ``java`` that Spark will start, checked to be new enough."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    install = f"install Java {OLDEST_JAVA} (a JRE is enough) and set JAVA_HOME to it"
    if java is None or not os.access(java, os.X_OK):
        where = f"in {home}/bin (JAVA_HOME is {home})" if home else "on the PATH"
        raise MachineError(f"no `java` {where}", thing="Java", do=install)
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = _JAVA_VERSION.search(told)
    if found is None:
        raise MachineError(f"`{java} -version` tells no version", thing="Java", do=install)
    if int(found[1]) < OLDEST_JAVA:
        raise MachineError(f"`{java}` is Java {found[1]}, too old for Spark {pyspark.__version__}",
                           thing="Java", do=install)  # fmt: skip
    return java


def cached(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache. If the folder is missing, ``fill`` makes it at the path that it is given.

    One process fills the folder, and other processes wait for it. A half-filled folder is never visible. Raises
    MachineError for a cache that cannot be written, and all errors of ``fill``.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "pgcdc_assets" / name
    if not folder.is_dir():
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _fill(folder, fill)
    return folder


def retrieve(artifact: Artifact, folder: Path, *, without: Collection[str] = ()) -> None:
    """Put the jars of the artifact and of its dependencies into ``folder``, except the modules of ``without``.

    Raises MachineError for a missing or old Java, and if the network does not deliver the artifact.
    """
    own = Path(pyspark.__file__).parent / "jars"
    ivy = next(own.glob("ivy-*.jar"))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "settings.xml").write_text(_settings(work / "ivy"))
        (work / "ivy.xml").write_text(_wanted(artifact, without))
        command = [
            java_command(), "-cp", str(ivy), "org.apache.ivy.Main", "-warn", "-settings", str(work / "settings.xml"),
            "-ivy", str(work / "ivy.xml"), "-confs", "default", "-retrieve", f"{folder}/[artifact]-[revision].[ext]",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise _unreachable(artifact, f"did not answer within {RESOLVE_SECONDS} s") from None
    if done.returncode != 0 or not list(folder.glob(f"{artifact.name}-*.jar")):
        raise _unreachable(artifact, _first_warning(done.stdout + done.stderr))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fetch into a folder beside the final folder, then rename it."""
    try:
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    try:
        fill(draft / "content")
        (draft / "content").rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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


def _wanted(artifact: Artifact, without: Collection[str]) -> str:
    excludes = "".join(f"<exclude module={quoteattr(module)}/>" for module in sorted(without))
    return (
        '<ivy-module version="2.0"><info organisation="pgcdc_assets" module="fetched"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        f"<dependency org={quoteattr(artifact.organisation)} name={quoteattr(artifact.name)}"
        f' rev={quoteattr(artifact.revision)} conf="default->default"/>'
        f"{excludes}</dependencies></ivy-module>"
    )


def _first_warning(told: str) -> str:
    """The first line of Ivy's warnings that has content."""
    lines = (line.strip() for line in told.splitlines())
    return next((line for line in lines if line and not line.startswith("::")), "the resolver told nothing")


def _unreachable(artifact: Artifact, reason: str) -> MachineError:
    return MachineError(
        f"could not be fetched: {reason}",
        thing=artifact.title,
        do=f"connect to the network once ({artifact.size} from Maven Central), "
        f"or name a mirror in {REPOSITORY_VARIABLE}",
    )


def _unwritable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot be written ({error.strerror})", thing=f"cache {folder}", do="set XDG_CACHE_HOME to a folder of yours"
    )
