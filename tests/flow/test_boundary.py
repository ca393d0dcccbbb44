"""How `pgcdc verify` takes a snapshot of the source and waits for the mirrors to reach its LSN, and when verify
fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import CopyBlocked, LakeError
from pgcdc_assets.flow import boundary, lock
from pgcdc_assets.flow.boundary import Boundary, SyncTo
from pgcdc_assets.flow.requests import PlacedRequest, verify_request
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import SourceConnection, connect
from pgcdc_assets.source.slot.blockers import Blocker, transactions
from pgcdc_assets.source.snapshot.export import Snapshot, exported_snapshot
from pgcdc_assets.structure.record import TableState
from tests.fix_postgres import Database
from tests.waiting import wait_for

# None of these tests needs Spark ---------------------------------------------------------------


def _never(lsn: Lsn, max_seconds: float | None = None, /) -> None:
    raise AssertionError("no sync is to run")


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    return Settings(source=database.conninfo, lake=tmp_path / "lake")


def _boundary(settings: Settings, sync_to: SyncTo = _never, waited: list[Blocker] | None = None) -> Boundary:
    assert settings.source is not None
    told = waited if waited is not None else []
    return Boundary(settings, settings.source, sync_to, told.extend)


@contextmanager
def _open_transaction(database: Database) -> Iterator[None]:
    """Keeps a transaction with an xid open during the block. The creation of a slot waits for such a transaction."""
    with database.connect(autocommit=False) as conn:
        conn.execute("SELECT pg_current_xact_id()")
        yield
        conn.rollback()


def test_a_running_sync_is_not_paused_while_verify_waits_for_an_open_transaction(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "HELD_SECONDS", 0.1)
    monkeypatch.setattr(boundary, "TELL_SECONDS", 0.0)
    waited: list[Blocker] = []
    taken, compared = threading.Event(), threading.Event()

    def take() -> None:
        with _boundary(settings, waited=waited).snapshot():
            taken.set()
            compared.wait(60)

    thread = threading.Thread(target=take, daemon=True)
    with _open_transaction(database):
        with connect(database.conninfo) as conn:
            wait_for(lambda: _oldest(conn) > 0.2, what="an old transaction")
        thread.start()
        wait_for(lambda: bool(waited), what="a word about the transaction")
        assert verify_request(settings.layout) is None, (
            "a running sync is not paused while verify waits for the transaction"
        )
        assert not taken.is_set()
    assert taken.wait(60)
    assert verify_request(settings.layout) is not None
    compared.set()
    thread.join(60)
    assert verify_request(settings.layout) is None


def _oldest(conn: SourceConnection) -> float:
    return max((one.age.total_seconds() for one in transactions(conn) if one.age is not None), default=0.0)


def test_verify_error_names_the_transaction_that_does_not_end(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "HELD_SECONDS", 0.1)
    monkeypatch.setattr(boundary, "LOCK_SECONDS", 0)
    with (
        _open_transaction(database),
        pytest.raises(CopyBlocked, match=r"snapshot|slot .* waits for all open transactions: pid"),
        _boundary(settings).snapshot(),
    ):
        pass
    assert verify_request(settings.layout) is None


def test_verify_tries_again_to_take_its_snapshot_after_it_waited_too_long_for_a_transaction(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt to take the snapshot fails, because verify waited too long for an open transaction. Between the
    two attempts, a running sync may apply changes."""
    tries = 0

    @contextmanager
    def taken(*args: Any, **options: Any) -> Iterator[Snapshot]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise CopyBlocked("waits for every open transaction", thing="slot s")
        with exported_snapshot(*args, **options) as snapshot:
            yield snapshot

    monkeypatch.setattr(boundary, "exported_snapshot", taken)
    with _boundary(settings).snapshot():
        assert tries == 2


def test_verify_names_the_transaction_it_waits_for_even_if_the_transactions_age_is_hidden(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL shows a role without privileges only the ages of its own transactions and of prepared transactions."""
    monkeypatch.setattr(boundary, "HELD_SECONDS", 0.2)
    monkeypatch.setattr(boundary, "LOCK_SECONDS", 20)
    role = f"few_{database.name}"
    waited: list[Blocker] = []
    with database.connect() as admin, database.connect(autocommit=False) as other:
        admin.execute(f"CREATE ROLE {role} LOGIN REPLICATION".encode())
        try:
            other.execute("SELECT pg_current_xact_id()")

            def report(holders: list[Blocker]) -> None:
                waited.extend(holders)
                other.rollback()

            with Boundary(settings, f"{database.conninfo} user={role}", _never, report).snapshot():
                pass
        finally:
            admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
        assert [(one.pid, one.age) for one in waited] == [(other.info.backend_pid, None)]


def test_verify_takes_a_second_snapshot_if_taking_the_first_snapshot_took_too_long(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While verify takes its snapshot, a running sync applies nothing, but only for a limited time. If the snapshot is
    ready only after this time, the mirrors may already be above the snapshot's LSN."""
    late, points = iter([True, False]), list[Lsn]()
    monkeypatch.setattr(PlacedRequest, "is_late", property(lambda request: next(late)))

    @contextmanager
    def taken(*args: Any, **options: Any) -> Iterator[Snapshot]:
        with exported_snapshot(*args, **options) as snapshot:
            points.append(snapshot.consistent_point)
            yield snapshot

    monkeypatch.setattr(boundary, "exported_snapshot", taken)
    with _boundary(settings).snapshot() as snapshot:
        assert len(points) == 2
        assert snapshot.consistent_point == points[1]


def test_verify_fails_if_no_mirror_reaches_the_snapshots_lsn_in_time(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test holds the lake's lock, like a running sync. So verify waits for this sync to make a point at the
    snapshot's LSN, but no such point is made."""
    monkeypatch.setattr(boundary, "POINT_SECONDS", 0.5)
    _followed(database, settings, TableState.CATCHING_UP)
    under = _boundary(settings)
    with (
        lock.lake_lock(settings.layout, "test"),
        pytest.raises(LakeError, match=r"no table reached the snapshot's LSN within 0\.5 s, at LSN"),
        under.snapshot() as snapshot,
    ):
        under.reach(snapshot.consistent_point)


@pytest.mark.parametrize(
    ("state", "why"),
    [(TableState.COPYING, "each waits for its copy"), (TableState.SET_ASIDE, "all are set aside")],
)
def test_verify_is_refused_if_every_table_is_set_aside_or_waits_for_its_copy(
    database: Database, settings: Settings, state: TableState, why: str
) -> None:
    _followed(database, settings, state)
    with pytest.raises(LakeError, match=why):
        _boundary(settings).prepare()


def _followed(database: Database, settings: Settings, state: TableState) -> None:
    with connect(database.conninfo) as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY)")
        conn.execute("CREATE PUBLICATION p FOR TABLE public.t")
        (table,) = read_tables(conn, ["p"])
    TableStates(settings.layout).set(table, state, Lsn(1))
