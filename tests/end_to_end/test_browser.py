"""Dagster's UI in a real browser: the graph of assets, the metadata of a range, and a repair that is started in the
dialog "Materialize"."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from playwright.sync_api import FloatRect, Locator, Page, ViewportSize, expect, sync_playwright

from tests.end_to_end.served import TABLES, Served
from tests.oracle import assert_equal

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
WINDOW: ViewportSize = {"width": 1720, "height": 1330}
CANVAS: FloatRect = {"x": 380, "y": 180, "width": 1285, "height": 1005}
"""The area of the graph in this window, without the panels around it."""
PATIENCE = 60_000
"""The browser waits at most this many milliseconds for an element of a page. The time is long, because Spark may keep
the machine busy."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.timeout(600),  # Spark starts several times.
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """The page of a new browser. After the test, a screenshot of the page is saved in ``tmp_path``."""
    with sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, headless=True, args=ARGUMENTS,
            viewport={"width": 1600, "height": 900},
        )  # fmt: skip
        context.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        try:
            yield context.pages[0]
            context.pages[0].screenshot(path=tmp_path / "last.png")
        finally:
            context.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The folder for screenshots: the value of the environment variable ``SCREENSHOTS``, or ``tmp_path`` if it is not
    set."""
    return Path(os.environ.get("SCREENSHOTS", tmp_path))


def left(found: Locator) -> float:
    box = found.bounding_box()
    assert box is not None
    return box["x"]


@pytest.mark.takes(50)
def test_the_asset_graph_shows_slot_log_and_mirrors_from_left_to_right(up: Served, page: Page, pictures: Path) -> None:
    up.wait(lambda: all(up.materialised("snapshot", "public", table) for table in TABLES), "the copies")
    if not up.ranges():
        up.follow("UPDATE public.products SET price = price + 1 WHERE sku = 'P-1'")
    page.set_viewport_size(WINDOW)
    page.goto(f"{up.url}/asset-groups")
    page.get_by_text("Hide navigation").click()
    expect(page.get_by_text("pgcdc_snapshot", exact=True).first).to_be_visible()
    groups = [page.get_by_text(name, exact=True).last for name in ("pgcdc", "pgcdc_changes", "pgcdc_mirror")]
    assert [left(group) for group in groups] == sorted(left(group) for group in groups)

    page.keyboard.press("Alt+KeyE")  # Expand all groups.
    expect(page.get_by_text("consistent_points", exact=True)).to_be_visible()
    orders = page.get_by_text("orders", exact=True)
    expect(orders).to_have_count(4)
    # From left to right: the table in PostgreSQL, then its snapshot and its changes in any order, then its mirror.
    source, first, second, mirror = sorted(left(found) for found in orders.all())
    names = ("slot", "change_log", "consistent_points")
    slot, log, points = (left(page.get_by_text(name, exact=True)) for name in names)
    assert slot < log
    assert source < first <= second < mirror < points
    page.reload()  # After a reload, the expanded graph fits the window.
    expect(page.get_by_text("consistent_points", exact=True)).to_be_visible()
    # Dagster shows "100% filled" for each asset whose partitions are all materialized. These are at least five assets:
    # the change log, the consistent points, and the snapshots of three tables.
    expect(page.get_by_text("100% filled").nth(4)).to_be_visible()
    page.screenshot(path=pictures / "asset-graph.png", clip=CANVAS)


def test_backfill_of_past_ranges_repairs_a_damaged_mirror(up: Served, page: Page) -> None:
    while len(up.ranges()) < 2:
        up.follow("UPDATE public.products SET price = price + 1 WHERE sku IN ('P-1', 'P-2')")
    up.follow("UPDATE public.products SET name = 'Renamed' WHERE sku = 'P-3'")
    _damage(up.project.lake / "public" / "products")
    done = launch_all(up, page, "public/products")
    assert done in ("COMPLETED_SUCCESS", "SUCCESS")
    with up.connect() as conn:
        assert_equal(conn, up.project.lake, "public.products")


def launch_all(up: Served, page: Page, asset: str) -> str:
    """Launches all partitions of an asset through the dialog. Returns the final status of the run or backfill."""
    before = up.started_by_hand()
    page.goto(f"{up.url}/assets/pgcdc/{asset}?view=partitions")
    page.get_by_role("button", name="Materialize").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="All", exact=True).click()
    dialog.get_by_role("button", name=re.compile("^Launch")).click()
    up.wait(lambda: up.started_by_hand().keys() > before.keys(), "the launch", seconds=60)
    launched = next(id_ for id_ in up.started_by_hand() if id_ not in before)
    ended = ("SUCCESS", "FAILURE", "CANCELED", "FAILED")
    up.wait(lambda: up.started_by_hand()[launched].endswith(ended), "the end of what was launched", seconds=200)
    return up.started_by_hand()[launched]


def _damage(path: Path) -> None:
    """Changes a value of the mirror with delta-rs, so that the mirror differs from the source."""
    table = DeltaTable(str(path))
    rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())
    hit = pc.equal(rows["sku"].cast("string"), "P-3")
    assert pc.sum(hit).as_py() == 1
    index = rows.schema.get_field_index("name")
    changed = pc.if_else(hit, pa.scalar("changed from outside"), rows["name"].cast("string"))
    write_deltalake(table, rows.set_column(index, "name", changed), mode="overwrite")
