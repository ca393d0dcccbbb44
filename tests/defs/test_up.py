"""``pgcdc up`` as a user has it: the sensor alone, with the daemon running, carries changes into the mirrors."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import psycopg
import pytest
from dagster._core.instance import InstanceRef

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow import lock
from tests.end_to_end.command import Project, wait_for
from tests.fix_postgres import Database
from tests.oracle import assert_equal, mirror_rows
from tests.ports import held_port

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    return Project(
        tmp_path,
        {
            "PGCDC_SOURCE": database.conninfo,
            "PGCDC_SLOT": f"s_{database.name}"[:60],
            "PGCDC_SENSOR_SECONDS": "1",
            "PGCDC_IDLE_SECONDS": "5",
            "PGCDC_RANGE_SECONDS": "3",
        },
    )


class Ui:
    """Dagster's GraphQL, as its pages use it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/graphql"

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None
        assert "errors" not in found, found["errors"]
        return dict(found["data"])

    def backfill(self, key: Sequence[str], partitions: Sequence[str]) -> str:
        """Launch a backfill of some partitions, as the button does."""
        found = self.ask(
            """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
                 __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
            params={"assetSelection": [{"path": list(key)}], "partitionNames": list(partitions), "tags": []},
        )["launchPartitionBackfill"]
        assert found["__typename"] == "LaunchBackfillSuccess", found
        return str(found["backfillId"])

    def backfill_status(self, backfill: str) -> str:
        query = """query ($id: String!) { partitionBackfillOrError(backfillId: $id) {
                     ... on PartitionBackfill { status } } }"""
        return str(self.ask(query, id=backfill)["partitionBackfillOrError"]["status"])


def events(project: Project, key: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Newest materialisation of every partition of an asset: metadata by partition."""
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(project.folder / ".dagster"))) as instance:
        records = instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey(list(key))), limit=200
        ).records
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        event = record.asset_materialization
        assert event is not None
        if event.partition is not None:  # A mirror's copy, before there is any range.
            found.setdefault(event.partition, {name: value.value for name, value in event.metadata.items()})
    return found


def notes(project: Project) -> set[str]:
    return {note for _, note in mirror_rows(project.lake, "public/orders", ["id", "note"])}


def test_the_sensor_alone_carries_changes_and_the_ui_repairs(project: Project, database: Database) -> None:
    port = held_port()
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.orders (id int PRIMARY KEY, note text)")
        conn.execute("INSERT INTO public.orders SELECT g, 'n' || g FROM generate_series(1, 100) g")
        with project.running("up", "--port", str(port)) as up:
            wait_for(lambda: "Dagster's UI" in project.log("up") or up.poll() is not None, what="the UI")
            assert up.poll() is None, project.log("up")
            wait_for(lambda: events(project, ["snapshot", "public", "orders"]) != {}, what="the copy")
            conn.execute("INSERT INTO public.orders VALUES (1001, 'first')")
            wait_for(lambda: events(project, ["public", "orders"]) != {}, what="the first range")
            assert_equal(conn, project.lake, "public.orders")
            _the_next_run_takes_over(project, conn)
            _a_range_and_a_copy_by_hand(project, Ui(port), conn)
            children = psutil.Process(up.pid).children(recursive=True)
            up.send_signal(signal.SIGTERM)
            assert up.wait(120) == 0, project.log("up")
            _gone, left = psutil.wait_procs(children, timeout=5)
            assert not left
        assert_equal(conn, project.lake, "public.orders")


def _the_next_run_takes_over(project: Project, conn: psycopg.Connection[Any]) -> None:
    """Idle, the run ends; a change then comes through a run that the sensor asks for."""
    layout = Layout.of(project.lake)
    wait_for(lambda: lock.holder(layout) is None, what="the end of the idle run")
    conn.execute("UPDATE public.orders SET note = 'second' WHERE id = 5")
    wait_for(lambda: "second" in notes(project), what="the change")


def _a_range_and_a_copy_by_hand(project: Project, ui: Ui, conn: psycopg.Connection[Any]) -> None:
    ranges = sorted(events(project, ["public", "orders"]))
    found = events(project, ["change_log"])[ranges[0]]
    assert found["transactions"] >= 1
    assert found["end_lsn_int"] > found["start_lsn_int"]
    backfill = ui.backfill(["public", "orders"], ranges[:1])
    wait_for(lambda: ui.backfill_status(backfill).startswith("COMPLETED"), what="the repair")
    assert ui.backfill_status(backfill) == "COMPLETED_SUCCESS"
    copies = set(events(project, ["snapshot", "public", "orders"]))
    again = ui.backfill(["snapshot", "public", "orders"], sorted(copies)[:1])
    wait_for(lambda: ui.backfill_status(again).startswith("COMPLETED"), what="the new copy")
    assert ui.backfill_status(again) == "COMPLETED_SUCCESS"
    assert set(events(project, ["snapshot", "public", "orders"])) > copies
