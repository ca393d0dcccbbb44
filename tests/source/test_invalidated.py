"""A slot that a real server has invalidated: every function that reads the slot reports this."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.errors import SlotLost
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import check_slot, require_slot
from tests.servers import VERSIONS, new_server


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_a_slot_whose_wal_was_removed_is_reported_lost(tmp_path: Path, version: int) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    with (
        new_server(tmp_path / "pg", version, settings=settings) as server,
        connect(server.conninfo) as conn,
    ):
        conn.execute("SELECT pg_create_logical_replication_slot('lost', 'pgoutput')")
        for _ in range(5):
            conn.execute("SELECT pg_switch_wal(), pg_current_xact_id()")
            conn.execute("CHECKPOINT")
        status = require_slot(conn, "lost")
        assert status.lost
        with pytest.raises(SlotLost, match="copies all tables again"):
            check_slot(status, None)
        with ReplicationConnection.open(server.conninfo) as walsender, pytest.raises(SlotLost) as caught:
            walsender.start("lost", ZERO, ["p"])
        assert caught.value.thing == "slot lost"
        assert not caught.value.retryable
