"""While a sync in follow mode runs, a client can read its own writes after `Lake.wait`, even if nothing else is written
to the source."""

from __future__ import annotations

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn
from tests.flow.rig import Rig, T, U, following

SECONDS = 60.0


def insert_position(rig: Rig) -> str:
    return str(rig.conn.execute("SELECT pg_current_wal_insert_lsn()").fetchall()[0][0])


@pytest.mark.long
def test_wait_returns_a_point_with_own_writes_even_if_nothing_else_is_written(rig: Rig) -> None:
    rig.conn.execute("CREATE TABLE excluded (v text)")
    rig.started(tables=("public.t", "public.u"))
    lake = Lake(rig.lake)
    with following(rig):
        for number in range(3):
            with rig.conn.transaction():
                rig.conn.execute("INSERT INTO t VALUES (%s)", [100 + number])
                rig.conn.execute("INSERT INTO u VALUES (%s, 0, 1)", [100 + number])
            point = lake.wait(insert_position(rig), SECONDS)
            assert 100 + number in point.arrow(T)["id"].to_pylist()
            assert 100 + number in point.arrow(U)["a"].to_pylist()
        # After a transaction that changes no mirror, no point reaches the source's LSN. `wait` still returns.
        rig.conn.execute("INSERT INTO excluded VALUES (repeat('x', 1000))")
        lsn = insert_position(rig)
        assert lake.wait(lsn, SECONDS).lsn < Lsn.parse(lsn)
        rig.conn.execute("BEGIN")
        rig.conn.execute("INSERT INTO t VALUES (200)")
        rig.conn.execute("ROLLBACK")
        rig.conn.execute("BEGIN; INSERT INTO t VALUES (300); DELETE FROM t WHERE id = 300; COMMIT")
        lake.wait(insert_position(rig), SECONDS)
        rig.conn.execute("DELETE FROM t WHERE id = 100")
        assert 100 not in lake.wait(insert_position(rig), SECONDS).arrow(T)["id"].to_pylist()
    # After a sync that was not in follow mode, `wait` returns at once for an LSN that the source had reached when the
    # sync began.
    flushed = rig.flush()
    rig.sync()
    assert lake.wait(flushed, timeout=0).tables == [T, U]
