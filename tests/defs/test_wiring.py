"""Jobs and assets with an engine that only records: what the engine is asked, and what Dagster's instance gets."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from pgcdc_assets.checks import status
from pgcdc_assets.checks.health import Problem, TableFacts
from pgcdc_assets.checks.status import Status
from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.defs.assets import pipeline_assets
from pgcdc_assets.defs.checks import current_health, evaluations
from pgcdc_assets.defs.downstream import mirror_updated
from pgcdc_assets.defs.observer import Nobody
from pgcdc_assets.defs.partitions import RangeRegister
from pgcdc_assets.defs.runs import PROCESS_TAG
from pgcdc_assets.defs.sync import REPAIR_OP, SYNC_OP, repair_job, sync_job
from pgcdc_assets.errors import LockHeld, StoreFailed
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import MessagesReport
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import LOCATION, load_catalog, save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.processname import ProcessName
from tests.defs.catalogs import catalog_of
from tests.defs.doubles import QUIET, RecordingEngines, Script, report_of, span
from tests.deltatables import publish_at
from tests.projectfiles import CATALOG_FILE

ORDERS, EVENTS = TableName("public", "orders"), TableName("public", "events")
CATALOG = catalog_of(("public", "orders"), ("public", "events"))


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGCDC_SOURCE", "dbname=nowhere")
    save_catalog(CATALOG, CATALOG_FILE)


def sync(instance: dg.DagsterInstance, script: Script, **config: Any) -> dg.ExecuteInProcessResult:
    return sync_job.execute_in_process(
        run_config={"ops": {SYNC_OP: {"config": config}}, "loggers": QUIET},
        instance=instance,
        resources={"engines": RecordingEngines(script), "watcher": Nobody()},
        raise_on_error=False,
    )


def materialize(
    instance: dg.DagsterInstance, script: Script, keys: Sequence[Sequence[str]], partitions: Sequence[str]
) -> dg.ExecuteInProcessResult:
    """As the UI does it: one run over a range of partitions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        defs = dg.Definitions(
            assets=pipeline_assets(CATALOG, messages=True),
            resources={"engines": RecordingEngines(script), "watcher": Nobody()},
            executor=dg.in_process_executor,
        )
    first, last = (partitions[0], partitions[-1]) if partitions else ("000000000020", "000000000010")
    return defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        asset_selection=[dg.AssetKey(list(key)) for key in keys],
        tags={"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last},
        run_config={"loggers": QUIET},
        raise_on_error=False,
    )


def metadata(instance: dg.DagsterInstance, key: Sequence[str], partition: str) -> dict[str, Any]:
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey(list(key)), asset_partitions=[partition]), limit=1
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


