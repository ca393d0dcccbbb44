"""Which HTTP requests Dagster's webserver answers and which it refuses under ``pgcdc up``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from typing import Any

import pytest

from pgcdc_assets.cli.dagsterui import SameOrigin, guarded, refusal

OWN_PAGE = {"origin": "http://localhost:3000", "sec-fetch-site": "same-origin"}
OURS = {"host": "localhost:3000"}
PAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}

ANSWERED = {
    "a page that the user opens": ("GET", "/", OURS | {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}),
    "a link from elsewhere to a page": ("GET", "/runs", OURS | PAGE),
    "the UI's own query": ("POST", "/graphql", OURS | OWN_PAGE),
    "the UI's own WebSocket": ("GET", "/graphql", OURS | {"upgrade": "websocket", "origin": "http://localhost:3000"}),
    "a program": ("POST", "/graphql", {"host": "127.0.0.1:3000"}),
    "a program by IPv6": ("POST", "/graphql", {"host": "[::1]:3000"}),
}
REFUSED = {
    "an image whose address is a mutation": ("GET", "/graphql", OURS | IMAGE),
    "a link whose address is a mutation": ("GET", "/graphql", OURS | PAGE),
    "a mutation by GET of an old browser": ("GET", "/graphql/", OURS),
    "a mutation by HEAD": ("HEAD", "/graphql", OURS),
    "an image of another site": ("GET", "/runs", OURS | IMAGE),
    "an image of another port": ("GET", "/runs", OURS | {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}),
    "a form of another site without an origin": ("POST", "/report_asset_materialization/a", OURS | PAGE),
    "a form of another site": ("POST", "/graphql", OURS | {"origin": "https://evil.example"} | PAGE),
    "a POST of another port": ("POST", "/graphql", OURS | {"origin": "http://localhost:8000"}),
    "a POST of a page without an origin": ("POST", "/report_asset_materialization/a", OURS | {"origin": "null"}),
    "another site's WebSocket": ("GET", "/graphql", OURS | {"upgrade": "websocket", "origin": "https://evil.example"}),
    "a host name of another's": ("GET", "/", {"host": "evil.example:3000"}),
    "no host name": ("GET", "/", {}),
    "an address of another machine": ("GET", "/", {"host": "10.1.2.3:3000"}),
    "a host that cannot be parsed": ("GET", "/", {"host": "[::1"}),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_a_request_of_the_user_or_of_our_own_page_is_answered(case: str) -> None:
    assert refusal(*ANSWERED[case], "127.0.0.1") is None


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_another_site_could_forge_is_refused(case: str) -> None:
    assert refusal(*REFUSED[case], "127.0.0.1")


@pytest.mark.parametrize("host", ["10.1.2.3:3000", f"{socket.gethostname()}:3000", "localhost:3000"])
def test_a_server_for_other_machines_answers_to_its_own_names(host: str) -> None:
    assert refusal("GET", "/", {"host": host}, "0.0.0.0") is None
    assert refusal("GET", "/", {"host": "evil.example"}, "0.0.0.0")


def _sent(scope: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "answered"})

    async def receive() -> MutableMapping[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(SameOrigin(app, "127.0.0.1")(scope, receive, send))
    return sent


def test_refused_requests_do_not_reach_the_application() -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost:3000")]}
    assert _sent(scope) == [{"type": "answered"}]
    assert _sent({"type": "lifespan"}) == [{"type": "answered"}]
    refused = _sent(scope | {"headers": [(b"host", b"evil.example")]})
    assert refused[0]["status"] == 403
    assert b"evil.example" in refused[1]["body"]
    socket = {"type": "websocket", "path": "/graphql", "headers": [(b"host", b"evil.example")]}
    assert [message["type"] for message in _sent(socket)] == ["websocket.close"]


def test_up_replaces_only_the_command_that_starts_the_webserver() -> None:
    daemon = ["python", "-m", "dagster._daemon", "run"]
    assert guarded(daemon) == daemon
    webserver = guarded(["python", "-m", "dagster_webserver", "--host", "127.0.0.1"])
    assert webserver == ["python", "-m", "pgcdc_assets.cli.dagsterui", "webserver", "--host", "127.0.0.1"]
