"""The sensor with a real source, one situation per test. Each test passes a cursor, and checks the run requests and the
new cursor. No test starts a JVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.defs import runs
from pgcdc_assets.defs.demand import Cursor
from pgcdc_assets.defs.partitions import RangeRegister
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Source
from pgcdc_assets.defs.sensors import tick
from pgcdc_assets.defs.sync import sync_job
from pgcdc_assets.errors import SlotMissing
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.outcomes import Operation, OperationKind, recorded
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.extent import complete_to
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.source.slot.slot import require_slot
from pgcdc_assets.structure.record import TableState
from tests.defs.catalogs import NAMES
from tests.defs.doubles import dead_mark
from tests.deltatables import publish_at
from tests.fix_postgres import Database
from tests.log.streams import describe, frames_of, relation
from tests.projectfiles import CATALOG_FILE


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGCDC_SOURCE", database.conninfo)
    monkeypatch.setenv("PGCDC_SLOT", f"s_{database.name}")
    monkeypatch.setenv("PGCDC_TABLES", '["public.t"]')
    return Settings.load()


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY)")
        conn.execute("CREATE TABLE public.unpublished (id int PRIMARY KEY)")
        yield conn


@pytest.fixture
def catalog(settings: Settings, conn: psycopg.Connection[Any]) -> Catalog:
    """Sets up a project that has copied nothing yet. Returns its catalog."""
    catalog = setup(settings, str(settings.source)).catalog
    save_catalog(catalog, CATALOG_FILE)
    return catalog


@pytest.fixture
def level(settings: Settings, catalog: Catalog, conn: psycopg.Connection[Any]) -> Lsn:
    return synced(settings, conn, catalog, catalog.tables)


def synced(settings: Settings, conn: psycopg.Connection[Any], catalog: Catalog, copied: Sequence[Table]) -> Lsn:
    """Makes the state after a sync: the change log exists, and a consistent point at the slot's position lists the
    copied tables. Returns the LSN of this point."""
    start = require_slot(conn, settings.slot).confirmed_flush_lsn
    assert start is not None
    ChangeLog(settings.layout).create(catalog.identity, start, 1)
    TableStates(settings.layout).set_all(copied, TableState.CATCHING_UP, start)
    publish_at(ConsistentPoints(settings.layout), start, {table.name: 0 for table in copied})
    return start


def look(
    instance: dg.DagsterInstance, settings: Settings, cursor: Cursor | None = None, **options: Any
) -> dg.SensorResult:
    context = dg.build_sensor_context(instance=instance, cursor=str(cursor) if cursor else None)
    found = tick(Replication(settings, **options), context, Source())
    return found if isinstance(found, dg.SensorResult) else dg.SensorResult(skip_reason=found)


def catalog_read(instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]) -> Cursor:
    """Returns the cursor of a tick that has read the source's catalog. A tick reads it only if there is WAL above the
    lake's position, so this function writes some."""
    conn.execute("INSERT INTO public.unpublished VALUES (1)")
    cursor = Cursor.parse(look(instance, settings).cursor)
    assert cursor.catalog
    return cursor


def requests_one_run(instance: dg.DagsterInstance, settings: Settings, cursor: Cursor | None = None) -> None:
    """Checks that a tick with this cursor requests a run, and that the tick after it requests none."""
    first = look(instance, settings, cursor)
    assert first.run_requests
    assert not look(instance, settings, Cursor.parse(first.cursor)).run_requests


def why(result: dg.SensorResult) -> str:
    assert not result.run_requests
    assert result.skip_reason is not None
    return str(result.skip_reason.skip_message)


def test_before_setup_the_sensor_advises_setup(instance: dg.DagsterInstance, settings: Settings) -> None:
    assert why(look(instance, settings)) == "nothing is set up yet: run `pgcdc setup`"


