"""Gives the tasks on a Spark cluster the connection parameters of the driver.

The environment (``PGPASSWORD``, ``PGHOST``, ...), the service file, the passfile and the TLS files exist only where the
driver runs. So the driver puts the parameters of its own connection into the specs of its tasks, which Spark neither
shows nor logs. The parameters are never sent as a Spark setting, an environment variable or an argument.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psycopg.conninfo import make_conninfo

from pgcdc_assets.source.connect.connection import SourceConnection, parsed

_FILES: Final = {
    "sslcert": "postgresql.crt", "sslkey": "postgresql.key", "sslrootcert": "root.crt", "sslcrl": "root.crl",
}  # fmt: skip
"""libpq options that name a file, and the default file of each in ``~/.postgresql``."""
_NOT_A_FILE: Final = ("system", "pkcs11:")
"""Prefixes of option values that do not name a file."""
_OURS: Final = {"options", "application_name", "client_encoding", "replication", "service", "servicefile", "passfile"}
"""Options that are not sent: each of our connections sets them itself, or libpq has already resolved them (service,
passfile)."""


@dataclass(frozen=True)
class SourceRoute:
    """A conninfo, and the contents of the files that it needs."""

    conninfo: str = field(repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The contents of the files, by the name of the libpq option."""

    @classmethod
    def of(cls, conn: SourceConnection, conninfo: str) -> SourceRoute:
        """Returns the route to the server that ``conn`` is connected to. ``conninfo`` may list several servers."""
        info = {one.keyword.decode(): (one.val, one.compiled) for one in conn.pgconn.info}
        found: dict[str, Any] = {
            name: value.decode() for name, (value, default) in info.items()
            if value and value != default and name not in _OURS
        }  # fmt: skip
        found |= {"host": conn.info.host, "port": conn.info.port, "password": conn.info.password or None}
        if "hostaddr" in found:
            found["hostaddr"] = conn.info.hostaddr
        found["options"] = parsed(conninfo).get("options")
        files = {} if conn.info.host.startswith("/") else _contents(found)
        return cls(make_conninfo("", **{name: value for name, value in found.items() if name not in files}), files)

    @contextmanager
    def here(self) -> Iterator[str]:
        """Yields a conninfo for the process that calls this. During the block, the files that it names exist in a
        temporary folder, readable only by their owner."""
        if not self.files:
            yield self.conninfo
            return
        with tempfile.TemporaryDirectory(prefix="pgcdc-route-") as folder:
            paths = {name: _written(Path(folder) / name, content) for name, content in self.files.items()}
            yield make_conninfo(self.conninfo, **paths)


def _contents(found: Mapping[str, Any]) -> dict[str, bytes]:
    if found.get("sslmode") == "disable":
        return {}
    files: dict[str, bytes] = {}
    for name, usual in _FILES.items():
        given = str(found.get(name, ""))
        path = Path(given) if given else Path.home() / ".postgresql" / usual
        if not given.startswith(_NOT_A_FILE) and path.is_file():
            files[name] = path.read_bytes()
    return files


def _written(path: Path, content: bytes) -> str:
    # libpq refuses a key file that other users could read.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return str(path)
