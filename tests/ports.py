"""Ports of this machine for servers that are started later."""

from __future__ import annotations

import socket
from typing import Final

_HELD: Final[list[socket.socket]] = []


def held_port() -> int:
    """A port that nobody gets who does not name it, for as long as this process lives.

    The kernel gives a port that a socket is bound to neither to a connection nor to who asks for any. A server that
    names it can bind beside us: both say SO_REUSEADDR, as Java's, asyncio's and Spark's do, and we do not listen.
    A port that was merely free a minute ago may be another connection's by now.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port