@pytest.mark.usefixtures("catalog")
def test_an_unreachable_source_is_reported_without_its_password(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    elsewhere = settings.model_copy(update={"source": "host=/nowhere dbname=x password=geheim"})
    reason = why(look(instance, elsewhere))
    assert "/nowhere" in reason
    assert "geheim" not in reason


@pytest.mark.usefixtures("level")
def test_a_change_of_a_published_table_requests_a_run(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    conn.execute("INSERT INTO public.t VALUES (1)")
    assert look(instance, settings).run_requests


def test_sensor_keeps_the_newest_point_of_a_quiet_source_fresh(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any], level: Lsn
) -> None:
    """A source without changes gets no new consistent points. So the sensor reports the newest point again, at most
    once a minute, and only if there is a freshness policy."""
    key = RangeRegister(instance, NAMES).add(LsnRange(Lsn(1), level)).key
    freshness = dg.FreshnessPolicy.time_window(timedelta(minutes=15))

    def points(cursor: Cursor, **options: Any) -> tuple[list[tuple[str, str | None]], Cursor]:
        result = look(instance, settings, cursor, **options)
        events = [event for event in result.asset_events if isinstance(event, dg.AssetMaterialization)]
        return [(event.asset_key.to_user_string(), event.partition) for event in events], Cursor.parse(result.cursor)

    cursor = catalog_read(instance, settings, conn)
    assert points(cursor)[0] == []
    found, cursor = points(cursor, freshness=freshness)
    assert found == [("pgcdc/consistent_points", key)]
    assert points(cursor, freshness=freshness)[0] == []
    assert points(replace(cursor, fresh=cursor.fresh - 60), freshness=freshness)[0] == found


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(
    "done",
    [
        "CREATE TABLE public.wishes (id int PRIMARY KEY)",
        "ALTER TABLE public.t RENAME id TO number",
        "CREATE TABLE public.p_2 PARTITION OF public.p FOR VALUES IN (2)",
        "DROP TABLE public.p_1",
        "ALTER PUBLICATION {publication} ADD TABLE public.unpublished",
    ],
)
def test_a_change_of_the_catalog_of_a_quiet_source_requests_one_run(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any], done: str
) -> None:
    """The slot has no change of a published table, because nobody writes rows."""
    settings = settings.changed(tables=("public.*",))
    conn.execute("CREATE TABLE public.p (id int PRIMARY KEY) PARTITION BY LIST (id)")
    conn.execute("CREATE TABLE public.p_1 PARTITION OF public.p FOR VALUES IN (1)")
    first = look(instance, settings, catalog_read(instance, settings, conn))
    assert "no change to a published table" in why(first)
    conn.execute(done.format(publication=settings.publication).encode())
    requests_one_run(instance, settings, Cursor.parse(first.cursor))


