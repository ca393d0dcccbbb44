"""Cases in which a run is refused before the first frame. Each error names both LSNs and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import (
    IdentityMismatch,
    LogAhead,
    PgcdcError,
    SlotActive,
    SlotMissing,
)
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import identity
from tests.fix_postgres import Database
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
def test_source_of_another_identity_is_refused(source: Source, field: str, value: Any) -> None:
    """A database with another name but the same OID is accepted, because it was renamed."""
    own = source.log().identity
    other = Identity(**{**own.__dict__, "database": "before", field: value})
    error = _refused(source, _log_at(source, "other", other, source.lsn()), IdentityMismatch)
    assert "7007" in str(error)


@pytest.mark.long
def test_missing_slot_is_refused(source: Source) -> None:
    who = identity(source.conn, source.slot("none"))
    _refused(source, _log_at(source, "none", who, source.lsn()), SlotMissing)


@pytest.mark.long
def test_slot_held_by_another_session_is_refused(source: Source) -> None:
    log = source.log()
    with ReplicationConnection.open(source.database.conninfo, application_name="somebody else") as other:
        other.start(log.identity.slot, log.start, [PUBLICATION])
        error = _refused(source, log, SlotActive)
    assert "somebody else" in str(error)


@pytest.mark.long
def test_receiver_waits_for_a_slot_that_is_held_briefly(source: Source) -> None:
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
    """If a position of the lake is above the fork of the timelines, the standby is refused, even if the log ends below
    the fork."""
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
            # The log records the timeline before the first frame. So a snapshot copy that this run makes is known to be
            # above the fork.
            receiver = new.receiver(log)
            until_event(receiver, "started")
            assert log.timeline == 2
            receiver.stop()
            new.receive(log, end)
            assert log.timeline == 2
            assert [batch.timeline for batch in log.batches(log.start)] == [1, 2]