def test_a_closed_range_is_registered_and_changed_tables_are_materialised(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    publish_at(ConsistentPoints(Settings().layout), 0x20, {ORDERS: 3, EVENTS: 7})
    report = report_of(span(0x10, 0x20), ORDERS)
    script = Script(copies=[CopyReport(ORDERS, Lsn(0x10), 40, 4000, 2, 1.5, 1)], ranges=[report])
    assert sync(instance, script).success

    assert RangeRegister(instance).known() == [report.span]
    key = report.span.key
    log = metadata(instance, ["change_log"], key)
    assert {name: log[name] for name in ("start_lsn", "end_lsn", "transform_lsn", "transactions", "rows_inserts")} == {
        "start_lsn": "0/10", "end_lsn": "0/20", "transform_lsn": "0/20", "transactions": 3, "rows_inserts": 5,
    }  # fmt: skip
    assert (log["end_lsn_int"], log["lag_bytes"], log["lag_seconds"], log["bytes"]) == (0x20, 16, 0.75, 1000)
    changed = metadata(instance, ["public", "orders"], key)
    assert (changed["rows_inserted"], changed["delta_version"], changed["replay_lsn"]) == (5, 3, "0/20")
    assert metadata(instance, ["changes", "public", "orders"], key)["rows_insert"] == 5
    points = metadata(instance, ["consistent_points"], key)
    assert (points["tables"], points["tables_changed"]) == (2, 1)

    copied = metadata(instance, ["snapshot", "public", "orders"], "000000000000-000000000010")
    assert (copied["consistent_point"], copied["dagster/row_count"]) == ("0/10", 40)
    assert instance.get_dynamic_partitions("snapshot_ranges") == ["000000000000-000000000010"]


def recorded(instance: dg.DagsterInstance, run_id: str, *types: dg.DagsterEventType) -> list[str]:
    """The assets of a run's events of these types, in order."""
    found = [entry.get_dagster_event() for entry in instance.all_logs(run_id, of_type=set(types))]
    return [
        (event.asset_key or event.asset_check_evaluation_data.asset_key).to_user_string() for event in found
    ]  # fmt: skip


def test_a_table_that_did_not_change_records_nothing(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It records no materialisation when a range is closed, and no check that passes again."""
    monkeypatch.setattr("pgcdc_assets.defs.checks.current_health", lambda settings, instance: health())
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


def test_a_check_is_recorded_when_its_result_changes(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes changes in a later run, and a check that passes again."""
    failing = Problem("error", f"table {EVENTS}", "is set aside", "copy it again")
    told = iter([health(), health(failing), health(failing), health(), health()])
    monkeypatch.setattr("pgcdc_assets.defs.checks.current_health", lambda settings, instance: next(told))
    runs = [sync(instance, Script(ranges=[report_of(span(n, n + 16))])) for n in (0x10, 0x20, 0x30, 0x40, 0x50)]
    checks = [recorded(instance, run.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION) for run in runs]
    assert checks == [["slot", "public/orders", "public/events"], ["public/events"], ["public/events"],
                      ["public/events"], []]  # fmt: skip


def test_a_copy_is_checked_in_its_own_run(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster shows a check as not evaluated if it is older than the newest materialisation."""
    monkeypatch.setattr("pgcdc_assets.defs.checks.current_health", lambda settings, instance: health())
    assert sync(instance, Script(ranges=[report_of(span(0x10, 0x20))])).success
    copies = [CopyReport(table, Lsn(0x20), 40, 4000, 2, 1.5, 1) for table in (ORDERS, EVENTS)]
    run = sync(instance, Script(copies=copies))
    checks = recorded(instance, run.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    assert {"public/orders", "public/events"} <= set(checks)


def health(*problems: Problem) -> Status:
    tables = [TableFacts(table, TableState.STREAMING, Lsn(0x10)) for table in (ORDERS, EVENTS)]
    return Status(None, Lsn(0x10), Lsn(0x10), 0, tuple(tables), problems)


def test_the_saved_catalog_is_read_once_per_run(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exception: the catalog was saved again in the meantime."""
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
    event = instance.get_latest_materialization_event(dg.AssetKey(list(key)))
    assert event is not None
    assert event.asset_materialization is not None
    return event.asset_materialization


def test_a_mirror_is_materialised_when_its_copy_is_complete(instance: dg.DagsterInstance) -> None:
    """This is also true on a source without changes, where no range is closed."""
    assert sync(instance, Script(copies=[CopyReport(ORDERS, Lsn(0x10), 40, 4000, 2, 1.5, 1)])).success
    found = latest(instance, "public", "orders")
    assert (found.partition, found.metadata["dagster/row_count"].value) == (None, 40)
    assert str(found.metadata["dagster/uri"].value).endswith("/lake/public/orders")
    RangeRegister(instance).add(span(0x10, 0x20))
    RangeRegister(instance).add(span(0x20, 0x30))
    assert sync(instance, Script(copies=[CopyReport(EVENTS, Lsn(0x28), 7, 70, 1, 1.5, 1)])).success
    found = latest(instance, "public", "events")
    assert (found.partition, found.metadata["dagster/row_count"].value) == (span(0x10, 0x20).key, 7)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Parameter `include_sources`")
@pytest.mark.parametrize(
    ("condition", "fires"), [(dg.AutomationCondition.eager(), False), (mirror_updated(), True)], ids=["eager", "ours"]
)
def test_an_asset_on_a_table_published_later_runs_with_our_condition(
    instance: dg.DagsterInstance, condition: dg.AutomationCondition[dg.AssetKey], fires: bool
) -> None:
    """The table lacks the ranges before its copy. ``eager`` waits for these ranges until the retention deletes their
    keys."""
    points = ConsistentPoints(Settings().layout)
    publish_at(points, 0x20, {ORDERS: 3})
    assert sync(instance, Script(ranges=[report_of(span(0x10, 0x20), ORDERS)])).success
    assert sync(instance, Script(ranges=[report_of(span(0x20, 0x30), ORDERS)])).success

    @dg.asset(deps=[dg.AssetKey(["public", "events"])], automation_condition=condition)
    def on_events() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        defs = dg.Definitions(
            assets=[*pipeline_assets(CATALOG), on_events],
            resources={"engines": RecordingEngines(Script()), "watcher": Nobody()},
        )
    first = dg.evaluate_automation_conditions(defs, instance)
    publish_at(points, 0x40, {ORDERS: 4, EVENTS: 2})
    copy = CopyReport(EVENTS, Lsn(0x30), 7, 70, 1, 1.5, 1)
    assert sync(instance, Script(copies=[copy], ranges=[report_of(span(0x30, 0x40), EVENTS)])).success
    second = dg.evaluate_automation_conditions(defs, instance, cursor=first.cursor)
    assert second.total_requested == fires
    # A range in which only another table changed.
    publish_at(points, 0x50, {ORDERS: 5, EVENTS: 2})
    assert sync(instance, Script(ranges=[report_of(span(0x40, 0x50), ORDERS)])).success
    third = dg.evaluate_automation_conditions(defs, instance, cursor=second.cursor)
    assert third.total_requested == 0


def test_a_table_that_no_point_lists_is_not_materialised(instance: dg.DagsterInstance) -> None:
    publish_at(ConsistentPoints(Settings().layout), 0x20, {ORDERS: 3})
    report = report_of(span(0x10, 0x20), ORDERS)
    assert sync(instance, Script(ranges=[report])).success
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey(["public", "events"])), limit=1
    ).records
    assert not found


def test_a_run_names_its_process_and_passes_its_limits(instance: dg.DagsterInstance) -> None:
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


def test_ranges_of_an_earlier_log_are_removed(instance: dg.DagsterInstance) -> None:
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        RangeRegister(instance).add(known)
    ChangeLog(Settings().layout).create(Identity("1", "db", "s"), Lsn(0x20), 1)
    script = Script()
    assert sync(instance, script).success
    assert script.asked[0][4] == []
    assert RangeRegister(instance).known() == []


def test_our_errors_are_run_failures_of_one_line(instance: dg.DagsterInstance) -> None:
    result = sync(instance, Script(error=LockHeld("`pgcdc follow` (pid 7) is writing to this lake", thing="/lake")))
    assert not result.success
    assert failure(result) == "/lake: `pgcdc follow` (pid 7) is writing to this lake; wait for it, or stop it"


def test_a_signal_ends_the_run_successfully_at_a_boundary(instance: dg.DagsterInstance) -> None:
    def until_stopped(bounds: Bounds) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert bounds.stop.wait(60)

    assert sync(instance, Script(wait=until_stopped), follow=True).success


def test_a_run_that_gives_way_ends_when_another_run_waits(instance: dg.DagsterInstance) -> None:
    def until_stopped(bounds: Bounds) -> None:
        assert not bounds.stop.is_set()
        instance.create_run_for_job(
            sync_job,
            status=dg.DagsterRunStatus.QUEUED,
            remote_job_origin=origin_of("sync"),
        )
        assert bounds.give_way.wait(60)

    result = sync(instance, Script(wait=until_stopped), follow=True, give_way=True)
    assert result.success


def test_materialising_several_ranges_of_mirrors_is_one_apply(instance: dg.DagsterInstance) -> None:
    ranges = [span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)]
    for known in ranges:
        RangeRegister(instance).add(known)
    script = Script()
    keys = [["public", "orders"], ["public", "events"]]
    assert materialize(instance, script, keys, [known.key for known in ranges[:2]]).success
    assert script.asked == [("apply", (ORDERS, EVENTS), span(0x10, 0x30))]
    found = metadata(instance, ["public", "orders"], ranges[1].key)
    assert (found["start_lsn"], found["end_lsn"], found["rows_inserted"]) == ("0/20", "0/30", 5)
    assert "2 partitions" in found["counted"]
    # Rows are counted at one range only, so that plots and sums over partitions are right.
    first = metadata(instance, ["public", "orders"], ranges[0].key)
    assert (first["start_lsn"], first.get("rows_inserted"), first["counted"]) == ("0/10", None, found["counted"])
    assert ranges[2].key not in instance.get_materialized_partitions(dg.AssetKey(["public", "events"]))


