"""Reads the replication slot with SQL, and tests in which states of the slot the change log may continue from it."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import IdentityMismatch, LogAhead, PgcdcError, SlotAhead, SlotLost, SlotMissing
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.slot.blockers import transactions
from pgcdc_assets.source.slot.slot import SlotStatus, check_slot, identity, require_slot, slot_status
from tests.fix_postgres import Database


@pytest.fixture
def slot() -> str:
    return f"s_{secrets.token_hex(5)}"


@pytest.fixture
def status(database: Database, slot: str) -> SlotStatus:
    with connect(database.conninfo) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        return require_slot(conn, slot)


def test_a_missing_slot_is_none_or_an_error(database: Database, slot: str) -> None:
    with connect(database.conninfo) as conn:
        assert slot_status(conn, slot) is None
        with pytest.raises(SlotMissing, match="pgcdc setup"):
            require_slot(conn, slot)


def test_an_error_about_positions_names_both_positions(status: SlotStatus) -> None:
    assert status.confirmed_flush_lsn is not None
    before = Lsn(status.confirmed_flush_lsn - 8)
    with pytest.raises(SlotAhead, match=f"{status.confirmed_flush_lsn}.*{before}"):
        check_slot(status, before)
    beyond = Lsn(status.wal_lsn + 8)
    with pytest.raises(LogAhead, match=f"{beyond}.*{status.wal_lsn}"):
        check_slot(status, beyond)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"plugin": "test_decoding"}, IdentityMismatch),
        ({"plugin": None}, IdentityMismatch),
        ({"database": "another"}, IdentityMismatch),
        ({"two_phase": True}, IdentityMismatch),
        ({"synced": True}, IdentityMismatch),
        ({"wal_status": "lost"}, SlotLost),
        ({"invalidation_reason": "wal_removed"}, SlotLost),
        ({"conflicting": True}, SlotLost),
        ({"restart_lsn": None}, SlotLost),
    ],
)
def test_each_unusable_slot_has_its_error(
    status: SlotStatus, change: dict[str, object], kind: type[PgcdcError]
) -> None:
    with pytest.raises(kind) as caught:
        check_slot(replace(status, **change), status.confirmed_flush_lsn)  # type: ignore[arg-type]
    assert caught.value.do


def test_slots_of_other_kinds_are_recognised_on_a_real_server(database: Database, slot: str) -> None:
    with connect(database.conninfo) as conn, connect(database.server.conninfo_of("postgres")) as elsewhere:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", [slot])
        with pytest.raises(IdentityMismatch, match="two_phase"):
            check_slot(require_slot(conn, slot), None)
        with pytest.raises(IdentityMismatch, match=f"belongs to database {database.name}, not to postgres"):
            check_slot(require_slot(elsewhere, slot), None)
        physical = f"{slot}_p"
        conn.execute("SELECT pg_create_physical_replication_slot(%s)", [physical])
        try:
            with pytest.raises(IdentityMismatch, match="physical"):
                check_slot(require_slot(conn, physical), None)
        finally:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [physical])


def test_the_identity_can_be_read_without_rights(database: Database, slot: str) -> None:
    role = f"plain_{secrets.token_hex(4)}"
    with connect(database.conninfo) as conn:
        expected = identity(conn, slot)
        assert (expected.database, expected.slot) == (database.name, slot)
        assert expected.system_identifier.isdigit()
        conn.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            with connect(f"{database.conninfo} user={role}") as plain:
                assert identity(plain, slot) == expected
                assert slot_status(plain, slot) is None
        finally:
            conn.execute(f"DROP ROLE {role}".encode())


def test_open_and_prepared_transactions_are_named(database: Database) -> None:
    gid = f"g_{secrets.token_hex(4)}"
    with database.connect() as writer, database.connect() as other, connect(database.conninfo) as conn:
        writer.execute("BEGIN; SELECT pg_current_xact_id()")
        other.execute("BEGIN; SELECT pg_current_xact_id()")
        other.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        ours = [holder for holder in transactions(conn) if holder.database == database.name]
        assert [(holder.pid, holder.gid) for holder in ours] == [(writer.info.backend_pid, None), (None, gid)]
        assert all(holder.age is not None and holder.age.total_seconds() >= 0 for holder in ours)
        assert f"prepared transaction '{gid}' in database {database.name}, open for" in str(ours[1])
