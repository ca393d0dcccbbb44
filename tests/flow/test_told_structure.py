"""Changes of structure that event triggers tell of: each is followed at the end of its own transaction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import event_triggers, setup
from tests.fix_postgres import Database
from tests.flow.test_serving import following as run_beside
from tests.flow.test_structure import SECONDS, _until
from tests.flow.test_sync import Rig, T, U, rig_of

pytestmark = pytest.mark.spark


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], batch_seconds=0.1, range_seconds=1)
    with rig_of(database, spark, settings) as rig:
        setup(settings, database.conninfo, ddl=True)
        rig.setup()
        rig.sync()
        yield rig


def _at(rig: Rig) -> Lsn:
    return Lsn.parse(str(rig.conn.execute("SELECT pg_current_wal_insert_lsn()").fetchall()[0][0]))


def _followed(rig: Rig) -> list[tuple[Lsn, bool]]:
    return [(one.since, one.copied) for one in rig.observer.structures if one.table == T]


def _columns(rig: Rig, lsn: Lsn) -> list[str]:
    return [name for name in Lake(rig.lake).at(lsn).arrow(T).column_names if not name.startswith("_pgcdc")]


def test_each_of_several_changes_at_its_own_end(rig: Rig) -> None:
    """All happen while nobody looks, with rows between them and none behind the last."""
    marks: list[tuple[Lsn, Lsn]] = []
    for statement, row in (
        ("ALTER TABLE t ADD w int NOT NULL DEFAULT 5", "UPDATE t SET w = 6 WHERE id < 3"),
        ("ALTER TABLE t RENAME v TO x", "UPDATE t SET x = 'renamed' WHERE id = 4"),
        ("ALTER TABLE t DROP x", "DELETE FROM t WHERE id = 5"),
        ("ALTER TABLE t ADD x text DEFAULT 'new'", None),
    ):
        before = _at(rig)
        rig.conn.execute(statement.encode())
        marks.append((before, _at(rig)))
        if row:
            rig.conn.execute(row.encode())
    rig.sync()
    rig.assert_equal()
    followed = _followed(rig)
    assert [copied for _, copied in followed] == [False] * 4
    assert [low < lsn <= high for (lsn, _), (low, high) in zip(followed, marks, strict=True)] == [True] * 4
    points = [point for point in ConsistentPoints(rig.settings.layout).all() if T in point.tables]
    shown = {point.replay_lsn: _columns(rig, point.replay_lsn) for point in points}
    forms = [["id", "v", "big"], ["id", "v", "big", "w"], ["id", "x", "big", "w"], ["id", "big", "w"],
             ["id", "big", "w", "x"]]  # fmt: skip
    for lsn, columns in shown.items():
        assert columns == forms[sum(end <= lsn for end, _ in followed)], (lsn, followed)
    assert shown[points[-1].replay_lsn] == forms[-1]


def test_a_column_without_a_value_comes_at_its_own_end(rig: Rig) -> None:
    before = _at(rig)
    rig.conn.execute("ALTER TABLE t ADD z int")
    after = _at(rig)
    rig.commit("UPDATE u SET v = 1 WHERE a = 1")
    rig.sync()
    rig.assert_equal()
    ((lsn, copied),) = _followed(rig)
    assert before < lsn <= after
    assert not copied
    points = [point.replay_lsn for point in ConsistentPoints(rig.settings.layout).all() if T in point.tables]
    assert all(("z" in _columns(rig, point)) == (point >= lsn) for point in points)
    assert points[-1] >= lsn


def test_a_change_without_a_row_is_followed_as_it_comes(rig: Rig) -> None:
    """No look at the catalog is waited for, and no point leaves the table out."""
    slow = Rig(rig.settings.model_copy(update={"range_seconds": 600}), rig.conn, rig.session, rig.observer)
    bounds = Bounds(follow=True)
    run = Thread(target=lambda: slow.engine().sync(bounds), daemon=True)
    run.start()
    try:
        rig.conn.execute("UPDATE u SET v = 1 WHERE a = 1")
        _until(
            lambda: ConsistentPoints(rig.settings.layout).all()[-1].replay_lsn > rig.observer.copies[0].consistent_point
        )
        started = time.monotonic()
        before = _at(rig)
        rig.conn.execute("ALTER TABLE t ADD w int NOT NULL DEFAULT 5")
        after = _at(rig)
        _until(lambda: "w" in _columns(rig, Lsn(1 << 62)))
        assert time.monotonic() - started < SECONDS / 4
        rig.conn.execute("ALTER TABLE t RENAME w TO y")
        rig.conn.execute("UPDATE u SET v = 2 WHERE a = 1")
        _until(lambda: "y" in _columns(rig, Lsn(1 << 62)))
    finally:
        bounds.stop.set()
        run.join(SECONDS)
    assert not run.is_alive()
    ((first, _), (second, copied)) = _followed(rig)
    assert before < first <= after < second
    assert not copied
    rig.sync()
    rig.assert_equal()
    points = ConsistentPoints(rig.settings.layout).all()
    assert all(T in point.tables for point in points if point.replay_lsn >= rig.observer.copies[0].consistent_point)


def test_rewritten_rows_are_copied_and_listed_up_to_there(rig: Rig) -> None:
    rig.commit("UPDATE t SET v = 'x' WHERE id = 1")
    before = rig.flush()
    rig.conn.execute("ALTER TABLE t ALTER id TYPE bigint USING id")
    rig.commit("UPDATE t SET v = 'y' WHERE id = 1", "UPDATE u SET v = 3 WHERE a = 2")
    rig.sync()
    rig.assert_equal()
    ((lsn, copied),) = _followed(rig)
    assert copied
    assert lsn > before
    listed = [point.replay_lsn for point in ConsistentPoints(rig.settings.layout).all() if T in point.tables]
    assert any(point >= before and point < lsn for point in listed), "up to the change the mirror is right"


def test_what_a_disabled_trigger_did_not_tell_is_found_by_the_catalog(rig: Rig) -> None:
    names = event_triggers(rig.conn, rig.settings).names
    rig.conn.execute(f"ALTER EVENT TRIGGER {names['changed']} DISABLE".encode())
    rig.conn.execute("ALTER TABLE t RENAME v TO x")
    rig.conn.execute(f"ALTER EVENT TRIGGER {names['changed']} ENABLE ALWAYS".encode())
    rig.conn.execute("ALTER TABLE t ADD w int DEFAULT 5")
    told = _at(rig)
    rig.commit("UPDATE t SET x = 'renamed' WHERE id = 4")
    rig.sync()
    rig.assert_equal()
    ((lsn, copied),) = _followed(rig)
    assert lsn > told, "the message does not tell how it came to that"
    assert not copied


def test_messages_of_ours_are_in_no_feed(rig: Rig) -> None:
    asked = Rig(rig.settings.model_copy(update={"messages": ("*",)}), rig.conn, rig.session, rig.observer)
    asked.sync()
    rig.conn.execute("ALTER TABLE t ADD w int DEFAULT 5")
    rig.conn.execute("SELECT pg_logical_emit_message(true, 'app', 'told')")
    rig.conn.execute("SELECT pg_logical_emit_message(true, %s, 'forged')", [f"pgcdc.ddl.{rig.settings.slot}"])
    rig.conn.execute("SELECT pg_logical_emit_message(false, %s, 'forged')", [f"pgcdc.ddl.{rig.settings.slot}"])
    rig.commit("INSERT INTO u VALUES (900000, 0, 0)", "DELETE FROM u WHERE a = 900000")  # which flushes the message
    asked.sync()
    asked.assert_equal()
    assert [content.as_py() for content in Lake(rig.lake).at().messages()["content"]] == [b"told"]
    assert {T, U} <= set(Lake(rig.lake).at().tables)


@pytest.mark.parametrize("how", ["rewrite", "metadata"])
def test_values_that_postgresql_cast_are_cast_in_the_mirror(rig: Rig, how: str) -> None:
    """The key too, with rows before and after, and values that a decimal cannot hold."""
    rig = Rig(rig.settings.model_copy(update={"schema_changes": how}), rig.conn, rig.session, rig.observer)
    rig.commit("UPDATE u SET v = 'NaN' WHERE a = 7", "UPDATE t SET v = 'before' WHERE id = 1")
    rig.commit("ALTER TABLE t ALTER id TYPE bigint")
    rig.commit("UPDATE t SET v = 'after' WHERE id = 2", "INSERT INTO t VALUES (5000000000, 'large', NULL)")
    rig.commit("ALTER TABLE u ALTER v TYPE numeric(14,4), ALTER a TYPE bigint")
    rig.commit("UPDATE u SET v = 1.2345 WHERE a = 8", "DELETE FROM u WHERE a = 9")
    rig.sync()
    rig.assert_equal()
    assert [(one.table, one.copied) for one in rig.observer.structures] == [(T, False), (U, False)]
    assert len(rig.observer.copies) == 2
    rig.commit("DELETE FROM t WHERE id > 40", "UPDATE u SET a = a + 4000000000 WHERE a < 5")
    rig.sync()
    rig.assert_equal()


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t ALTER id TYPE bigint USING id * 2",
        "ALTER TABLE t ALTER id TYPE bigint, ADD x text DEFAULT clock_timestamp()",
        "DO $$BEGIN EXECUTE 'ALTER TABLE t ALTER id TYPE bigint US' || 'ING id * 2'; END$$",
        "ALTER TABLE t ALTER v TYPE char(9)",
        "ALTER TABLE t ALTER id TYPE smallint",
        "ALTER TABLE t ALTER id TYPE numeric(20,0)",
    ],
)
def test_what_else_postgresql_rewrote_is_copied(rig: Rig, statement: str) -> None:
    rig.commit("UPDATE t SET v = 'before' WHERE id = 1", "UPDATE t SET v = left(v, 9)")
    rig.conn.execute(statement.encode())
    rig.commit("UPDATE t SET v = 'after' WHERE id = 2")
    for _ in range(2):
        rig.sync()
    rig.assert_equal()
    assert [copy.table for copy in rig.observer.copies[2:]] == [T]


def test_a_column_that_is_gone_by_the_time_its_rows_are_received(rig: Rig) -> None:
    """The catalog tells nothing of it any more; its rows came in the transaction that added it, too."""
    with rig.conn.transaction():
        rig.conn.execute("UPDATE t SET v = 'before' WHERE id = 1")
        rig.conn.execute("ALTER TABLE t ADD w int DEFAULT 5")
        rig.conn.execute("UPDATE t SET v = 'within', w = 6 WHERE id = 2")
    added = rig.flush()
    rig.commit("UPDATE t SET v = 'behind' WHERE id = 3", "ALTER TABLE t DROP w", "UPDATE t SET v = 'last' WHERE id = 4")
    rig.sync()
    rig.assert_equal()
    assert [copied for _, copied in _followed(rig)] == [False] * 2
    points = [point.replay_lsn for point in ConsistentPoints(rig.settings.layout).all() if T in point.tables]
    shown = {tuple(_columns(rig, lsn)) for lsn in points if lsn >= added}
    assert shown == {("id", "v", "big", "w"), ("id", "v", "big")}


_AGAIN = ("ALTER TABLE t DROP big", "ALTER TABLE t ADD big text")
_WITHIN = ("ALTER TABLE t ADD x text", "UPDATE t SET x = 'gone' WHERE id = 5", "ALTER TABLE t DROP x",
           "ALTER TABLE t ADD x text")  # fmt: skip


@pytest.mark.timeout(120, method="signal")
@pytest.mark.parametrize("statements", [_AGAIN, _WITHIN], ids=["made anew", "came twice"])
@pytest.mark.parametrize("following", [True, False], ids=["following", "bounded"])
def test_what_messages_tell_and_rows_do_not_is_copied(
    rig: Rig, statements: tuple[str, ...], *, following: bool
) -> None:
    """Another column took name and type, in one transaction with rows of both: a row names no attnum. Another change
    waits behind it."""
    with rig.conn.transaction():
        rig.conn.execute("UPDATE t SET big = 'before' WHERE id = 1")
        for statement in statements:
            rig.conn.execute(statement.encode())
        rig.conn.execute("UPDATE t SET big = 'within' WHERE id = 2")
    rig.commit("UPDATE t SET v = 'behind' WHERE id = 3", "ALTER TABLE t ADD w int DEFAULT 5")
    rig.commit("UPDATE t SET v = 'last' WHERE id = 4")
    if following:
        with run_beside(rig):
            _until(lambda: len(rig.observer.copies) > 2)
    rig.sync()
    rig.sync()
    rig.assert_equal()
    assert [copy.table for copy in rig.observer.copies[2:]] == [T]
