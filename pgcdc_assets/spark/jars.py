"""Finds the Java that Spark starts, and the jars of Delta that pyspark lacks. The jars are downloaded once and kept in
a private cache.

delta-spark's wheel contains no jar. Spark's option ``--packages`` would query Maven Central at every start and fetch 33
jars, 25 of which pyspark already has. So this module runs the resolver once, and excludes these 25 jars. It is
pyspark's resolver (Ivy), but with separate settings and a separate cache, because Ivy's usual settings fail if
``~/.m2`` contains a pom without its jar.

The jars run in a JVM that holds the source's password, so their SHA-256 is checked (``jars.sha256``) at each start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pyspark

from pgcdc_assets.errors import MachineError

SCALA = "2.13"
_VERSION = re.compile(r"-\d[^-]*(-[^-]*)?\.jar$")
_HASHES = Path(__file__).with_name("jars.sha256")
"""The hashes of the jars, in the format of ``sha256sum``."""
OLDEST_JAVA = 17
"""Spark 4 needs Java 17 or newer."""
REPOSITORY_VARIABLE = "DEFAULT_ARTIFACT_REPOSITORY"
"""Spark's own variable for a mirror of Maven Central."""
RESOLVE_SECONDS = 600
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def delta_jars() -> list[Path]:
    """Returns the jars that the session needs in addition to pyspark's own, in name order. Downloads them on first use.
    Raises MachineError for a missing or old Java, an unwritable cache, a failed download, or a jar with a wrong
    hash."""
    delta = version("delta-spark")
    folder = cached(f"jars/delta-{delta}_{pyspark.__version__}_{SCALA}", _fetch)
    _check(folder)
    return sorted(folder.glob("*.jar"))


def pinned() -> dict[str, str]:
    """Returns the SHA-256 of each jar, in hex, by file name."""
    lines = (line.split() for line in _HASHES.read_text().splitlines())
    return {name: digest for digest, name in lines}


def _check(folder: Path) -> None:
    """Raises MachineError unless the folder holds exactly the pinned jars."""
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in folder.glob("*.jar")}
    expected = pinned()
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        raise MachineError(
            f"does not match its SHA-256 in {_HASHES.name}", thing=f"jar {folder / wrong[0]}",
            do=f"do not run it; find out who changed it, delete {folder}, and start again to fetch the jars",
        )  # fmt: skip


def _fetch(folder: Path) -> None:
    """Downloads Delta's jars, except modules that pyspark already has in some version."""
    line = ".".join(pyspark.__version__.split(".")[:2])
    delta = version("delta-spark")
    own = Path(pyspark.__file__).parent / "jars"
    artifact = Artifact(
        "io.delta", f"delta-spark_{line}_{SCALA}", delta, title=f"Delta Lake {delta} for Spark {line}", size="13 MB"
    )
    retrieve(artifact, folder, without={_VERSION.sub("", jar.name) for jar in own.glob("*.jar")})
    _check(folder)


def java_command() -> str:
    """Returns the ``java`` that Spark will start. Raises MachineError if it is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    install = f"install Java {OLDEST_JAVA} (a JRE is enough) and set JAVA_HOME to it"
    if java is None or not os.access(java, os.X_OK):
        where = f"in {home}/bin (JAVA_HOME is {home})" if home else "on the PATH"
        raise MachineError(f"no `java` {where}", thing="Java", do=install)
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = _JAVA_VERSION.search(told)
    if found is None:
        raise MachineError(f"`{java} -version` prints no version", thing="Java", do=install)
    if int(found[1]) < OLDEST_JAVA:
        raise MachineError(f"`{java}` is Java {found[1]}, too old for Spark {pyspark.__version__}",
                           thing="Java", do=install)  # fmt: skip
    return java


@dataclass(frozen=True)
class Artifact:
    """The Maven coordinates of an artifact. ``title`` and ``size`` are for the error if the download fails."""

    organisation: str
    name: str
    revision: str
    title: str
    size: str


def cached(name: str, fill: Callable[[Path], None]) -> Path:
    """Returns the folder ``name`` of the cache. If it is missing, calls ``fill`` with the path of a folder to create,
    and then renames that folder. So a half-filled folder is never visible. One process fills the folder, and other
    processes wait. Raises MachineError if the cache cannot be written, and passes on errors of ``fill``."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "pgcdc_assets" / name
    if not folder.is_dir():
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _fill(folder, fill)
    return folder


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
    """Fills a draft folder next to the final folder, then renames it."""
    try:
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    try:
        fill(draft / "content")
        (draft / "content").rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def retrieve(artifact: Artifact, folder: Path, *, without: Collection[str] = ()) -> None:
    """Puts the jars of the artifact and its dependencies into ``folder``, except the modules in ``without``. Raises
    MachineError for a missing or old Java, or if the artifact cannot be fetched."""
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
            raise _unreachable(artifact, f"the download took longer than {RESOLVE_SECONDS} s") from None
    if done.returncode != 0 or not list(folder.glob(f"{artifact.name}-*.jar")):
        raise _unreachable(artifact, _first_warning(done.stdout + done.stderr))


def _settings(cache: Path) -> str:
    # If `root` is not set, Ivy's Maven resolver reads from Maven Central.
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
    lines = (line.strip() for line in told.splitlines())
    return next((line for line in lines if line and not line.startswith("::")), "the resolver gave no reason")


def _unreachable(artifact: Artifact, reason: str) -> MachineError:
    return MachineError(
        f"could not be fetched: {reason}",
        thing=artifact.title,
        do=f"connect this machine to the network once ({artifact.size} from Maven Central), "
        f"or set {REPOSITORY_VARIABLE} to the URL of a mirror of Maven Central",
    )


def _unwritable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot be written ({error.strerror})", thing=f"cache {folder}", do="set XDG_CACHE_HOME to a writable folder"
    )
