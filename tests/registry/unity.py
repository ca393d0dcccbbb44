"""A server with the part of Unity Catalog's REST API that registers tables, for tests.

The API is described in https://github.com/unitycatalog/unitycatalog/blob/main/api/all.yaml. This server answers like
the open-source server. For example, it changes the type texts of columns to lower case. If the environment variable
PGCDC_TEST_UNITY is the URL of a real server that has a catalog ``shop``, the tests use the real server instead, and
delete all schemas of this catalog."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

API = "/api/2.1/unity-catalog"
NAME = re.compile(r"[a-zA-Z0-9_@-]+")


@dataclass
class Served:
    """A server, its tables, and the requests that it got."""

    url: str
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    schemas: set[str] = field(default_factory=set)
    real: bool = False
    refuses: int | None = None
    """The HTTP status that every request gets, if it is set."""

    def table(self, name: str) -> dict[str, Any] | None:
        """The entry ``catalog.schema.table``, as any client gets it."""
        try:
            with urlopen(f"{self.url}{API}/tables/{name}") as answer:
                return dict(json.load(answer))
        except OSError as error:
            if getattr(error, "code", None) == 404:
                return None
            raise

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + API + path, data, {"Content-Type": "application/json"}, method=method)
        with urlopen(request) as answer:
            answer.read()

    def clear(self) -> None:
        """Deletes what an earlier test left on a real server."""
        with urlopen(f"{self.url}{API}/schemas?catalog_name=shop") as answer:
            for schema in json.load(answer).get("schemas", []):
                self.call("DELETE", f"/schemas/{schema['full_name']}?force=true")


@contextmanager
def unity_server() -> Iterator[Served]:
    if real := os.environ.get("PGCDC_TEST_UNITY"):
        served = Served(real, real=True)
        served.clear()
        yield served
        return

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _wrong(self, status: int, code: str, message: str) -> None:
            self._answer(status, {"error_code": code, "message": message, "details": []})

        def _serve(self) -> None:
            path = unquote(self.path.removeprefix(API).partition("?")[0])
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            served.tokens.add(self.headers.get("Authorization"))
            if served.refuses is not None:
                served.requests.append(f"{self.command} {path}")
                return self._wrong(served.refuses, "PERMISSION_DENIED", "not yours")
            if self.command != "GET":
                served.requests.append(f"{self.command} {path}")
            what, _, name = path.removeprefix("/").partition("/")
            if what == "tables" and self.command == "POST":
                return self._create(body)
            if what == "schemas" and self.command == "POST":
                if body["catalog_name"] != "shop":
                    return self._wrong(404, "CATALOG_NOT_FOUND", "Catalog not found")
                served.schemas.add(f"shop.{body['name']}")
                return self._answer(200, body)
            if what == "temporary-table-credentials":
                # A local folder needs no credentials.
                return self._answer(200, {"expiration_time": None})
            if what == "tables" and name in served.tables:
                if self.command == "DELETE":
                    del served.tables[name]
                    return self._answer(200, "200 OK")
                return self._answer(200, served.tables[name])
            return self._wrong(404, "TABLE_NOT_FOUND", f"Table not found: {name}")

        def _create(self, body: dict[str, Any]) -> None:
            full = f"{body['catalog_name']}.{body['schema_name']}.{body['name']}"
            if not NAME.fullmatch(body["name"]):
                return self._wrong(400, "INVALID_ARGUMENT", "Name cannot contain a period, space, forward-slash")
            if full.rpartition(".")[0] not in served.schemas:
                return self._wrong(404, "SCHEMA_NOT_FOUND", "Schema not found")
            if full in served.tables:
                return self._wrong(400, "TABLE_ALREADY_EXISTS", "Table already exists")
            for column in body["columns"]:
                json.loads(column["type_json"])
                column["type_text"] = column["type_text"].lower()
            more = {"created_at": 0, "created_by": None, "updated_at": 0, "updated_by": None, "owner": None}
            served.tables[full] = {"comment": None, **body, **more, "table_id": str(len(served.requests))}
            return self._answer(200, served.tables[full])

        do_GET = do_POST = do_DELETE = _serve  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
