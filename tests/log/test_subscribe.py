"""The receiver checks before the first frame whether source, slot and log belong together. If they do not, it refuses
the run, and the error says why. After a failover, it accepts a promoted standby that has all changes of the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import IdentityMismatch, LogAhead, PgcdcError, SlotActive, SlotMissing
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import check_slot, identity, require_slot
from pgcdc_assets.source.snapshot.pieces import pieces
from pgcdc_assets.source.snapshot.reading import Interrupted, copy_blocks, giving_way
from tests.fix_postgres import TEST_SETTINGS, Database
from tests.log.conftest import PUBLICATION, Source, content, eventually, until_event
from tests.servers import new_server, standby_of


def _refused(source: Source, log: ChangeLog, kind: type[PgcdcError], *, highest: Lsn = ZERO) -> PgcdcError:
    receiver = source.receiver(log, highest=highest)
    with pytest.raises(kind) as caught:
        until_event(receiver, "started")
    receiver.join(5)
    return caught.value


def _log_at(source: Source, name: str, who: Identity, start: Lsn, timeline: int = 1) -> ChangeLog:
    log = ChangeLog(Layout.of(source.folder / name))
    log.create(who, start, timeline)
    return log


def test_log_ahead_of_the_source_is_refused(source: Source) -> None:
    log = source.log()
    ahead = Lsn(source.lsn() + (1 << 30))
    error = _refused(source, _log_at(source, "ahead", log.identity, ahead), LogAhead)
    assert str(ahead) in str(error)
    error = _refused(source, log, LogAhead, highest=ahead)
    assert f"is at {ahead} (its change log ends at {log.position()})" in str(error)
    assert source.confirmed(log) == log.position()


@pytest.mark.parametrize(("field", "value"), [("system_identifier", "7007"), ("database_oid", 7007)])
def test_source_with_another_system_id_or_database_oid_is_refused(source: Source, field: str, value: Any) -> None:
    """The log's identity has another database name, too. The name alone is no reason to refuse, because a database may
    be renamed."""
    own = source.log().identity
    other = Identity(**{**own.__dict__, "database": "before", field: value})
    error = _refused(source, _log_at(source, "other", other, source.lsn()), IdentityMismatch)
    assert "7007" in str(error)


@pytest.mark.long
def test_missing_slot_is_refused(source: Source) -> None:
    who = identity(source.conn, source.slot("none"))
    _refused(source, _log_at(source, "none", who, source.lsn()), SlotMissing)


@pytest.mark.long
def test_slot_that_another_session_uses_is_refused(source: Source) -> None:
    log = source.log()
    with ReplicationConnection.open(source.database.conninfo, application_name="somebody else") as other:
        other.start(log.identity.slot, log.start, [PUBLICATION])
        error = _refused(source, log, SlotActive)
    assert "somebody else" in str(error)


@pytest.mark.long
def test_receiver_waits_for_a_slot_that_another_session_uses_briefly(source: Source) -> None:
    log = source.log()
    other = ReplicationConnection.open(source.database.conninfo)
    other.start(log.identity.slot, log.start, [PUBLICATION])
    end = source.run("INSERT INTO a VALUES (1, 'x')")
    receiver = source.receiver(log)
    receiver.until(end)
    eventually(lambda: bool(source.conn.execute(_CATALOG_SESSIONS).fetchone()))
    other.close()
    until_event(receiver, "arrived")
    assert len(content(log)) == 2


_CATALOG_SESSIONS = """
SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'pgcdc%/catalog' AND datname = current_database()
"""


@pytest.mark.long
@pytest.mark.parametrize("beyond_fork", ["nothing", "log", "lake"])
def test_promoted_standby_is_refused_for_a_lake_above_the_fork(
    source: Source, database: Database, beyond_fork: str
) -> None:
    """The fork is the LSN at which the standby was promoted. If the log or another position of the lake is above the
    fork, the standby is refused."""
    stands = ZERO
    server = new_server(source.folder / "primary", database.server.version)
    with server:
        with Database(server, "postgres").connect() as conn:
            own = Source(Database(server, "postgres"), conn, source.folder / "lake")
            own.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a")
            log = own.log()
            own.receive(log, own.run("INSERT INTO a VALUES (1, 'x')"))
        server.stop()
        copy = standby_of(server, source.folder / "standby")
        if beyond_fork != "nothing":
            server.start(survive=False)
            with Database(server, "postgres").connect() as conn:
                own = Source(Database(server, "postgres"), conn, source.folder / "lake")
                if beyond_fork == "log":
                    own.receive(log, own.run("INSERT INTO a SELECT g, 'lost' FROM generate_series(2, 2000) g"))
                else:
                    stands = own.run("CREATE TABLE foreign_table AS SELECT g FROM generate_series(1, 2000) g")
            server.stop()
    with copy, Database(copy, "postgres").connect() as conn:
        conn.execute("SELECT pg_promote(true, 60)")
        new = Source(Database(copy, "postgres"), conn, source.folder / "lake")
        end = new.run("INSERT INTO a SELECT g, 'new' FROM generate_series(10000, 15000) g")
        if beyond_fork != "nothing":
            assert end > stands
            error = _refused(new, log, IdentityMismatch, highest=stands)
            assert "timeline 2" in str(error)
            assert str(max(stands, log.position())) in str(error)
        else:
            # The log records the new timeline before it receives anything. So later runs know that a snapshot copy made
            # during this run is above the fork.
            receiver = new.receiver(log)
            until_event(receiver, "started")
            assert log.timeline == 2
            receiver.stop()
            new.receive(log, end)
            assert log.timeline == 2
            assert [batch.timeline for batch in log.batches(log.start)] == [1, 2]


# The primary is lost and its standby was promoted ---------------------------------------------------

SYNCHRONISED_SINCE = 17
"""The first PostgreSQL version with failover slots and pg_sync_replication_slots()."""


@contextmanager
def _source(server: EmbeddedServer, folder: Path) -> Iterator[Source]:
    database = Database(server, "postgres")
    source = Source(database, database.connect(), folder)
    try:
        yield source
    finally:
        source.conn.close()
        for receiver in source.running:
            receiver.kill()


def _standby(primary: EmbeddedServer, folder: Path) -> EmbeddedServer:
    """A standby that streams from the primary. It is created from a copy of the stopped primary, without the slots."""
    settings = {
        **TEST_SETTINGS, "hot_standby_feedback": "on", "primary_slot_name": "standby",
        "primary_conninfo": f"host={primary.socket_folder} port=5432 user=postgres dbname=postgres",
    }  # fmt: skip
    return standby_of(primary, folder, settings=settings, but=["pg_replslot"])


@pytest.mark.long
@pytest.mark.parametrize("version", [16, pytest.param(17, marks=pytest.mark.long), 18])
def test_promoted_standby_is_followed_if_its_slot_was_synchronised(tmp_path: Path, version: int) -> None:
    """Since PostgreSQL 17, a failover slot is synchronised to the standby. Before 17, the promoted standby does not
    have the slot, and the error says so."""
    synchronised = version >= SYNCHRONISED_SINCE
    primary = new_server(tmp_path / "primary", version, settings=TEST_SETTINGS)
    with primary, _source(primary, tmp_path / "lake") as source:
        source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a",
                   "SELECT pg_create_physical_replication_slot('standby')")  # fmt: skip
        source.conn.close()
        primary.stop()
        standby = _standby(primary, tmp_path / "standby")
        primary.start(survive=False)
        source.conn = source.database.connect()
        log = source.log()
        if synchronised:
            slot = log.identity.slot
            source.conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            source.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)", [slot])
            log = source.log_of(slot, "failover")
        with standby:
            source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
            if synchronised:
                _synchronise(source, log, standby)
            eventually(lambda: _replayed(source))
            source.conn.close()
            primary.stop()
            with _source(standby, tmp_path / "lake") as promoted:
                if synchronised:
                    _refuses_before_promotion(promoted, slot)
                promoted.conn.execute("SELECT pg_promote(true, 60)")
                end = promoted.run("INSERT INTO a VALUES (2, 'y')")
                if synchronised:
                    promoted.receive(log, end)
                    assert len(content(log)) == 4
                    assert log.timeline == 2
                    assert promoted.confirmed(log) == log.position()
                else:
                    receiver = promoted.receiver(log)
                    with pytest.raises(SlotMissing, match="pgcdc setup"):
                        until_event(receiver, "started")


def _synchronise(source: Source, log: ChangeLog, standby: EmbeddedServer) -> None:
    """Waits until the standby's slot is synchronised and permanent, so that it still exists after the promotion."""
    with Database(standby, "postgres").connect() as conn:

        def done() -> bool:
            # The slot advances only when the server writes a list of running transactions.
            source.receive(log, source.run("SELECT pg_current_xact_id()", "SELECT pg_log_standby_snapshot()"))
            eventually(lambda: _replayed(source))
            conn.execute("SELECT pg_sync_replication_slots()")
            query = "SELECT synced AND NOT temporary FROM pg_replication_slots WHERE slot_name = %s"
            return conn.execute(query, [log.identity.slot]).fetchone() == (True,)

        eventually(done)


