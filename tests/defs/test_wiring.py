"""Jobs and assets with an engine that only records its calls: which calls the engine gets, and which events Dagster's
instance gets."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from pgcdc_assets.checks import status
from pgcdc_assets.checks.health import Problem, TableFacts
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.checks.status import Status
from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import runs
from pgcdc_assets.defs.assets import pipeline_assets
from pgcdc_assets.defs.checks import current_health, evaluations
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.partitions import RangeRegister, register_snapshot
from pgcdc_assets.defs.replication import STAGES, Replication
from pgcdc_assets.defs.resources import mirror_updated
from pgcdc_assets.defs.runs import PROCESS_TAG, limit_pool, runs_of, waiting_for_pool
from pgcdc_assets.defs.sync import REPAIR_OP, SYNC_OP, repair_job, sync_job
from pgcdc_assets.errors import LockHeld, StoreFailed
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import MessagesReport
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import LOCATION, load_catalog, save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.lease import ProcessName
from pgcdc_assets.structure.record import TableState
from tests.defs.catalogs import NAMES, catalog_of
from tests.defs.doubles import QUIET, Script, report_of, resources, span
from tests.deltatables import publish_at
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for

ORDERS, EVENTS = TableName("public", "orders"), TableName("public", "events")
CATALOG = catalog_of(("public", "orders"), ("public", "events"))
OF = Replication(Settings(source="dbname=nowhere"))
RANGES, COPIES = str(NAMES.lsn_ranges.name), str(NAMES.snapshot_ranges.name)


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGCDC_SOURCE", "dbname=nowhere")
    save_catalog(CATALOG, CATALOG_FILE)


def sync(instance: dg.DagsterInstance, script: Script, **config: Any) -> dg.ExecuteInProcessResult:
    return sync_job(OF).execute_in_process(
        run_config={"ops": {NAMES.of(SYNC_OP): {"config": config}}, "loggers": QUIET},
        instance=instance,
        resources=resources(script),
        raise_on_error=False,
    )


def location(of: Replication, script: Script) -> dg.Definitions:
    """The assets of a source, with an engine that only records its calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.Definitions(
            assets=pipeline_assets(of, CATALOG),
            resources=resources(script, of.names),
            executor=dg.in_process_executor,
        )


def materialize(
    instance: dg.DagsterInstance, script: Script, keys: Sequence[Sequence[str]], partitions: Sequence[str], **ops: Any
) -> dg.ExecuteInProcessResult:
    """Materializes the assets as the UI does, in one run over a range of partitions. ``ops``: the configuration of ops,
    by op name."""
    defs = location(Replication(Settings(messages=("app",))), script)
    first, last = (partitions[0], partitions[-1]) if partitions else ("000000000020", "000000000010")
    return defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        asset_selection=[NAMES.key(*key) for key in keys],
        tags={"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last},
        run_config={"loggers": QUIET, "ops": {name: {"config": config} for name, config in ops.items()}},
        raise_on_error=False,
    )


def metadata(instance: dg.DagsterInstance, key: Sequence[str], partition: str) -> dict[str, Any]:
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=NAMES.key(*key), asset_partitions=[partition]), limit=1
    ).records
    assert records, f"{key} has no materialisation of {partition}"
    event = records[0].asset_materialization
    assert event is not None
    return {name: value.value for name, value in event.metadata.items()}


def origin_of(job: str) -> RemoteJobOrigin:
    """The origin that a run has if it was launched from our code location."""
    target = LoadableTargetOrigin(module_name="pgcdc_assets.definitions")
    location = InProcessCodeLocationOrigin(target, location_name=LOCATION)
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, SINGLETON_REPOSITORY_NAME), job)


def failure(result: dg.ExecuteInProcessResult) -> str:
    (event,) = (event for event in result.all_node_events if event.is_step_failure)
    data = event.step_failure_data.user_failure_data
    assert data is not None
    return str(data.description)


