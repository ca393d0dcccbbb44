"""A proxy in front of the server's socket, by which a connection is lost on purpose."""

from __future__ import annotations

import shutil
import socket
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
    """Listens on a Unix socket of its own and passes bytes on. ``cut`` ends all connections where they are:
    what the proxy holds of either direction is lost, in the middle of a message as likely as not."""

    def __init__(self, server_folder: Path) -> None:
        self._server = str(server_folder / _SOCKET)
        self._folder = Path(tempfile.mkdtemp(prefix="cut-"))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / _SOCKET))
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def conninfo(self, conninfo: str) -> str:
        """The same database, by way of here."""
        return make_conninfo(conninfo, host=str(self._folder))

    def cut(self) -> int:
        """End every connection; how many there were."""
        with self._lock:
            ended = list(self._open)
        for end in ended:
            _shut(end)
        return len(ended) // 2

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _shut(self._listener)
        self._listener.close()
        self.cut()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server)
            except OSError:
                client.close()
                server.close()
                continue
            with self._lock:
                self._open |= {client, server}
            ends = [threading.Thread(target=_pass_on, args=pair, daemon=True)
                    for pair in ((client, server), (server, client))]  # fmt: skip
            threading.Thread(target=self._serve, args=(client, server, ends), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket, ends: list[threading.Thread]) -> None:
        for end in ends:
            end.start()
        for end in ends:
            end.join()
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
