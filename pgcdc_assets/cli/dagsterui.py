"""``python -m pgcdc_assets.cli.dagsterui``: ``dagster dev``, with a webserver that refuses requests from other sites.

``dagster dev`` starts its webserver as a process, and has no setting for middleware. So this module makes ``dagster
dev`` start this module in place of the webserver, and wraps the web application in the new process. Both changes use
private API of Dagster. If a part of this API is missing, the start fails.

The UI has no login, and Dagster answers every request that reaches its port. So a page of any site in the user's
browser could start runs, for example by an image whose address is a GraphQL mutation. The page could also read answers,
if its host name resolves to this machine (DNS rebinding). Four rules prevent this:

* The ``Host`` header must be a name of this machine.
* An ``Origin`` header, which browsers send with every POST and WebSocket, must name the same host.
* ``Sec-Fetch-Site`` must not say that another site sends the request, except to open a page of the UI.
* GraphQL requests by GET are refused.

Programs other than browsers send neither ``Origin`` nor ``Sec-Fetch-Site``, so these two rules do not affect them.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

WEBSERVER: Final = "webserver"
"""The first argument of this module in the webserver's process."""
_MODULE: Final = "pgcdc_assets.cli.dagsterui"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_OWN: Final = (None, "same-origin", "none")
"""Allowed values of ``Sec-Fetch-Site``. The header is missing or ``same-origin`` in requests of the UI itself, and
``none`` if the user typed the address."""


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == [WEBSERVER]:
        _webserver(arguments[1:])
    else:
        _dev(arguments)


def _dev(arguments: Sequence[str]) -> None:
    dev: Any = import_module("dagster._cli.dev")
    start = dev.open_ipc_subprocess

    def started(command: Sequence[str], **options: Any) -> Any:
        return start(guarded(command), **options)

    dev.open_ipc_subprocess = started
    sys.argv = ["dagster dev", *arguments]
    dev.dev_command(auto_envvar_prefix="DAGSTER_CLI_DEV")


def guarded(command: Sequence[str]) -> list[str]:
    """The command with which ``dagster dev`` starts a process. If it is Dagster's webserver, this module replaces
    it."""
    python, *rest = command
    if rest[:2] == ["-m", "dagster_webserver"]:
        return [python, "-m", _MODULE, WEBSERVER, *rest[2:]]
    return list(command)


def _webserver(arguments: Sequence[str]) -> None:
    cli: Any = import_module("dagster_webserver.cli")
    host = arguments[arguments.index("--host") + 1]
    create = cli.create_app_from_workspace_process_context

    def created(*args: Any, **options: Any) -> App:
        return SameOrigin(create(*args, **options), host)

    cli.create_app_from_workspace_process_context = created
    sys.argv = ["dagster-webserver", *arguments]
    cli.main()


class SameOrigin:
    """An ASGI application that passes allowed requests to Dagster's application. ``host``: the address on which the
    server listens."""

    def __init__(self, app: App, host: str) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = None
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            reason = refusal(scope.get("method", "GET"), scope["path"], headers, self._host)
        if reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            text = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": text})
            await send({"type": "http.response.body", "body": f"Refused: {reason}\n".encode()})


def refusal(method: str, path: str, headers: Mapping[str, str], listening: str) -> str | None:
    """Why the request is refused; None if it is allowed. The names in ``headers`` are in lower case."""
    host = headers.get("host", "")
    if not _is_ours(_name(host), listening):
        return f"the Host header, {host!r}, is not a name of this server"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return f"the request comes from a page of {origin}"
    opens_page = headers.get("sec-fetch-mode") == "navigate" and method == "GET"
    if headers.get("sec-fetch-site") not in _OWN and not opens_page:
        return "the request comes from a page of another site"
    upgrades = headers.get("upgrade", "").lower() == "websocket"
    if path.rstrip("/") == "/graphql" and method in ("GET", "HEAD") and not upgrades:
        return "GraphQL requires POST"
    return None


def _name(host: str) -> str:
    """The host without its port: ``[::1]:3000`` is ``::1``."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_ours(name: str, listening: str) -> bool:
    """Whether ``name`` is a name of this server. If the server listens on loopback, its names are the names of
    loopback. Otherwise its names are also this machine's names and all IP addresses. Addresses are safe, because DNS
    rebinding needs a host name."""
    if name in LOOPBACK or name == listening.lower():
        return True
    if listening in LOOPBACK:
        return False
    return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
