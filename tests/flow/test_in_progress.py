"""`status` shows the transactions in progress that a sync has received. No mirror contains a row of these
transactions."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg
import pytest

from pgcdc_assets.checks.documents import InProgressDocument
from pgcdc_assets.checks.status import status
from pgcdc_assets.core.lsn import Lsn
from tests.fix_postgres import committed
from tests.flow.rig import Rig, following, newest
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

SIZE = 4 << 20
MANY = "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(%s::int, %s::int) g"


def _open(rig: Rig) -> InProgressDocument | None:
    return status(rig.settings).to_json()["in_progress"]


@pytest.mark.timeout(300)
def test_status_shows_open_transactions_with_size_and_age(rig: Rig) -> None:
    rig.conn.execute(f"ALTER DATABASE {rig.conn.info.dbname} SET logical_decoding_work_mem = '64kB'".encode())
    rig.setup()
    rig.sync()
    with closing(psycopg.connect(rig.settings.source or "", autocommit=True)) as other:
        _followed(rig, other)
        assert _open(rig) is None, "nobody receives any more"
    rig.assert_equal()


def _followed(rig: Rig, other: psycopg.Connection[Any]) -> None:
    """Runs a sync in follow mode, during which a large transaction is opened. Returns while this transaction is still
    open."""
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        assert _open(rig) is None
        start = rig.flush()
        other.execute("BEGIN")
        other.execute(MANY, (1001, 6000))
        ((xid,),) = other.execute("SELECT pg_current_xact_id()::text::int").fetchall()
        wait_for(lambda: (found := _open(rig)) is not None and found["bytes"] > SIZE, what="the open transaction")
        found = _open(rig)
        assert found is not None
        assert (found["transactions"], found["oldest"]["xid"]) == (1, xid)
        assert start <= Lsn.parse(found["oldest"]["lsn"]) <= rig.flush()
        age = found["oldest"]["age_seconds"]
        wait_for(lambda: (later := _open(rig)) is not None and later["oldest"]["age_seconds"] > age, what="its age")
        # While it is open, other transactions commit, and points with them are published.
        between = rig.commit("INSERT INTO u VALUES (1000, 1, NULL)")
        wait_for(lambda: newest(rig).replay_lsn >= between, what="the transaction between")
        assert _open(rig) is not None
        rig.assert_equal()
        other.execute("SAVEPOINT s")
        other.execute(MANY, (20001, 25000))
        other.execute("ROLLBACK TO s")
        end = committed(other)
        wait_for(lambda: _open(rig) is None, what="its end")
        wait_for(lambda: newest(rig).replay_lsn >= end, what="its rows")
        rig.assert_equal()
        other.execute("BEGIN")
        other.execute(MANY, (7001, 12000))
        wait_for(lambda: _open(rig) is not None, what="the next one")
        other.execute("ROLLBACK")
        wait_for(lambda: _open(rig) is None, what="its rollback")
        other.execute("BEGIN")
        other.execute(MANY, (7001, 12000))
        wait_for(lambda: _open(rig) is not None, what="the last one")
