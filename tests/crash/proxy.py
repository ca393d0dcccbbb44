"""A proxy in front of the server's socket that can cut connections on purpose. It is a separate process: libpq's
blocking connect holds Python's global lock, so a thread of the test's process could not answer."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from psycopg.conninfo import make_conninfo

_SOCKET = ".s.PGSQL.5432"
_BYTES = 65536


class Proxy:
    """Listens on its own Unix socket and forwards bytes to the server's socket. ``cut`` ends all connections. Bytes
    that were not yet forwarded are lost in both directions, often in the middle of a message."""

    def __init__(self, server_folder: Path) -> None:
        self._server = server_folder

    def conninfo(self, conninfo: str) -> str:
        """The same database, through this proxy."""
        return make_conninfo(conninfo, host=str(self._folder))

    def cut(self) -> None:
        """End every connection. All connections have ended when this returns."""
        self._tell(b"cut\n")

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="cut-"))
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._folder / _SOCKET, self._server / _SOCKET],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._tell(b"")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # ``communicate`` closes the input of the process, which ends the process.
        self._process.communicate(timeout=30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, order: bytes) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order)
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"done\n", "the proxy has ended"


class _Connections:
    def __init__(self, listener: socket.socket, server: str) -> None:
        self._listener = listener
        self._server = server
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server)
            except OSError:
                client.close()
                server.close()
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            for end in self._open:
                _shut(end)

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
        back.start()
        _pass_on(client, server)
        back.join()
        with self._lock:
            self._open -= {client, server}
            client.close()
            server.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(_BYTES):
            target.sendall(piece)
    _shut(source)
    _shut(target)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _main(own: str, server: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(own)
    listener.listen(64)
    connections = _Connections(listener, server)
    threading.Thread(target=connections.accept, daemon=True).start()
    print("done", flush=True)
    for _ in sys.stdin:
        connections.cut()
        print("done", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