@pytest.mark.usefixtures("level")
def test_a_table_created_before_a_tick_has_read_the_tables_requests_one_run(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    """The last run may have read the catalog before the table was created."""
    settings = settings.changed(tables=("public.*",))
    conn.execute("CREATE TABLE public.wishes (id int PRIMARY KEY)")
    requests_one_run(instance, settings)


@pytest.mark.usefixtures("level")
def test_a_new_table_that_the_setting_tables_does_not_select_requests_no_run(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    cursor = catalog_read(instance, settings, conn)
    conn.execute("CREATE TABLE public.wishes (id int PRIMARY KEY)")
    assert "no change to a published table" in why(look(instance, settings, cursor))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(
    ("status", "again"),
    [
        (dg.DagsterRunStatus.FAILURE, True), (dg.DagsterRunStatus.CANCELED, True), (dg.DagsterRunStatus.SUCCESS, False),
    ],
)  # fmt: skip
def test_a_new_table_requests_another_run_if_the_run_for_it_did_not_succeed(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any], status: dg.DagsterRunStatus,
    again: bool,
) -> None:  # fmt: skip
    settings = settings.changed(tables=("public.*",))
    conn.execute("CREATE TABLE public.wishes (id int PRIMARY KEY)")
    first = look(instance, settings)
    assert first.run_requests
    job = sync_job(Replication(settings))
    instance.create_run_for_job(job, status=status, tags=NAMES.tags)
    assert bool(look(instance, settings, Cursor.parse(first.cursor)).run_requests) is again


def test_a_commit_of_a_prepared_transaction_that_was_received_before_requests_a_run(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    """For the commit, the slot contains only COMMIT PREPARED, and no row."""
    settings = settings.changed(two_phase=True)
    catalog = setup(settings, str(settings.source)).catalog
    save_catalog(catalog, CATALOG_FILE)
    conn.execute("BEGIN; INSERT INTO public.t VALUES (1); PREPARE TRANSACTION 'sensor'")
    conn.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", [settings.slot])
    position = synced(settings, conn, catalog, catalog.tables)
    cursor = catalog_read(instance, settings, conn)
    assert "no change to a published table" in why(look(instance, settings, cursor))
    known = complete_to(settings.layout, position)
    conn.execute("COMMIT PREPARED 'sensor'")
    assert look(instance, settings, cursor).run_requests
    assert complete_to(settings.layout, position) == known


def test_a_table_that_no_mirror_can_contain_requests_no_run(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    settings = settings.changed(tables=("public.t", "public.doubled"))
    conn.execute('CREATE TABLE public.doubled ("Name" int PRIMARY KEY, name int)')
    catalog = setup(settings, str(settings.source)).catalog
    save_catalog(catalog, CATALOG_FILE)
    synced(settings, conn, catalog, [table for table in catalog.tables if table.name.name != "doubled"])
    assert why(look(instance, settings, catalog_read(instance, settings, conn)))


def test_a_batch_requests_no_further_run_after_a_sync_has_applied_the_whole_log(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any], catalog: Catalog, level: Lsn
) -> None:
    """The rows of the batches belong to a table that is set aside, so no run makes a point for them."""
    (table,) = catalog.tables
    TableStates(settings.layout).set(table, TableState.SET_ASIDE, level, "why not")
    cursor = catalog_read(instance, settings, conn)
    first = batch(settings, catalog, conn, level)
    assert look(instance, settings, cursor).run_requests
    synced_to(settings, None)
    assert look(instance, settings, cursor).run_requests, "the sync ended early"

    synced_to(settings, first)
    assert "no change to a published table" in why(look(instance, settings, cursor))
    assert complete_to(settings.layout, first) > first, "the mirrors are current"

    second = batch(settings, catalog, conn, first)
    assert look(instance, settings, cursor).run_requests
    synced_to(settings, second)
    assert why(look(instance, settings, cursor))
    with pytest.raises(SlotMissing), recorded_sync(settings):
        raise SlotMissing("does not exist", thing="slot s")
    assert look(instance, settings, cursor).run_requests, "the sync may have stopped before it applied everything"


def batch(settings: Settings, catalog: Catalog, conn: psycopg.Connection[Any], position: Lsn) -> Lsn:
    """Adds a batch with rows of the first table to the log, above its ``position``. Returns the end of the batch."""
    (table,) = catalog.tables
    conn.execute("INSERT INTO public.unpublished SELECT max(id) + 1 FROM public.unpublished")
    relations = Relations()
    describe(relations, relation(table.oid, table.name.name), 0)
    end = Lsn(position + 60)
    writer = BatchWriter(settings.layout.change_log, catalog.identity, 1, relations)
    writer.commit(frames_of(position + 10, table.oid), [], end)
    return end


@contextmanager
def recorded_sync(settings: Settings) -> Iterator[Operation]:
    with lake_lock(settings.layout, "sync"), recorded(settings.layout, OperationKind.SYNC, "sync", print) as operation:
        yield operation


def synced_to(settings: Settings, applied_to: Lsn | None) -> None:
    """Records a sync after which no later sync has to apply a batch up to this LSN."""
    with recorded_sync(settings) as operation:
        operation.applied_to = applied_to


@pytest.mark.long
def test_the_sensor_does_not_advance_the_slot(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any], level: Lsn
) -> None:
    conn.execute("INSERT INTO public.t VALUES (1)")
    for _ in range(2):
        assert look(instance, settings).run_requests
    slot = require_slot(conn, settings.slot)
    assert slot.confirmed_flush_lsn == level
    assert ChangeLog(settings.layout).position() == level


@pytest.mark.usefixtures("catalog")
def test_a_run_whose_process_died_is_marked_failed_and_the_next_run_is_delayed(
    instance: dg.DagsterInstance, settings: Settings
) -> None:
    job, status = sync_job(Replication(settings)), dg.DagsterRunStatus.STARTED
    run = instance.create_run_for_job(job, status=status, tags=NAMES.tags)
    instance.add_run_tags(run.run_id, {runs.PROCESS_TAG: dead_mark()})
    with (
        pytest.raises(SlotMissing), lake_lock(settings.layout, "sync"),
        recorded(settings.layout, OperationKind.SYNC, "sync", print),
    ):  # fmt: skip
        raise SlotMissing("does not exist", thing="slot s")
    reason = why(look(instance, settings))
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status is dg.DagsterRunStatus.FAILURE
    assert "failed runs in a row: 1 (slot s: does not exist)" in reason


@pytest.mark.usefixtures("level")
def test_the_sensor_does_not_wait_for_runs_of_another_source(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    """The sensor waits for the queued run of its own source only."""
    other, states = Replication(settings.changed(name="other")), dg.DagsterRunStatus
    for state in (states.FAILURE, states.STARTED, states.NOT_STARTED):
        instance.create_run_for_job(sync_job(other), status=state, tags=other.names.tags)
    conn.execute("INSERT INTO public.t VALUES (1)")
    found = look(instance, settings)
    assert found.run_requests
    assert {event.asset_key.path[0] for event in found.asset_events} == {"pgcdc"}
    instance.create_run_for_job(sync_job(Replication(settings)), status=states.NOT_STARTED, tags=NAMES.tags)
    assert why(look(instance, settings))
    assert why(look(instance, other.settings)), "its own runs are under way"


@pytest.mark.usefixtures("level")
def test_the_sensor_reports_the_slot_every_30_s_and_asset_checks_only_after_a_change(
    instance: dg.DagsterInstance, settings: Settings, conn: psycopg.Connection[Any]
) -> None:
    first = look(instance, settings)
    kinds = [type(event) for event in first.asset_events]
    assert kinds[0] is dg.AssetObservation
    assert kinds.count(dg.AssetCheckEvaluation) == 2
    cursor = Cursor.parse(first.cursor)
    assert look(instance, settings, cursor).asset_events == []

    later = replace(cursor, told=cursor.told - 31)
    assert [type(event) for event in look(instance, settings, later).asset_events] == [dg.AssetObservation]

    for event in first.asset_events:
        instance.report_runless_asset_event(event)
    after_another_text = look(instance, settings, replace(later, health="another")).asset_events
    assert [type(event) for event in after_another_text] == [dg.AssetObservation], "a check passes as before"

    conn.execute(f"ALTER PUBLICATION {settings.publication} DROP TABLE public.t")
    events = look(instance, settings, later).asset_events
    wrong = [event for event in events if isinstance(event, dg.AssetCheckEvaluation) and not event.passed]
    assert any("changes are being lost" in str(event.description) for event in wrong)


@pytest.mark.usefixtures("level")
def test_all_checks_fail_within_a_minute_after_the_source_went_down(
    instance: dg.DagsterInstance, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = Cursor.parse(look(instance, settings).cursor)
    monkeypatch.setenv("PGCDC_SOURCE", "host=/nowhere dbname=x")
    result = look(instance, Settings.load(), replace(cursor, told=cursor.told - 50))
    assert "/nowhere" in why(result)
    found = {str(event.asset_key.path): event for event in result.asset_events
             if isinstance(event, dg.AssetCheckEvaluation)}  # fmt: skip
    assert found.keys() == {"['pgcdc', 'slot']", "['pgcdc', 'public', 't']"}
    for check in found.values():
        assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.ERROR)
        assert "/nowhere" in str(check.description)
    assert look(instance, settings, Cursor.parse(result.cursor)).asset_events == [], "a day's events stay few"
