"""Has Dagster load the project's definitions again when tables come or go, or look otherwise: they are made of the
saved catalog."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from threading import Thread

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.project import LOCATION
from pgcdc_assets.savedcatalog import load_catalog
from pgcdc_assets.settings import CATALOG_FILE

_MUTATION = """mutation ($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) { __typename }
}"""
_SECONDS = 60.0
"""For the code to be imported again on a busy machine."""


class Reloading:
    """``reload`` returns whether Dagster has loaded them again. What is loaded first is what the catalog has now."""

    def __init__(self, reload: Callable[[], bool]) -> None:
        self._reload = reload
        self._seen = _written()
        self._loaded = _tables()
        self._under_way: Thread | None = None

    def look(self) -> None:
        """Have them loaded again if the catalog shows other tables; a later look tries again what failed. Returns at
        once."""
        if self._under_way is not None and self._under_way.is_alive():
            return
        if _written() != self._seen:
            # Whoever asks us to end is not to wait for it.
            self._under_way = Thread(target=self.load, daemon=True)
            self._under_way.start()

    def load(self) -> None:
        """Have them loaded again if the catalog shows other tables."""
        written, tables = _written(), _tables()
        if tables is None or tables == self._loaded or self._reload():
            self._seen, self._loaded = written, tables if tables is not None else self._loaded


def by_webserver(url: str) -> bool:
    """Ask the webserver, as its button does."""
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
    """Ask the code server; webserver and daemon hear of it from there."""
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._grpc.client import DagsterGrpcClient

    try:
        DagsterGrpcClient(port=port, host=host).reload_code(timeout=int(_SECONDS))
    except DagsterUserCodeUnreachableError:
        return False
    return True


def _written() -> int:
    """When the catalog was last written; 0 before it is there."""
    try:
        return CATALOG_FILE.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _tables() -> frozenset[tuple[Table, object]] | None:
    """The tables as they are drawn, with their columns and comments; None for a catalog that cannot be read."""
    try:
        catalog = load_catalog(CATALOG_FILE)
    except (PgcdcError, ValueError, KeyError, TypeError):
        return None
    tables = catalog.tables if catalog is not None else ()
    return frozenset((table.without_volatile(), table.comments) for table in tables)
