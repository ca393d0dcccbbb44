"""The snippets of docs/guides/differences.md and docs/reference/change_feed.md do what the pages say."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed import table as feed_table
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from tests.flow.rig import Rig, following

DOCS = Path(__file__).parents[2] / "docs"
ORDERS = TableName("public", "orders")
WORDS = 1500


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def orders(rig: Rig) -> Rig:
    """A project whose only table is ``orders``, with one large value in each row."""
    rig.conn.execute("CREATE TABLE orders (id int PRIMARY KEY, status text, note text)")
    rig.conn.execute("ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    rig.conn.execute("INSERT INTO orders SELECT g, 'new', repeat(md5(g::text), 200) FROM generate_series(1, 9) g")
    return rig.started(tables=("public.orders",), messages=("*",))


@pytest.mark.parametrize("page", ["guides/differences.md", "reference/change_feed.md"])
def test_a_page_is_short(page: str) -> None:
    assert len((DOCS / page).read_text().split()) < WORDS


@pytest.mark.long
def test_wait_diff_history_and_undo(orders: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert orders.settings.source is not None
    monkeypatch.setenv("PGCDC_SOURCE", orders.settings.source)
    wait, diff, history, undo = snippets("guides/differences.md")
    found: dict[str, Any] = {}
    with following(orders):
        exec(wait, found)
    assert {row["status"] for row in found["orders"].to_pylist() if row["id"] == 1} == {"paid"}
    exec(diff, found)
    (change,) = found["change"].to_pylist()
    assert (change["kind"], change["before"]["status"], change["after"]["status"]) == ("update", "new", "paid")
    assert len(change["before"]["note"]) == len(change["after"]["note"]) == 6400
    exec(history, found)
    (version,) = found["history"].versions.to_pylist()
    assert (version["kind"], version["row"]["status"], version["unknown"]) == ("update_postimage", "paid", ["note"])
    assert version["messages"] == []
    exec(undo, found)
    assert orders.conn.execute("SELECT DISTINCT status FROM orders").fetchall() == [("new",)]
    found["source"].close()


class Died(Exception):
    """The consumer dies."""


@pytest.mark.long
def test_a_consumer_takes_each_change_once(orders: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = snippets("reference/change_feed.md")
    found: dict[str, Any] = {}
    exec(snippet, found)
    lake, take = Lake(orders.lake), found["take"]
    target = sqlite3.connect("copy.db")
    target.executescript("CREATE TABLE orders (id PRIMARY KEY, status, note); CREATE TABLE progress (lsn)")

    def consumed(*statements: str) -> None:
        for statement in statements:
            orders.conn.execute(statement.encode())
        orders.sync()
        found["consume"](lake, target)
        rows = "SELECT id, status, note FROM orders ORDER BY id"
        assert target.execute(rows).fetchall() == orders.conn.execute(rows.encode()).fetchall()

    consumed()
    consumed("UPDATE orders SET status = 'paid' WHERE id < 4", "UPDATE orders SET id = 20 WHERE id = 1",
             "UPDATE orders SET id = id + 100 WHERE id > 4", "DELETE FROM orders WHERE id = 2",
             "INSERT INTO orders VALUES (1, 'back', NULL)")  # fmt: skip

    def dies(target: sqlite3.Connection, parts: Iterator[Any]) -> None:
        take(target, parts)
        raise Died

    with monkeypatch.context() as patched:
        patched.setitem(found, "take", dies)
        with pytest.raises(Died):
            consumed(
                "UPDATE orders SET status = status || '+'",
                "BEGIN; TRUNCATE orders; INSERT INTO orders VALUES (7); COMMIT",
            )
    consumed("INSERT INTO orders VALUES (8, 'new', 'n')")
    monkeypatch.setattr(feed_table, "FEWEST_MERGED", 2)
    assert orders.engine().maintain(Allowance()).feed_files > 0
    consumed("UPDATE orders SET status = 'seen'")
    orders.engine().sync(Bounds(), copy_anew=[ORDERS])
    orders.conn.execute("DELETE FROM orders WHERE id = 7")
    consumed()
    target.close()
