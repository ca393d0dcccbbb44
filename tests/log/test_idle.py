"""While no published table is written, the slot still advances, and neither WAL nor files accumulate."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import fresh_database
from tests.log.conftest import Source, eventually, rows, until_event


def _files(log: ChangeLog) -> list[Path]:
    return sorted(path_of(log.path).glob("*.parquet"))


def _version(log: ChangeLog) -> int:
    return int(DeltaTable(path_of(log.path)).version())


@pytest.mark.long
def test_slot_advances_while_only_another_database_writes(source: Source) -> None:
    """A logical slot keeps the WAL of the whole cluster. Without confirmations it would keep the other database's WAL,
    too."""
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    with fresh_database(source.database.server) as other, other.connect() as conn:
        conn.execute("CREATE TABLE t (v text)")
        conn.execute("INSERT INTO t SELECT repeat('x', 500) FROM generate_series(1, 60000) g")
        goal = source.lsn()
        position = until_event(receiver, "position")[-1].lsn
        eventually(lambda: source.confirmed(log) >= position)
    receiver.stop()
    assert source.confirmed(log) == log.position() >= position
    source.receive(log, goal)
    assert goal - source.confirmed(log) < 1 << 16
    assert (_files(log), rows(log, "true")) == ([], [])
    assert _version(log) <= 5


@pytest.mark.long
def test_restarts_of_an_idle_receiver_add_no_commit(source: Source) -> None:
    """At each start, the receiver sends positions and requests keepalives. This must not add a commit or set the slot
    back."""
    log = source.log()
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.conn.execute("SELECT pg_log_standby_snapshot()") if _can_log_snapshots(source) else source.run("CHECKPOINT")
    source.receive(log, source.lsn())
    confirmed, versions = source.confirmed(log), []
    for _ in range(3):
        receiver = source.receiver(log)
        receiver.until(source.lsn())
        until_event(receiver, "arrived")
        receiver.join(10)
        assert source.confirmed(log) >= confirmed
        confirmed = source.confirmed(log)
        assert confirmed == log.position()
        versions.append(_version(log))
    # One commit is allowed, because the source itself lists its running transactions in the WAL every 15 s.
    assert versions[-1] - versions[0] <= 1
    assert len(_files(log)) == 1


def _can_log_snapshots(source: Source) -> bool:
    return source.database.server.version >= 16