@pytest.mark.long
def test_standby_replays_ddl_without_waiting_for_a_snapshot_copy(tmp_path: Path) -> None:
    """A snapshot copy reads the table on the standby. The copy is interrupted if the replay of DDL waits for it.
    Otherwise the replay, and queries that wait for it, would wait 30 s (max_standby_streaming_delay)."""
    primary = new_server(tmp_path / "primary", 18, settings=TEST_SETTINGS)
    with primary, _source(primary, tmp_path / "lake") as source:
        source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a",
                   "INSERT INTO a SELECT i, repeat('v', 100) FROM generate_series(1, 100000) AS i",
                   "SELECT pg_create_physical_replication_slot('standby')")  # fmt: skip
        source.conn.close()
        primary.stop()
        standby = _standby(primary, tmp_path / "standby")
        primary.start(survive=False)
        source.conn = source.database.connect()
        with standby, _source(standby, tmp_path / "lake") as there, giving_way(there.database.conninfo):
            there.conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            ((name,),) = there.conn.execute("SELECT pg_export_snapshot()").fetchall()
            with there.database.connect() as conn:
                (piece,) = pieces(conn, read_tables(conn, ["p"])[0], 1 << 30)
            reading = copy_blocks(there.database.conninfo, name, piece, 1 << 12)
            next(reading)
            started = time.monotonic()
            source.run("ALTER TABLE a ADD COLUMN more int")
            eventually(lambda: _replayed(source))
            assert time.monotonic() - started < 15
            with pytest.raises(Interrupted):
                list(reading)


def _replayed(source: Source) -> bool:
    query = "SELECT replay_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication WHERE application_name = %s"
    return source.conn.execute(query, ["walreceiver"]).fetchone() == (True,)


def _refuses_before_promotion(standby: Source, slot: str) -> None:
    with pytest.raises(IdentityMismatch, match="promoted"):
        check_slot(require_slot(standby.conn, slot), None)
    with ReplicationConnection.open(standby.database.conninfo) as walsender:
        assert walsender.identify().timeline == 1
