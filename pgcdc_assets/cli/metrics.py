"""The command ``metrics``: prints the metrics once, or serves them over HTTP. It only reads source and lake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from pgcdc_assets.cli.arguments import Parsed, examples
from pgcdc_assets.cli.console import say, show
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.errors import MachineError
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from pgcdc_assets.metrics.families import Metrics

HOST = "127.0.0.1"
PORT = 9187
ONCE_SECONDS = 30.0
"""The time limit for printing once. No scraper waits for this, so the limit is higher than for a scrape."""
CLIENT_SECONDS = 30.0
"""How long a client may take to send its request."""
_PATHS = "/metrics, /healthz, /readyz"


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not an address; write :{PORT} or 0.0.0.0:{PORT}")
    return host.removeprefix("[").removesuffix("]") or HOST, int(port)


@click.command(epilog=examples("pgcdc metrics", "pgcdc metrics --listen 0.0.0.0:9187"))
@click.option("--listen", type=Parsed("[HOST]:PORT", tuple, _address),
              help=f"Serve {_PATHS} at this address, such as :{PORT}. Default host: {HOST}.")  # fmt: skip
@click.option("--ready-within", type=click.FloatRange(min=1), default=60.0, show_default=True, metavar="SECONDS",
              help="/readyz fails if changes wait, and no progress was made for this many seconds.")  # fmt: skip
def metrics(listen: tuple[str, int] | None, ready_within: float) -> int:
    """Print metrics for Prometheus, or serve them over HTTP. Also works if no sync runs, or if source or lake does not
    answer."""
    from prometheus_client import CollectorRegistry, generate_latest

    from pgcdc_assets.metrics.families import Metrics
    from pgcdc_assets.metrics.movement import Movement

    found = Metrics(Settings.load(), Movement(ready_within))
    # With auto_describe, the registry would call collect() at once, to learn the names of the metrics.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(found)
    if listen is not None:
        serve(found, registry, *listen)
        return 0
    found.seconds = ONCE_SECONDS
    show(generate_latest(registry).decode())
    return 0


def serve(found: Metrics, registry: Any, host: str, port: int) -> None:
    """Serve until a signal ends the process. Raises MachineError if the address cannot be used."""
    import socket
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

    class Handler(WSGIRequestHandler):
        timeout = CLIENT_SECONDS

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing: a client may close its connection early, and a traceback could quote values."""

    app = application(found, make_wsgi_app(registry))
    try:
        server = make_server(host, port, app, Server, handler_class=Handler)
    except OSError as error:
        raise MachineError(f"cannot be used: {error.strerror or error}", thing=f"address {host}:{port}",
                           do="choose another address with --listen") from None  # fmt: skip
    shown = f"[{host}]" if ":" in host else host
    say(f"pgcdc: metrics at http://{shown}:{port}/metrics", err=True)
    stop = threading.Event()
    with server, ENDING.at_boundary(stop, boundary=None):
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        stop.wait()
        server.shutdown()


def application(found: Metrics, exposition: WSGIApplication) -> WSGIApplication:
    """Serves /metrics, /healthz (200 if the process answers) and /readyz (200 if replication makes progress, otherwise
    503 with the reasons)."""

    def readiness() -> tuple[str, str]:
        reasons = found.reasons()
        return ("503 Service Unavailable", "not ready: " + "; ".join(reasons)) if reasons else ("200 OK", "ready")

    def pages(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return exposition(environ, start_response)
        answers: dict[str, Callable[[], tuple[str, str]]] = {
            "/healthz": lambda: ("200 OK", "ok"), "/readyz": readiness,
        }  # fmt: skip
        status, text = answers.get(path, lambda: ("404 Not Found", f"the pages are {_PATHS}"))()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return pages
