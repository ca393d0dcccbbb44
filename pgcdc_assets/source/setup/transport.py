"""Finding of ``setup`` on the network path to the source: whether others can read the rows, or answer in its place."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Any, Final

import psycopg

from pgcdc_assets.source.connect.libpq import GSS_ENCRYPTED
from pgcdc_assets.source.setup.findings import Finding

_CHECKED: Final = "verify-full"
"""The only ``sslmode`` with which libpq checks that the server's certificate is valid and belongs to the host."""
_DO: Final = (
    f"write `sslmode={_CHECKED}` into `source`, and as `sslrootcert` the file of the certificate of its authority"
)


def transport_findings(conn: psycopg.Connection[Any]) -> list[Finding]:
    """Returns a warning if the source is on another machine, and the connection is not encrypted or the certificate is
    not checked."""
    sslmode = next((option.val or b"" for option in conn.pgconn.info if option.keyword == b"sslmode"), b"").decode()
    # GSSAPI encryption is safe here: it encrypts for the host that the ticket names.
    gss = conn.execute(GSS_ENCRYPTED).fetchone() == (True,)
    said = exposed(conn.info.host, conn.info.hostaddr, sslmode, tls=bool(conn.pgconn.ssl_in_use), gss=gss)
    return [Finding("warning", "source", said, _DO)] if said else []


def exposed(host: str, address: str, sslmode: str, *, tls: bool, gss: bool = False) -> str | None:
    """Returns a text about what others on the network path to ``host`` can do; None if they can do nothing, or if there
    is no network path.

    ``address``: the numeric address of the connection; empty for a local socket.
    """
    if not address or _loopback(address) or gss or (tls and sslmode == _CHECKED):
        return None
    if not tls:
        return f"is reached at {host} without encryption: others on the way can read all rows, and change them"
    return f"is reached at {host} with sslmode={sslmode}, by which another server can answer in its place"


def _loopback(address: str) -> bool:
    # A link-local address may end with the name of its interface.
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback
