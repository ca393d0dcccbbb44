"""Each version of the server accepts the pgoutput options that pgcdc requests from this version."""

from __future__ import annotations

import secrets

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import SourceFailed
from pgcdc_assets.source.connect.pluginoptions import Origins, PluginOptions
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.fix_postgres import Database, fresh_database
from tests.versions.histories import IMMEDIATE_SINCE


@pytest.mark.long
def test_each_version_accepts_the_requested_options(version_server: EmbeddedServer) -> None:
    """Servers before 16 refuse options of newer versions, so these must not be requested."""
    version = version_server.version
    asked = [PluginOptions.of(version, streaming=True), PluginOptions.of(version, origins=Origins.NONE)]
    asked += [PluginOptions.of(version, streaming=True, two_phase=True)] if version > 14 else []
    with fresh_database(version_server) as database, database.connect() as conn:
        conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE a")
        for options in asked:
            _start(database, options)
        if version < IMMEDIATE_SINCE:
            for options in (PluginOptions.of(16, streaming=True), PluginOptions.of(16, origins=Origins.NONE)):
                with pytest.raises(SourceFailed):
                    _start(database, options)


def _start(database: Database, options: PluginOptions) -> None:
    """Starts a stream with a new slot, because the slot of the previous stream may still be active for a moment."""
    with ReplicationConnection.open(database.conninfo) as walsender:
        slot = walsender.create_slot(f"t_{database.name}_{secrets.token_hex(4)}", temporary=True)
        walsender.start(slot.name, slot.consistent_point, ["p"], options)
        walsender.end_stream()
