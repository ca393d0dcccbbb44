"""A proxy in front of an object store that injects faults: the response is lost after the store has executed the
request, the request does not reach the store, or the store is busy, returns an error or responds slowly."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Fault(StrEnum):
    LOST = "answer lost"
    """The store has executed the request, but its response is lost."""
    CUT = "request cut"
    """The request is lost, so the store has not received it."""
    BUSY = "503"
    BROKEN = "500 after the store has acted"
    CONFLICT = "409"
    SLOW = "slow"


class Faults:
    """Decides which fault each request gets. ``seen`` counts the faults by kind, and the requests by method. The method
    of a listing is LIST here."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.share = 0.0
        self.next: list[Fault] = []
        self.served: int | None = None
        """How many more requests the store executes before it refuses all requests. None: no limit."""
        self.seen: Counter[str] = Counter()
        self.asked: list[str] = []
        """The method and path of each request. The method of a listing is LIST here."""
        self._lock = threading.Lock()

    def take(self, method: str, path: str = "") -> Fault | None:
        with self._lock:
            self.seen[method] += 1
            self.asked.append(f"{method} {path}")
            fault = None
            if self.served is not None:
                self.served -= 1
                fault = Fault.BUSY if self.served < 0 else None
            if fault is None and self.next and method == "PUT":
                fault = self.next.pop(0)
            elif fault is None and self.chance.random() < self.share:
                fault = self.chance.choice([one for one in Fault if one is not Fault.CONFLICT or method == "PUT"])
            if fault is not None:
                self.seen[fault] += 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: ClassVar[Faults]
    behind: ClassVar[int]

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faults.take("LIST" if "list-type" in self.path else self.command, self.path)
        if fault is Fault.CUT:
            return self._hang_up()
        if fault is Fault.BUSY:
            return self._answer(503, b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>")
        if fault is Fault.CONFLICT:
            return self._answer(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
        if fault is Fault.SLOW:
            time.sleep(0.2)
        status, headers, content = self._ask(body)
        if fault is Fault.LOST:
            return self._hang_up()
        if fault is Fault.BROKEN:
            return self._answer(500, b"<Error><Code>InternalError</Code></Error>")
        return self._answer(status, content, headers)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815 - the names are http.server's

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        store = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)
        try:
            store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                store.putheader(name, value)
            store.endheaders(body)
            found = store.getresponse()
            return found.status, found.getheaders(), found.read()
        finally:
            store.close()

    def _answer(self, status: int, content: bytes, headers: list[tuple[str, str]] | None = None) -> None:
        self.send_response_only(status)
        given = {name.lower() for name, _ in headers or ()}
        for name, value in headers or ():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers or ()}.get("content-length")
        whole = length if self.command == "HEAD" and "content-length" in given and length else str(len(content))
        self.send_header("Content-Length", whole)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the tests check the requests themselves."""


@contextmanager
def spoiling(behind: int, faults: Faults) -> Iterator[int]:
    """Runs the proxy in front of the server on port ``behind``. Yields the proxy's port."""
    handler = type("Handler", (_Handler,), {"faults": faults, "behind": behind})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
