"""A network path to the server. A test can make the path stop forwarding while its TCP connections stay open, as
happens with a pooler or load balancer."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from psycopg.conninfo import make_conninfo

from tests.fix_postgres import Database

_BYTES = 65536
PATIENCE_SECONDS = 25
"""This many seconds after ``die``, the proxy closes all connections, as the server would after its own timeouts."""


class DeadPath:
    """A TCP proxy in threads of this process. ``die`` stops forwarding for all existing and later connections, and
    keeps every socket open. After ``die(new=True)``, later connections still work."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._target = f"{database.server.socket_folder}/.s.PGSQL.5432"
        self._dead = threading.Event()
        self._open: list[socket.socket] = []

    @property
    def conninfo(self) -> str:
        """The database through this path, without TLS."""
        port = self._listener.getsockname()[1]
        return make_conninfo(self._database.conninfo, host="127.0.0.1", port=port, sslmode="disable")

    def die(self, *, new: bool = False) -> None:
        """After this call, no byte is forwarded in either direction. ``new``: connections that are made after the call
        still work. All connections end after ``PATIENCE_SECONDS``."""
        dead, self._dead = self._dead, threading.Event()
        dead.set()
        if not new:
            self._dead.set()
        timer = threading.Timer(PATIENCE_SECONDS, self.close)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Ends every connection, as the server would after its own timeout."""
        self._listener.close()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                # Connections that are made after ``die(new=True)`` get a separate event, so that they still work.
                dead = self._dead
                server.connect(self._target)
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=(one, other, dead), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, dead: threading.Event) -> None:
    with suppress(OSError):
        while piece := source.recv(_BYTES):
            if dead.is_set():
                # Reads and drops the bytes, so that no sender is blocked by a full buffer.
                continue
            target.sendall(piece)
        if not dead.is_set():
            target.shutdown(socket.SHUT_RDWR)