def test_an_ended_range_is_registered_and_changed_tables_are_materialised(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    publish_at(ConsistentPoints(Settings().layout), 0x20, {ORDERS: 3, EVENTS: 7})
    report = report_of(span(0x10, 0x20), ORDERS)
    script = Script(copies=[CopyReport(ORDERS, Lsn(0x10), 40, 4000, 2, 1.5, 1)], ranges=[report])
    assert sync(instance, script).success

    assert RangeRegister(instance, NAMES).known() == [report.span]
    key = report.span.key
    log = metadata(instance, ["change_log"], key)
    assert {name: log[name] for name in ("start_lsn", "end_lsn", "transform_lsn", "transactions", "rows_inserts")} == {
        "start_lsn": "0/10", "end_lsn": "0/20", "transform_lsn": "0/20", "transactions": 3, "rows_inserts": 5,
    }  # fmt: skip
    assert (log["end_lsn_int"], log["lag_bytes"], log["lag_seconds"], log["bytes"]) == (0x20, 16, 0.75, 1000)
    assert log["last_commit"] - log["first_commit"] == 60
    changed = metadata(instance, ["public", "orders"], key)
    assert (changed["rows_inserted"], changed["delta_version"], changed["replay_lsn"]) == (5, 3, "0/20")
    assert changed["dagster/row_count"] == 44
    assert metadata(instance, ["changes", "public", "orders"], key)["rows_insert"] == 5
    points = metadata(instance, ["consistent_points"], key)
    assert (points["tables"], points["tables_changed"]) == (2, 1)

    copied = metadata(instance, ["snapshot", "public", "orders"], "000000000000-000000000010")
    assert (copied["consistent_point"], copied["dagster/row_count"]) == ("0/10", 40)
    assert instance.get_dynamic_partitions(COPIES) == ["000000000000-000000000010"]


def recorded(instance: dg.DagsterInstance, run_id: str, *types: dg.DagsterEventType) -> list[str]:
    """Returns the asset keys of a run's events of these types, in the order of the events. The first part of each key,
    which is the source's name, is left out."""
    found = [entry.get_dagster_event() for entry in instance.all_logs(run_id, of_type=set(types))]
    keys = [(event.asset_key or event.asset_check_evaluation_data.asset_key).path for event in found]
    assert {key[0] for key in keys} <= {"pgcdc"}
    return ["/".join(key[1:]) for key in keys]


def test_table_without_changes_gets_no_dagster_event(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a range, the table gets no materialization. Its check is not recorded again if it passed before and
    passes again."""
    monkeypatch.setattr("pgcdc_assets.defs.checks.current_health", lambda *_: health())
    publish_at(ConsistentPoints(Settings().layout), 0x50, {ORDERS: 3, EVENTS: 7})
    events = (dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    first = sync(instance, Script(ranges=[report_of(span(0x10, 0x20)), report_of(span(0x20, 0x30))]))
    assert recorded(instance, first.run_id, *events) == [
        "change_log", "consistent_points", "slot", "public/orders", "public/events",
        "change_log", "consistent_points",
    ]  # fmt: skip
    changed = [report_of(span(0x40, 0x50), ORDERS), report_of(span(0x50, 0x60), ORDERS)]
    second = sync(instance, Script(ranges=[report_of(span(0x30, 0x40)), *changed]))
    assert recorded(instance, second.run_id, *events) == [
        "change_log", "consistent_points",
        "change_log", "changes/public/orders", "public/orders", "consistent_points", "public/orders",
        "change_log", "changes/public/orders", "public/orders", "consistent_points",
    ]  # fmt: skip


def test_asset_check_that_passes_again_is_not_recorded_again(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed result is recorded in each run. A passed result is recorded only if it is the first result, or if the
    check failed before."""
    failing = Problem("error", f"table {EVENTS}", "is set aside", "copy it again", ProblemCode.TABLE_SET_ASIDE)
    results = iter([health(), health(failing), health(failing), health(), health()])
    monkeypatch.setattr("pgcdc_assets.defs.checks.current_health", lambda *_: next(results))
    done = [sync(instance, Script(ranges=[report_of(span(n, n + 16))])) for n in (0x10, 0x20, 0x30, 0x40, 0x50)]
    checks = [recorded(instance, run.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION) for run in done]
    assert checks == [["slot", "public/orders", "public/events"], ["public/events"], ["public/events"],
                      ["public/events"], []]  # fmt: skip


def test_asset_check_of_a_copied_table_is_recorded_in_the_run_of_the_copy(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster shows a check as not evaluated if its last result is older than the newest materialisation of the
    asset."""
    monkeypatch.setattr("pgcdc_assets.defs.checks.current_health", lambda *_: health())
    assert sync(instance, Script(ranges=[report_of(span(0x10, 0x20))])).success
    copies = [CopyReport(table, Lsn(0x20), 40, 4000, 2, 1.5, 1) for table in (ORDERS, EVENTS)]
    run = sync(instance, Script(copies=copies))
    checks = recorded(instance, run.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    assert {"public/orders", "public/events"} <= set(checks)


def health(*problems: Problem) -> Status:
    tables = [TableFacts(table, TableState.STREAMING, Lsn(0x10)) for table in (ORDERS, EVENTS)]
    return Status(None, Lsn(0x10), Lsn(0x10), 0, tuple(tables), problems)


def test_the_saved_catalog_is_read_once_per_run(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run reads the file again only if the file was saved again during the run."""
    read: list[Path] = []

    def counted(path: Path) -> Catalog | None:
        read.append(path)
        return load_catalog(path)

    monkeypatch.setattr("pgcdc_assets.project.load_catalog", counted)
    copies = [CopyReport(table, Lsn(0x10), 40, 4000, 2, 1.5, 1) for table in (ORDERS, EVENTS)]
    ranges = [report_of(span(0x10, 0x20), ORDERS, EVENTS), report_of(span(0x20, 0x30), ORDERS, EVENTS)]
    assert sync(instance, Script(copies=copies, ranges=ranges)).success
    assert len(read) == 1


def latest(instance: dg.DagsterInstance, *key: str) -> dg.AssetMaterialization:
    event = instance.get_latest_materialization_event(NAMES.key(*key))
    assert event is not None
    assert event.asset_materialization is not None
    return event.asset_materialization


def test_a_mirror_is_materialised_when_its_copy_is_complete(instance: dg.DagsterInstance) -> None:
    """The source has no changes, so no range ends. Only the end of the copy can materialise the mirror."""
    assert sync(instance, Script(copies=[CopyReport(ORDERS, Lsn(0x10), 40, 4000, 2, 1.5, 1)])).success
    found = latest(instance, "public", "orders")
    assert (found.partition, found.metadata["dagster/row_count"].value) == (None, 40)
    assert str(found.metadata["dagster/uri"].value).endswith("/lake/public/orders")
    RangeRegister(instance, NAMES).add(span(0x10, 0x20))
    RangeRegister(instance, NAMES).add(span(0x20, 0x30))
    assert sync(instance, Script(copies=[CopyReport(EVENTS, Lsn(0x28), 7, 70, 1, 1.5, 1)])).success
    found = latest(instance, "public", "events")
    assert (found.partition, found.metadata["dagster/row_count"].value) == (span(0x10, 0x20).key, 7)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Parameter `include_sources`")
@pytest.mark.parametrize(
    ("condition", "fires"), [(dg.AutomationCondition.eager(), False), (mirror_updated(), True)], ids=["eager", "ours"]
)
def test_mirror_updated_runs_an_asset_whose_upstream_table_was_added_after_the_first_ranges(
    instance: dg.DagsterInstance, condition: dg.AutomationCondition[dg.AssetKey], fires: bool
) -> None:
    """``mirror_updated`` is our automation condition. The table has no materialization for the ranges before its copy.
    Dagster's ``eager`` condition would wait for these ranges until retention deletes their keys."""
    points = ConsistentPoints(Settings().layout)
    publish_at(points, 0x20, {ORDERS: 3})
    assert sync(instance, Script(ranges=[report_of(span(0x10, 0x20), ORDERS)])).success
    assert sync(instance, Script(ranges=[report_of(span(0x20, 0x30), ORDERS)])).success

    @dg.asset(deps=[NAMES.of_stage("mirror", EVENTS)], automation_condition=condition)
    def on_events() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        defs = dg.Definitions(assets=[*pipeline_assets(OF, CATALOG), on_events], resources=resources(Script()))
    first = dg.evaluate_automation_conditions(defs, instance)
    publish_at(points, 0x40, {ORDERS: 4, EVENTS: 2})
    copy = CopyReport(EVENTS, Lsn(0x30), 7, 70, 1, 1.5, 1)
    assert sync(instance, Script(copies=[copy], ranges=[report_of(span(0x30, 0x40), EVENTS)])).success
    second = dg.evaluate_automation_conditions(defs, instance, cursor=first.cursor)
    assert second.total_requested == fires
    # In the range below, EVENTS has no changes. So the asset is not requested.
    publish_at(points, 0x50, {ORDERS: 5, EVENTS: 2})
    assert sync(instance, Script(ranges=[report_of(span(0x40, 0x50), ORDERS)])).success
    third = dg.evaluate_automation_conditions(defs, instance, cursor=second.cursor)
    assert third.total_requested == 0


def test_a_run_is_tagged_with_its_process_name_and_passes_its_config_to_the_engine(
    instance: dg.DagsterInstance,
) -> None:
    script = Script()
    result = sync(instance, script, until="0/FF", max_seconds=5.0, idle_seconds=1.0, copy_anew=['"A b".c'])
    assert result.success
    (asked,) = script.asked
    _, command, bounds, copy_anew, known = asked
    assert (command, copy_anew, known) == ("sync", (TableName("A b", "c"),), [])
    assert (bounds.until, bounds.follow, bounds.max_seconds, bounds.idle_seconds) == (Lsn(0xFF), False, 5.0, 1.0)
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags[PROCESS_TAG] == str(ProcessName.own())


def test_partitions_for_ranges_of_an_earlier_change_log_are_removed(instance: dg.DagsterInstance) -> None:
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        RangeRegister(instance, NAMES).add(known)
    ChangeLog(Settings().layout).create(Identity("1", "db", "s"), Lsn(0x20), 1)
    script = Script()
    assert sync(instance, script).success
    assert script.asked[0][4] == []
    assert RangeRegister(instance, NAMES).known() == []


def test_an_error_of_pgcdc_fails_the_run_with_a_message_of_one_line(instance: dg.DagsterInstance) -> None:
    result = sync(instance, Script(error=LockHeld("`pgcdc follow` (pid 7) is writing to this lake", thing="/lake")))
    assert not result.success
    assert failure(result) == "/lake: `pgcdc follow` (pid 7) is writing to this lake; wait for that process, or stop it"
    (event,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    assert event.step_failure_data.error is not None
    assert event.step_failure_data.error.cause is None


def test_a_run_that_a_signal_ends_at_a_commit_boundary_succeeds(instance: dg.DagsterInstance) -> None:
    def until_stopped(bounds: Bounds) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert bounds.stop.wait(60)

    assert sync(instance, Script(wait=until_stopped), follow=True).success


@pytest.mark.parametrize("by", ["job", "selection"])
def test_run_ends_early_only_if_a_run_of_its_own_source_is_queued(
    instance: dg.DagsterInstance, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued run that was launched in the UI does not have pgcdc's tag yet. pgcdc recognizes this run by its selected
    assets."""
    looks: list[int] = []

    def counted(*args: Any) -> list[dg.RunRecord]:
        looks.append(1)
        return runs_of(*args)

    def queue(of: Replication) -> None:
        selection = frozenset([of.names.of_stage("mirror", ORDERS)]) if by == "selection" else None
        job = location(of, Script()).resolve_implicit_global_asset_job_def() if selection else sync_job(of)
        instance.create_run_for_job(
            job, status=dg.DagsterRunStatus.QUEUED, asset_selection=selection, remote_job_origin=origin_of(job.name),
            tags={} if selection else of.names.tags,
        )  # fmt: skip

    def until_stopped(bounds: Bounds) -> None:
        queue(Replication(Settings(name="other")))
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 2, what="more looks at the queue")
        assert not bounds.give_way.is_set()
        assert not bounds.stop.is_set()
        queue(OF)
        assert bounds.give_way.wait(60)

    monkeypatch.setattr(runs, "runs_of", counted)
    monkeypatch.setattr(runs, "_LOOK_SECONDS", 0.1)
    assert sync(instance, Script(wait=until_stopped), follow=True, give_way=True).success


@pytest.mark.long
@pytest.mark.takes(20)
def test_sync_ends_early_if_another_run_waits_for_the_pool_slot_of_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the instance does not limit pools by run, Dagster starts a run even if its pool has no free slot. The started
    run then waits until the sync has released the slot."""
    monkeypatch.setattr(runs, "_LOOK_SECONDS", 0.1)
    script, waited, results = Script(), list[set[str]](), list[dg.ExecuteInProcessResult]()
    (home := tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        limit_pool(instance, NAMES)
        RangeRegister(instance, NAMES).add(span(0x10, 0x20))
        backfill = threading.Thread(
            target=lambda: results.append(materialize(instance, script, [["public", "orders"]], [span(0x10, 0x20).key]))
        )

        def until_stopped(bounds: Bounds) -> None:
            assert waiting_for_pool(instance, NAMES) == set()
            backfill.start()
            wait_for(lambda: bool(waiting_for_pool(instance, NAMES)), what="the run in the pool")
            waited.append(waiting_for_pool(instance, NAMES))
            assert waiting_for_pool(instance, Names("other")) == set()
            assert script.asked == []
            assert bounds.give_way.wait(60)

        assert sync(instance, Script(wait=until_stopped), follow=True, give_way=True).success
        backfill.join(60)
        (result,) = results
        assert result.success
        assert waited == [{result.run_id}]
        assert script.asked == [("apply", (ORDERS,), span(0x10, 0x20))]
        assert waiting_for_pool(instance, NAMES) == set()


@pytest.mark.parametrize("prefix", [["house"], []], ids=["key_prefix", "map_asset_specs"])
def test_selected_assets_are_materialised_even_if_a_user_changed_their_keys_or_groups(
    instance: dg.DagsterInstance, prefix: list[str]
) -> None:
    """The user's project puts its own prefix before the keys of our assets, or changes their groups."""
    RangeRegister(instance, NAMES).add(span(0x10, 0x20))
    key, script = span(0x10, 0x20).key, Script(copies=[CopyReport(EVENTS, Lsn(0x90), 12, 100, 1, 0.5, 4)])
    assets: list[Any] = list(location(OF, script).assets or ())
    if prefix:
        module = ModuleType("users_module")
        vars(module).update({f"of_kind_{number}": found for number, found in enumerate(assets)})
        assets = [*dg.load_assets_from_modules([module], key_prefix=prefix)]
    else:
        assets = [*dg.map_asset_specs(lambda spec: spec.replace_attributes(group_name="house"), assets)]
    job = dg.Definitions(assets=assets, resources=resources(script)).resolve_implicit_global_asset_job_def()

    def run(partition: str, *keys: dg.AssetKey) -> None:
        tags = {f"dagster/asset_partition_range_{end}": partition for end in ("start", "end")}
        selection = [key.with_prefix(prefix) for key in keys]
        result = job.execute_in_process(instance=instance, asset_selection=selection, tags=tags,
                                        run_config={"loggers": QUIET})  # fmt: skip
        done = {key for event in result.get_asset_materialization_events() if (key := event.asset_key)}
        assert {*selection} <= done

    run(key, NAMES.change_log, NAMES.of_stage("changes", ORDERS), NAMES.of_stage("mirror", ORDERS))
    assert script.asked == [("check", span(0x10, 0x20)), ("transform", (ORDERS,), span(0x10, 0x20)),
                            ("apply", (ORDERS,), span(0x10, 0x20))]  # fmt: skip
    event = instance.get_latest_materialization_event(NAMES.of_stage("mirror", ORDERS).with_prefix(prefix))
    assert event is not None
    assert event.asset_materialization is not None
    found = event.asset_materialization
    assert (found.partition, found.metadata["rows_inserted"].value) == (key, 5)
    run(register_snapshot(instance, NAMES, Lsn(0x10)), NAMES.of_stage("snapshot", EVENTS))
    assert script.asked[-1][0] == "sync"


@pytest.mark.parametrize("prefix", [["house"], []], ids=["prefix", "none"])
def test_events_are_recorded_under_the_asset_keys_that_the_code_location_shows(
    instance: dg.DagsterInstance, prefix: list[str]
) -> None:
    """The user's project puts its own prefix before the keys of our assets."""
    module = ModuleType("users_module")
    vars(module).update({f"asset_{number}": found for number, found in enumerate(location(OF, Script()).assets or ())})
    defs = dg.Definitions(
        assets=dg.load_assets_from_modules([module], key_prefix=prefix or None, include_specs=True),
        resources=resources(Script()),
    )
    context = dg.build_sensor_context(instance=instance, repository_def=defs.get_repository_def())
    here = OF.within(context)
    shown = defs.resolve_asset_graph().get_all_asset_keys()
    assert {here.key(stage, table.name) for stage in STAGES for table in CATALOG.tables} <= shown
    assert {here.placed(key) for key in (NAMES.change_log, NAMES.consistent_points)} <= shown
    assert here.placed(NAMES.change_log) == NAMES.change_log.with_prefix(prefix)
    assert OF.within(dg.build_sensor_context(instance=instance)) is OF


def test_mirrors_that_are_materialised_for_several_ranges_are_applied_in_one_call(instance: dg.DagsterInstance) -> None:
    ranges = [span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)]
    for known in ranges:
        RangeRegister(instance, NAMES).add(known)
    script = Script()
    keys = [["public", "orders"], ["public", "events"]]
    assert materialize(instance, script, keys, [known.key for known in ranges[:2]]).success
    assert script.asked == [("apply", (ORDERS, EVENTS), span(0x10, 0x30))]
    found = metadata(instance, ["public", "orders"], ranges[1].key)
    assert (found["start_lsn"], found["end_lsn"], found["rows_inserted"]) == ("0/20", "0/30", 5)
    assert "0/10..0/30" in found["counted"]
    # Only one of the two ranges has the row counts. Otherwise sums over partitions would count the rows twice.
    first = metadata(instance, ["public", "orders"], ranges[0].key)
    assert (first["start_lsn"], first.get("rows_inserted"), first["counted"]) == ("0/10", None, found["counted"])
    assert ranges[2].key not in instance.get_materialized_partitions(NAMES.of_stage("mirror", EVENTS))


def test_stages_of_a_range_are_materialised_in_order_from_log_to_mirror(instance: dg.DagsterInstance) -> None:
    RangeRegister(instance, NAMES).add(span(0x10, 0x20))
    script = Script()
    keys = [["public", "orders"], ["changes", "public", "orders"], ["change_log"]]
    assert materialize(instance, script, keys, [span(0x10, 0x20).key]).success
    assert [asked[0] for asked in script.asked] == ["check", "transform", "apply"]


def test_logical_messages_are_reported_for_each_range_and_can_be_materialised_again(
    instance: dg.DagsterInstance,
) -> None:
    known = span(0x10, 0x20)
    script = Script(ranges=[replace(report_of(known, ORDERS), messages=MessagesReport(3, Lsn(0x20), 1))])
    assert sync(instance, script).success
    found = metadata(instance, ["messages"], known.key)
    assert (found["rows"], found["messages_lsn"], found["end_lsn"], found["delta_version"]) == (3, "0/20", "0/20", 1)
    assert materialize(instance, script, [["messages"]], [known.key]).success
    assert script.asked[-1] == ("messages", known)
    assert metadata(instance, ["messages"], known.key)["rows"] == 4
    # If a range has no report about messages, as without the setting ``messages``, the asset is not materialised.
    later = span(0x20, 0x30)
    assert sync(instance, Script(ranges=[report_of(later, ORDERS)])).success
    assert later.key not in instance.get_materialized_partitions(NAMES.messages)


def test_run_succeeds_although_one_selected_key_is_not_a_range_and_another_was_deleted(
    instance: dg.DagsterInstance,
) -> None:
    """Dagster's dialog selects all partitions by default, so the selection may contain such keys."""
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        RangeRegister(instance, NAMES).add(known)
    instance.delete_dynamic_partition(RANGES, span(0x20, 0x30).key)
    instance.add_dynamic_partitions(RANGES, ["2026-01-01"])
    keys = [span(0x10, 0x20).key, span(0x30, 0x40).key, "2026-01-01"]
    script = Script()
    assert materialize(instance, script, [["change_log"], ["public", "orders"]], [keys[0], keys[-1]]).success
    assert script.asked == [("check", span(0x10, 0x40)), ("apply", (ORDERS,), span(0x10, 0x40))]
    assert "not a range of the change log" in metadata(instance, ["public", "orders"], "2026-01-01")["passed_over"]
    found = [metadata(instance, ["public", "orders"], key).get("rows_inserted") for key in keys]
    assert found == [None, 5, None]
    # ``mend``, which every sync calls, registers the deleted range again. The next sync succeeds.
    log = ChangeLog(Settings().layout)
    log.create(Identity("1", "db", "s"), Lsn(0x10), 1)
    assert RangeRegister(instance, NAMES).mend() == [span(0x20, 0x30)]
    assert sync(instance, script).success


def test_partition_key_that_is_not_an_lsn_range_is_reported_by_the_asset_check_of_the_slot(
    instance: dg.DagsterInstance,
) -> None:
    assert [p.thing for p in current_health(Replication(Settings()), instance).problems if "partition" in p.thing] == []
    instance.add_dynamic_partitions(RANGES, ["2026-01-01"])
    (problem,) = [p for p in current_health(Replication(Settings()), instance).problems if "partition" in p.thing]
    assert (problem.severity, problem.thing) == ("warning", "partition '2026-01-01' of pgcdc_lsn_ranges")
    (slot, *_) = evaluations(Replication(Settings()), current_health(Replication(Settings()), instance))
    assert "2026-01-01" in str(slot.description)
    assert "Delete partitions" in str(slot.description)


def test_an_unreachable_lake_fails_the_check_of_every_mirror(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(settings: Settings) -> status.Status:
        raise StoreFailed("does not answer", thing="s3://bucket/lake")

    monkeypatch.setattr(status, "status", out_of_reach)
    found = evaluations(Replication(Settings()), current_health(Replication(Settings()), instance))
    assert [check.asset_key.path for check in found] == [
        ["pgcdc", "slot"], ["pgcdc", "public", "orders"], ["pgcdc", "public", "events"],
    ]  # fmt: skip
    assert all("s3://bucket/lake does not answer" in str(check.description) and not check.passed for check in found)


def test_materialising_snapshots_copies_only_tables_without_a_copy(instance: dg.DagsterInstance) -> None:
    old = LsnRange(ZERO, Lsn(0x10)).key
    instance.add_dynamic_partitions(COPIES, [old])
    script = Script(copies=[CopyReport(ORDERS, Lsn(0x90), 12, 100, 1, 0.5, 4)])
    keys = [["snapshot", "public", "orders"], ["snapshot", "public", "events"]]
    result = materialize(instance, script, keys, [old])
    assert result.success
    assert script.asked[0][3] == ()
    done = {event.asset_key for event in result.asset_materializations_for_node("pgcdc_snapshot_assets")}
    assert NAMES.of_stage("snapshot", EVENTS) not in done
    assert NAMES.of_stage("snapshot", ORDERS) in done


def test_materialising_a_snapshot_copies_a_table_again_if_the_configuration_says_so(
    instance: dg.DagsterInstance,
) -> None:
    old, new = LsnRange(ZERO, Lsn(0x10)).key, LsnRange(ZERO, Lsn(0x90)).key
    instance.add_dynamic_partitions(COPIES, [old])
    script = Script(copies=[CopyReport(EVENTS, Lsn(0x90), 12, 100, 1, 0.5, 4)])
    config = {"copy_again": True}
    snapshots = [["snapshot", "public", "events"]]
    assert materialize(instance, script, snapshots, [old], pgcdc_snapshot_assets=config).success
    assert script.asked[0][3] == (EVENTS,)
    assert metadata(instance, ["snapshot", "public", "events"], new)["consistent_point"] == "0/90"
    assert instance.get_dynamic_partitions(COPIES) == [old, new]


def repaired(instance: dg.DagsterInstance, asked: LsnRange) -> dict[str, dict[str, Any]]:
    """Runs a repair of a range while Dagster has three ranges from 0/10 to 0/40. Returns the metadata of the
    materializations of the mirror, by partition key."""
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        RangeRegister(instance, NAMES).add(known)
    script = Script()
    config = {"table": "orders", "span": str(asked)}
    result = repair_job(OF).execute_in_process(
        run_config={"ops": {NAMES.of(REPAIR_OP): {"config": config}}, "loggers": QUIET},
        instance=instance,
        resources=resources(script),
    )
    assert result.success
    assert script.asked == [("repair", ORDERS, asked)]
    done = sorted(instance.get_materialized_partitions(NAMES.of_stage("mirror", ORDERS)))
    return {key: metadata(instance, ["public", "orders"], key) for key in done}


def test_a_repair_is_recorded_as_a_materialization_of_each_range_that_it_covers(instance: dg.DagsterInstance) -> None:
    done = repaired(instance, span(0x10, 0x30))
    assert list(done) == [span(0x10, 0x20).key, span(0x20, 0x30).key]
    first, last = done.values()
    assert (first["start_lsn"], first["end_lsn"], first["repaired"]) == ("0/10", "0/20", True)
    assert (last["start_lsn"], last["end_lsn"], last["repaired"]) == ("0/20", "0/30", True)
    assert (first.get("rows_inserted"), last["rows_inserted"]) == (None, 5)
    assert "0/10..0/30" in first["counted"] == last["counted"]


def test_a_repair_says_that_it_counted_more_than_the_only_range_that_it_covers(instance: dg.DagsterInstance) -> None:
    done = repaired(instance, span(0x10, 0x28))
    (only,) = done.values()
    assert (only["start_lsn"], only["end_lsn"], only["rows_inserted"]) == ("0/10", "0/20", 5)
    assert "0/10..0/28" in only["counted"]
    assert list(done) == [span(0x10, 0x20).key]
