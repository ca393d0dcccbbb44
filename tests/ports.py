from __future__ import annotations

import socket
from typing import Final

_HELD: Final[list[socket.socket]] = []


def held_port() -> int:
    """Reserves a port for a server that is started later. It stays reserved as long as this process lives.

    The kernel gives a bound port neither to a connection nor to a process that asks for any port. A server that names
    the port can still bind it: both sides set SO_REUSEADDR, as Java, asyncio and Spark do, and this socket does not
    listen. A port that was only free for a moment may be used by another connection before the server starts.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port
