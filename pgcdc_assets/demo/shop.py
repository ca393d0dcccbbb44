"""The sample shop in a database: its tables and first rows."""

from __future__ import annotations

from importlib.resources import files

import psycopg

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.settings import STATE_FOLDER

DATABASE = "shop"

_LOCK = 0x73686F70
"""Key of an advisory lock ('shop'), because two commands may find the database empty at the same time."""


def server() -> EmbeddedServer:
    """The embedded server of this project directory, running or not."""
    return EmbeddedServer(STATE_FOLDER.absolute() / "postgres", database=DATABASE)


def ensure(conninfo: str, *, scale: float = 1.0) -> bool:
    """Create and fill the shop if it does not exist, in one transaction. Returns whether this call created it.

    ``scale`` 1 gives about 35,000 rows.
    """
    with psycopg.connect(conninfo, application_name="shop") as conn:
        conn.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if conn.execute("SELECT to_regclass('public.order_lines')").fetchone() != (None,):
            return False
        conn.execute("SELECT set_config('shop.scale', %s, true)", [str(scale)])
        conn.execute(files(__package__).joinpath("shop.sql").read_bytes())
        return True
