"""`pgcdc up` without any other command: its daemon and its sensor apply committed changes to the mirrors."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.parse
import urllib.request
from functools import partial

import psutil
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.lsn import Lsn, LsnRange
from tests.end_to_end.served import TABLES, Served
from tests.oracle import assert_equal
from tests.waiting import wait_for

pytestmark = pytest.mark.process

CHECKS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization { status } } } } } } }"""


def status_of(up: Served, order: int) -> str | None:
    """The status of an order, read from the mirror by delta-rs. None if the table does not exist yet."""
    path = up.project.lake / "public" / "orders"
    if not DeltaTable.is_deltatable(str(path)):
        return None
    query = f"SELECT status FROM orders WHERE id = {order}"
    found = QueryBuilder().register("orders", DeltaTable(str(path))).execute(query).read_all()
    return str(found["status"][0].as_py()) if found.num_rows else None


def check_passed(up: Served, table: str) -> bool:
    node = up.ask(CHECKS, key={"path": ["pgcdc", "public", table]})["assetNodeOrError"]
    (check,) = (found for found in node["assetChecksOrError"]["checks"] if found["name"] == "followed")
    return bool(check["executionForLatestMaterialization"] == {"status": "SUCCEEDED"})


def test_a_committed_change_reaches_the_mirror(up: Served) -> None:
    up.wait(lambda: all(up.materialised("snapshot", "public", table) for table in TABLES), "the copies")
    assert status_of(up, 907) == "open"
    up.follow("UPDATE public.orders SET status = 'shipped' WHERE id = 907")
    assert status_of(up, 907) == "shipped"
    with up.connect() as conn:
        assert_equal(conn, up.project.lake, *(f"public.{table}" for table in TABLES))


def test_a_range_is_materialised_in_each_asset_that_its_transactions_changed(up: Served) -> None:
    key = up.follow("UPDATE public.orders SET status = 'returned' WHERE id IN (8, 9)")
    span = LsnRange.from_key(key)
    for asset in (["change_log"], ["changes", "public", "orders"], ["public", "orders"], ["consistent_points"]):
        found = up.materialised(*asset)[key]
        assert found["start_lsn"] == str(span.start), asset
        assert found["end_lsn"] == str(span.end), asset
        assert Lsn.parse(found["transform_lsn"]) >= span.end, asset
        assert Lsn.parse(found["replay_lsn"]) >= span.end, asset
        assert found["end_lsn_int"] == int(span.end), asset
    assert up.materialised("change_log")[key]["rows_updates"] == 2
    assert up.materialised("public", "orders")[key]["rows_updated"] == 2
    assert key not in up.materialised("public", "customers"), "nothing changed in it"
    points = up.materialised("consistent_points")[key]
    assert (points["tables"], points["tables_changed"]) == (len(TABLES), 1)


def test_web_page_of_another_site_cannot_query_dagsters_webserver(up: Served) -> None:
    """Other tests of this module check that the webserver answers the queries of Dagster's own pages."""
    mutation = "mutation { setSensorEnabled }"
    by_image = f"{up.url}/graphql?{urllib.parse.urlencode({'query': mutation})}"
    assert _status(urllib.request.Request(by_image)) == 403
    page = urllib.request.Request(f"{up.url}/graphql", json.dumps({"query": mutation}).encode())
    page.add_header("Content-Type", "application/json")
    page.add_header("Origin", "https://evil.example")
    assert _status(page) == 403
    rebound = urllib.request.Request(up.url, headers={"Host": "evil.example"})
    assert _status(rebound) == 403
    assert _status(urllib.request.Request(up.url)) == 200


def _status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.long
@pytest.mark.takes(40)
def test_a_new_table_appears_in_the_asset_graph(up: Served) -> None:
    """Dagster loads the definitions again during the run that has found the table. The run is not interrupted by
    this."""
    nodes = "{ assetNodes { assetKey { path } } }"
    with up.connect() as conn:
        conn.execute("CREATE TABLE public.wishes (id int PRIMARY KEY, wish text)")
    up.wait(lambda: bool(up.materialised("snapshot", "public", "wishes")), "its copy")
    there = {"assetKey": {"path": ["pgcdc", "public", "wishes"]}}
    up.wait(lambda: there in up.ask(nodes)["assetNodes"], "its assets in the graph", seconds=60)
    up.follow("INSERT INTO public.wishes VALUES (1, 'peace')")
    with up.connect() as conn:
        assert_equal(conn, up.project.lake, "public.wishes")


@pytest.mark.long
@pytest.mark.takes(40)
def test_asset_checks_are_evaluated_after_the_newest_materialisation(up: Served) -> None:
    """If a check was evaluated before the newest materialization, the UI shows the check as not evaluated."""
    up.follow("UPDATE public.customers SET credit = credit + 1 WHERE id = 1")
    for table in TABLES:
        up.wait(partial(check_passed, up, table), f"the check of {table}", seconds=30)


@pytest.mark.long
def test_sigterm_ends_all_processes_of_pgcdc_up(up: Served) -> None:
    """The signal arrives during a run. This test must be the last test that uses the fixture ``up``, because it ends
    `pgcdc up`."""
    up.follow("UPDATE public.orders SET status = 'late' WHERE id = 10")
    family = up.marked()
    assert len(family) >= 4, "the command, the webserver, the daemon, a code server at least"
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(90) == 0, up.words
    assert up.marked() == []
    _gone, left = psutil.wait_procs(family, timeout=60)
    assert left == []
    slots = "SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()"
    with up.connect() as conn:
        wait_for(lambda: conn.execute(slots).fetchone() == (0,), 60, "the slot's release")
        assert_equal(conn, up.project.lake, "public.orders")