def test_materialising_every_stage_of_a_range_runs_downstream(instance: dg.DagsterInstance) -> None:
    RangeRegister(instance).add(span(0x10, 0x20))
    script = Script()
    keys = [["public", "orders"], ["changes", "public", "orders"], ["change_log"]]
    assert materialize(instance, script, keys, [span(0x10, 0x20).key]).success
    assert [asked[0] for asked in script.asked] == ["check", "transform", "apply"]


def test_messages_are_reported_by_range_and_can_be_derived_again(instance: dg.DagsterInstance) -> None:
    known = span(0x10, 0x20)
    script = Script(ranges=[replace(report_of(known, ORDERS), messages=MessagesReport(3, Lsn(0x20), 1))])
    assert sync(instance, script).success
    found = metadata(instance, ["messages"], known.key)
    assert (found["rows"], found["messages_lsn"], found["end_lsn"], found["delta_version"]) == (3, "0/20", "0/20", 1)
    assert materialize(instance, script, [["messages"]], [known.key]).success
    assert script.asked[-1] == ("messages", known)
    assert metadata(instance, ["messages"], known.key)["rows"] == 4
    # Without the setting, no messages are reported.
    later = span(0x20, 0x30)
    assert sync(instance, Script(ranges=[report_of(later, ORDERS)])).success
    assert later.key not in instance.get_materialized_partitions(dg.AssetKey(["messages"]))


