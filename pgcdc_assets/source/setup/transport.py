"""Finding of ``setup`` on the way to the source: whether others on it can read the rows, or answer in its place."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Any, Final

import psycopg

from pgcdc_assets.source.connect.libpq import GSS_ENCRYPTED
from pgcdc_assets.source.setup.findings import Finding

_CHECKED: Final = "verify-full"
"""The one ``sslmode`` by which libpq checks that the server's certificate is valid and is the host's."""
_DO: Final = (
    f"write `sslmode={_CHECKED}` into `source`, and as `sslrootcert` the file of the certificate of its authority"
)


def transport_findings(conn: psycopg.Connection[Any]) -> list[Finding]:
    """A warning if the source is on another machine, and its connection is not encrypted or its certificate not
    checked."""
    sslmode = next((option.val or b"" for option in conn.pgconn.info if option.keyword == b"sslmode"), b"").decode()
    # GSSAPI encrypts for the host that the ticket names.
    gss = conn.execute(GSS_ENCRYPTED).fetchone() == (True,)
    said = exposed(conn.info.host, conn.info.hostaddr, sslmode, tls=bool(conn.pgconn.ssl_in_use), gss=gss)
    return [Finding("warning", "source", said, _DO)] if said else []


def exposed(host: str, address: str, sslmode: str, *, tls: bool, gss: bool = False) -> str | None:
    """What others on the way to ``host`` can do, in words; None if there is no way, or nothing that they can do.

    ``address``: the numeric address that the connection leads to; empty for a socket of this machine.
    """
    if not address or _loopback(address) or gss or (tls and sslmode == _CHECKED):
        return None
    if not tls:
        return f"is reached at {host} without encryption: others on the way can read all rows, and change them"
    return f"is reached at {host} with sslmode={sslmode}, by which another server can answer in its place"


def _loopback(address: str) -> bool:
    # An address of a link may bear the name of its interface.
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback
