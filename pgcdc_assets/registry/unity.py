"""Registers mirrors in Unity Catalog (the open-source server, or Databricks) as external Delta tables, by the REST API
of https://github.com/unitycatalog/unitycatalog/blob/main/api/all.yaml. The API cannot change a table's entry. So if a
mirror has changed, its entry is deleted and created again. This does not touch the mirror's files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, Any, Final
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryRefused, RegistryUnreachable
from pgcdc_assets.registry.named import OWNER, NamedTable, refuse_other

TOKEN: Final = "UNITY_CATALOG_TOKEN"
"""The environment variable with the bearer token. Not needed for a server without authentication."""
_SECONDS: Final = 10.0
"""Time limit of one request. A request for metadata normally takes milliseconds."""
_FOR_ALL: Final = frozenset({401, 429})
"""HTTP statuses that do not depend on the table, so that a request for any other table would get them too."""
_TYPE_NAMES: Final = {"integer": "INT"}
"""Unity Catalog's name of each Delta type for which this name is not Delta's name in upper case."""


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, because urllib would send the token to the other host."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class UnityCatalog:
    """One catalog of a server. ``url``: the server's URL, without the path of the API."""

    def __init__(self, url: str, catalog: str) -> None:
        self._api = f"{url.rstrip('/')}/api/2.1/unity-catalog"
        self._url, self._catalog = url, catalog
        self._opener = build_opener(_NoRedirects)

    def put(self, table: NamedTable) -> None:
        wanted, entry = self._entry(table), self._full(table.name)
        found = self._ask("GET", f"/tables/{quote(entry, safe='')}")
        if found is not None:
            refuse_other(found.get("properties"), table, entry)
            if _shown(found) == _shown(wanted):
                return
            self._ask("DELETE", f"/tables/{quote(entry, safe='')}")
        if self._ask("POST", "/tables", wanted) is not None:
            return
        # The API answers 404 if the schema or the catalog does not exist.
        schema = {"name": table.name.schema, "catalog_name": self._catalog}
        if self._ask("POST", "/schemas", schema) is None or self._ask("POST", "/tables", wanted) is None:
            raise RegistryUnreachable(
                f"has no catalog {self._catalog}", thing=f"Unity Catalog {self._url}", do="create it there"
            )

    def remove(self, name: TableName, owner: str) -> None:
        path = f"/tables/{quote(self._full(name), safe='')}"
        found = self._ask("GET", path)
        if found is not None and (found.get("properties") or {}).get(OWNER) == owner:
            self._ask("DELETE", path)

    def close(self) -> None:
        """Nothing to do: each request has its own connection."""

    def _full(self, name: TableName) -> str:
        return f"{self._catalog}.{name.schema}.{name.name}"

    def _entry(self, table: NamedTable) -> dict[str, Any]:
        columns = [
            {
                "name": column.name, "type_text": column.sql_type, "type_json": json.dumps(column.field),
                "type_name": _type_name(column.field["type"]), "position": place,
                "nullable": column.field.get("nullable", True),
                **({"comment": column.comment} if column.comment else {}),
            }
            for place, column in enumerate(table.columns)
        ]  # fmt: skip
        return {
            "name": table.name.name, "catalog_name": self._catalog, "schema_name": table.name.schema,
            "table_type": "EXTERNAL", "data_source_format": "DELTA", "storage_location": table.location.uri,
            "columns": columns, "properties": {OWNER: table.owner},
            **({"comment": table.comment} if table.comment else {}),
        }  # fmt: skip

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Sends a request, and returns the answer's JSON; None for status 404."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._api + path, data, headers, method=method)
        thing = f"Unity Catalog {self._url}"
        try:
            with self._opener.open(request, timeout=_SECONDS) as answer:
                # The answer to DELETE is not always JSON.
                return {} if method == "DELETE" else dict(json.loads(answer.read()))
        except HTTPError as error:
            if error.code == 404:
                return None
            what = f"answered a {method} request with {error.code} {_code(error)}".rstrip()
            kind = RegistryUnreachable if error.code in _FOR_ALL or error.code >= 500 else RegistryRefused
            raise kind(what, thing=thing) from None
        except (OSError, ValueError, TypeError, HTTPException) as error:
            raise RegistryUnreachable(f"does not answer: {type(error).__name__}", thing=thing) from None


def _code(error: HTTPError) -> str:
    """The code and message in the error's answer, if it has the form that the API defines; otherwise empty."""
    try:
        told = json.loads(error.read(4096))
        return f"({told['error_code']}: {str(told.get('message', ''))[:200]})"
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return ""


def _type_name(of: Any) -> str:
    word = of.partition("(")[0] if isinstance(of, str) else of["type"]
    return _TYPE_NAMES.get(word, word.upper())


def _shown(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """The parts of an entry that decide whether it must be written again. Types are compared in lower case, because the
    server returns them in lower case."""
    columns = [(column["name"], column["type_text"].lower(), column.get("comment")) for column in entry["columns"]]
    return entry["storage_location"], entry.get("comment"), columns