def test_an_odd_key_and_a_deleted_key_stop_no_run(instance: dg.DagsterInstance) -> None:
    """Dagster's dialogue offers all partitions as the default."""
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        RangeRegister(instance).add(known)
    instance.delete_dynamic_partition("lsn_ranges", span(0x20, 0x30).key)
    instance.add_dynamic_partitions("lsn_ranges", ["2026-01-01"])
    keys = [span(0x10, 0x20).key, span(0x30, 0x40).key, "2026-01-01"]
    script = Script()
    assert materialize(instance, script, [["change_log"], ["public", "orders"]], [keys[0], keys[-1]]).success
    assert script.asked == [("check", span(0x10, 0x40)), ("apply", (ORDERS,), span(0x10, 0x40))]
    assert "no range of the log" in metadata(instance, ["public", "orders"], "2026-01-01")["passed_over"]
    found = [metadata(instance, ["public", "orders"], key).get("rows_inserted") for key in keys]
    assert found == [None, 5, None]
    # The next sync sees the ranges in order and continues.
    log = ChangeLog(Settings().layout)
    log.create(Identity("1", "db", "s"), Lsn(0x10), 1)
    assert RangeRegister(instance).mend() == [span(0x20, 0x30)]
    assert sync(instance, script).success


def test_an_odd_key_is_reported_by_the_check_of_the_slot(instance: dg.DagsterInstance) -> None:
    assert [p.thing for p in current_health(Settings(), instance).problems if "partition" in p.thing] == []
    instance.add_dynamic_partitions("lsn_ranges", ["2026-01-01"])
    (problem,) = [p for p in current_health(Settings(), instance).problems if "partition" in p.thing]
    assert (problem.severity, problem.thing) == ("warning", "partition '2026-01-01' of lsn_ranges")
    (slot, *_) = evaluations(Settings(), current_health(Settings(), instance))
    assert "2026-01-01" in str(slot.description)
    assert "Delete partitions" in str(slot.description)


def test_an_unreachable_lake_fails_the_check_of_every_mirror(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(settings: Settings) -> status.Status:
        raise StoreFailed("does not answer", thing="s3://bucket/lake")

    monkeypatch.setattr(status, "status", out_of_reach)
    found = evaluations(Settings(), current_health(Settings(), instance))
    assert [check.asset_key.path for check in found] == [["slot"], ["public", "orders"], ["public", "events"]]
    assert all("s3://bucket/lake does not answer" in str(check.description) and not check.passed for check in found)


def test_materialising_a_snapshot_makes_a_new_copy_and_registers_its_key(instance: dg.DagsterInstance) -> None:
    old, new = LsnRange(ZERO, Lsn(0x10)).key, LsnRange(ZERO, Lsn(0x90)).key
    instance.add_dynamic_partitions("snapshot_ranges", [old])
    script = Script(copies=[CopyReport(EVENTS, Lsn(0x90), 12, 100, 1, 0.5, 4)])
    assert materialize(instance, script, [["snapshot", "public", "events"]], [old]).success
    assert script.asked[0][3] == (EVENTS,)
    assert metadata(instance, ["snapshot", "public", "events"], new)["consistent_point"] == "0/90"
    assert instance.get_dynamic_partitions("snapshot_ranges") == [old, new]


def test_a_repair_is_recorded_at_the_ranges_it_covered(instance: dg.DagsterInstance) -> None:
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        RangeRegister(instance).add(known)
    script = Script()
    result = repair_job.execute_in_process(
        run_config={"ops": {REPAIR_OP: {"config": {"table": "orders", "span": "0/10..0/30"}}}, "loggers": QUIET},
        instance=instance,
        resources={"engines": RecordingEngines(script), "watcher": Nobody()},
    )
    assert result.success
    assert script.asked == [("repair", ORDERS, span(0x10, 0x30))]
    done = instance.get_materialized_partitions(dg.AssetKey(["public", "orders"]))
    assert done == {span(0x10, 0x20).key, span(0x20, 0x30).key}
    assert metadata(instance, ["public", "orders"], span(0x10, 0x20).key)["repaired"] is True
