from __future__ import annotations

import socket
from typing import Final

_HELD: Final[list[socket.socket]] = []


def held_port() -> int:
    """Reserves a port for a server that is started later. It stays reserved as long as this process lives.

    This process binds the port without listening. The kernel then uses the port neither for an outgoing connection nor
    for a process that asks for any free port. A server that binds this port by its number still can: both sides set
    SO_REUSEADDR, as Java, asyncio and Spark do. Without the reservation, another connection could use the port before
    the server starts.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port
