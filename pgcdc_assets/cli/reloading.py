"""Has Dagster reload the project's definitions when tables are added, removed or altered. The definitions are created
from the saved catalog."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.project import LOCATION, load_catalog

_MUTATION = """mutation ($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) { __typename }
}"""
_SECONDS = 60.0
"""Seconds for the code to be imported again, on a busy machine."""


class Reloading:
    """Has the definitions reloaded when the catalog shows other tables. ``reload`` returns whether Dagster has reloaded
    them. Create the object when Dagster first loads the definitions, because it notes the catalog's present tables."""

    def __init__(self, catalog_file: Path, reload: Callable[[], bool]) -> None:
        self._file = catalog_file
        self._reload = reload
        self._seen = self._written()
        self._loaded = self._tables()
        self._under_way: Thread | None = None

    def look(self) -> None:
        """Start a reload if the catalog shows other tables. Returns at once. If the reload fails, a later call tries
        again."""
        if self._under_way is not None and self._under_way.is_alive():
            return
        if self._written() != self._seen:
            # A daemon thread, so that the end of the process does not wait for it.
            self._under_way = Thread(target=self.load, daemon=True)
            self._under_way.start()

    def load(self) -> None:
        """Reload the definitions if the catalog shows other tables."""
        written, tables = self._written(), self._tables()
        if tables is None or tables == self._loaded or self._reload():
            self._seen, self._loaded = written, tables if tables is not None else self._loaded

    def _written(self) -> int:
        """When the catalog was last written; 0 if there is no catalog."""
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _tables(self) -> frozenset[tuple[Table, object]] | None:
        """The tables as the definitions show them, with columns and comments. None if the catalog cannot be read."""
        try:
            catalog = load_catalog(self._file)
        except (PgcdcError, ValueError, KeyError, TypeError):
            return None
        tables = catalog.tables if catalog is not None else ()
        return frozenset((table.without_volatile(), table.comments) for table in tables)


def by_webserver(url: str) -> bool:
    """Ask the webserver to reload, as its button does."""
    body = json.dumps({"query": _MUTATION, "variables": {"name": LOCATION}}).encode()
    request = urllib.request.Request(f"{url}/graphql", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return False
    told = (found.get("data") or {}).get("reloadRepositoryLocation") or {}
    return bool(told.get("__typename") == "WorkspaceLocationEntry")


def by_code_server(host: str, port: int) -> bool:
    """Ask the code server to reload. It informs webserver and daemon."""
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._grpc.client import DagsterGrpcClient

    try:
        DagsterGrpcClient(port=port, host=host).reload_code(timeout=int(_SECONDS))
    except DagsterUserCodeUnreachableError:
        return False
    return True
