"""The snippets of docs/guides/differences.md and docs/reference/change_feed.md do what the pages say."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed import table as feed_table
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from tests.flow.rig import Rig, following
from tests.oracle import source_rows

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
def test_a_page_with_snippets_stays_below_the_word_limit(page: str) -> None:
    assert len((DOCS / page).read_text().split()) < WORDS


@pytest.mark.long
def test_documented_snippets_of_wait_diff_history_and_undo_work(orders: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Raised inside the consumer, as if its process died there."""


@pytest.mark.long
def test_the_documented_consumer_applies_each_change_once_even_if_it_dies(
    orders: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# The SQL of an undo, run on the source --------------------------------------------------------------

TABLE = 'public."odd ""t"'
MAKE = f"""
CREATE TYPE mood AS ENUM ('sad', 'it''s \\ "ok"');
CREATE TYPE place AS (street text, no int);
CREATE TABLE {TABLE} (
  "the id" bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "n" numeric(10, 2), "free" numeric, "at" timestamptz,
  "day" date, "f" float8, "r" real, "b" bytea, "j" json, "jb" jsonb, "tags" text[], "times" timestamptz[], "spot" point,
  "boxes" box[], "m" mood, "p" place, "span" interval, "c" char(4), "money" money, "grid" int[], "big" text,
  "twice" numeric GENERATED ALWAYS AS ("n" * 2) STORED);
ALTER TABLE {TABLE} ALTER "big" SET STORAGE EXTERNAL;
CREATE TABLE bag (v text, f float8); ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO {TABLE} VALUES
  (DEFAULT, 1.50, 1.500, '2024-02-29 12:00+05', '0044-03-15 BC', '-0', 0.1, '\\x00ff', '{{"a":  1}}', '{{"a": 1}}',
   '{{a,"NULL",NULL,"q\\"\\\\"}}', '{{infinity}}', '(1,2)', '{{(1,1),(0,0)}}', 'it''s \\ "ok"', '("x, y",)',
   '1 mon -2 days', 'a', '-1234.5', '[2:3]={{1,2}}', repeat('x', 5000)),
  (DEFAULT, 'NaN', 'NaN', 'infinity', 'infinity', 'NaN', '-Infinity', '', 'null', '[]', '{{}}', NULL, NULL, NULL, 'sad',
   '(,)', NULL, NULL, 0, '{{{{1}},{{2}}}}', '$undo$; DROP TABLE bag; --');
INSERT INTO {TABLE} DEFAULT VALUES;
INSERT INTO bag VALUES ('a', 1), ('a', 1), ('a', 1), ('b', NULL)
"""
CHANGE = (
    f"""UPDATE {TABLE} SET "n" = 7, "free" = 1.5, "at" = NULL, "day" = '2020-01-01', "f" = 0, "tags" = NULL,
        "j" = '{{}}', "times" = '{{2024-01-01}}', "spot" = '(3,4)', "m" = 'sad', "p" = NULL,
        "grid" = '{{5}}' WHERE "the id" = 1""",
    f'DELETE FROM {TABLE} WHERE "the id" = 2',
    f"INSERT INTO {TABLE} (\"big\", \"p\") VALUES ('new', '(,)')",
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE v = 'a')",
    "UPDATE bag SET f = 5 WHERE v = 'b'",
)


def rows(rig: Rig) -> list[Any]:
    return [source_rows(rig.conn, "public", name)[1] for name in ('odd "t', "bag")]


@pytest.fixture
def changed(rig: Rig) -> tuple[Rig, Lake, list[Any]]:
    """A project whose tables have changed since its first point, the project's lake, and the tables' rows at the first
    point."""
    rig.conn.execute(MAKE.encode())
    rig.started(tables=(TABLE, "public.bag"))
    before = rows(rig)
    for statement in CHANGE:
        rig.conn.execute(statement.encode())
    rig.sync()
    return rig, Lake(rig.lake), before


def test_undo_takes_the_source_back_to_a_point(changed: tuple[Rig, Lake, list[Any]]) -> None:
    """The SQL of the undo works in a session with unusual settings, such as an empty search_path. The SQL changes
    nothing and raises an error if it is run a second time, or if a row was changed again."""
    rig, lake, before = changed
    first = lake._points.oldest()
    statements = [lake.undo(table, first) for table in (TABLE, "public.bag")]
    now = rows(rig)
    rig.conn.execute("SET standard_conforming_strings = off; SET array_nulls = off; SET search_path = ''")
    with pytest.raises(psycopg.errors.RaiseException, match=r'public."odd ""t" was changed again; nothing was undone'):
        rig.conn.execute(f'BEGIN; UPDATE {TABLE} SET "c" = \'zz\' WHERE "the id" = 1; {statements[0]}'.encode())
    rig.conn.execute("ROLLBACK")
    assert rows(rig) == now
    for sql in statements:
        rig.conn.execute(sql.encode())
    assert rows(rig) == before
    for sql in statements:
        with pytest.raises(psycopg.errors.RaiseException, match="nothing was undone"):
            rig.conn.execute(sql.encode())
    assert rows(rig) == before
    rig.sync()
    assert [lake.diff(table, first).num_rows for table in (TABLE, "public.bag")] == [0, 0]


@pytest.mark.long
def test_undo_can_be_limited_to_one_transaction_or_one_row(changed: tuple[Rig, Lake, list[Any]]) -> None:
    rig, lake, before = changed
    first = lake._points.oldest()
    only = lake.undo(TABLE, first, key=1)
    xids = {row["xid"] for key in (1, 2) for row in lake.at().history(TABLE, key).versions.to_pylist()}
    assert len(xids) == 2
    with rig.conn.transaction(force_rollback=True):
        rig.conn.execute(only.encode())
        assert len(rows(rig)[0] - before[0]) == 1
    for xid in xids:
        rig.conn.execute(lake.undo(TABLE, xid=xid).encode())
    rig.conn.execute(f"DELETE FROM {TABLE} WHERE \"big\" = 'new'".encode())
    assert rows(rig)[0] == before[0]


@pytest.mark.long
def test_undo_of_a_delete_is_refused_if_the_table_got_a_new_column_after_the_delete(rig: Rig) -> None:
    rig.started()
    lake = Lake(rig.lake)
    first = lake.at()
    rig.conn.execute("DELETE FROM t WHERE id = 1")
    rig.sync()
    sql = lake.undo("public.t", first)
    rig.conn.execute("ALTER TABLE t ADD COLUMN more int")
    with pytest.raises(psycopg.errors.RaiseException, match="has columns that its mirror lacks"):
        rig.conn.execute(sql.encode())
    rig.sync()
    with pytest.raises(LakeError, match="does not have the same columns"):
        lake.undo("public.t", first)
