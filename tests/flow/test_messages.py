"""The outbox pattern: a row and a logical message of one transaction appear at the same point, each exactly once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.checks.status import status
from pgcdc_assets.core import retention
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import FeedGap, LakeError, UsageError
from pgcdc_assets.feed import messages as feed_messages
from pgcdc_assets.feed import table as feed_table
from pgcdc_assets.flow import messages as flow_messages
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.outcomes import OperationKind
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log.upkeep import forget
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import Database
from tests.flow.rig import Rig
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], messages=("outbox.*",))
    with database.connect() as conn:
        conn.execute("CREATE TABLE orders (id int PRIMARY KEY, v text)")
        rig = Rig(settings, conn, lambda: spark, Silent())
        rig.setup()
        rig.sync()
        yield rig


def order(rig: Rig, number: int) -> None:
    """Writes a row and a logical message in one transaction, as an application with an outbox does."""
    with rig.conn.transaction():
        rig.conn.execute("INSERT INTO orders VALUES (%s, 'new')", [number])
        rig.conn.execute("SELECT pg_logical_emit_message(true, 'outbox.orders', %s::text)", [str(number)])


def emit(rig: Rig, prefix: str, content: str) -> Lsn:
    """Emits a non-transactional message and waits until it is flushed. Only the WAL writer flushes such a message, and
    a sync reads only flushed WAL."""
    found = rig.conn.execute("SELECT pg_logical_emit_message(false, %s, %s)::text", [prefix, content]).fetchall()
    lsn = Lsn.parse(found[0][0])
    wait_for(lambda: rig.flush() >= lsn, what="the WAL writer")
    return lsn


def contents(rows: pa.Table) -> list[str]:
    return [value.decode() for value in rows["content"].to_pylist()]


def maintain_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a maintenance that deletes all data that nothing needs, however young the data is."""
    settings = rig.settings
    rig.settings = settings.model_copy(update={"retention": timedelta(0)})
    with monkeypatch.context() as at_once:
        at_once.setattr(retention, "GRACE", timedelta(0))
        rig.engine().maintain(Allowance())
    rig.settings = settings


def check_points(rig: Rig) -> None:
    """Checks that each point with messages has one message for each order in the mirror, and no message of another
    order."""
    lake = Lake(rig.lake)
    seen = 0
    for point in ConsistentPoints(rig.settings.layout).all():
        if point.messages is None:
            continue
        at = lake.at(point.replay_lsn)
        told = at.messages()
        ids = sorted(int(value) for value in contents(told.filter(pa.compute.field("prefix") == "outbox.orders")))
        assert sorted(at.arrow("orders")["id"].to_pylist()) == ids
        assert len(told) >= seen
        seen = len(told)


def test_row_and_message_of_a_transaction_appear_at_the_same_point(rig: Rig) -> None:
    for number in range(3):
        order(rig, number)
        rig.conn.execute("SELECT pg_logical_emit_message(true, 'other', 'not chosen')")
        rig.sync()
    with rig.conn.transaction(force_rollback=True):
        order(rig, 99)
    loose = emit(rig, "outbox.loose", "between")
    order(rig, 3)
    rig.sync()
    check_points(rig)
    told = Lake(rig.lake).at().messages()
    assert contents(told) == ["0", "1", "2", "between", "3"]
    assert told["transactional"].to_pylist() == [True, True, True, False, True]
    row = told.slice(3, 1).to_pylist()[0]
    assert (row["lsn"], row["order_lsn"], row["xid"], row["commit_lsn"]) == (loose, loose - 1, None, None)
    # Reading only the messages since an earlier point repeats no message and misses none.
    first = Lake(rig.lake).at(ConsistentPoints(rig.settings.layout).all()[1].replay_lsn)
    assert contents(first.messages()) + contents(Lake(rig.lake).at().messages(first.lsn)) == contents(told)
    (row,) = rig.conn.execute("SELECT xmin::text::bigint FROM orders WHERE id = 3").fetchall()
    assert told["xid"].to_pylist()[-1] == row[0]
    # delta-rs reads the same messages.
    plain = DeltaTable(str(rig.lake / "_pgcdc" / "messages")).to_pyarrow_table()
    assert sorted(plain["order_lsn"].to_pylist()) == told["order_lsn"].to_pylist()


@pytest.mark.long
def test_feed_of_messages_can_be_derived_again_for_an_lsn_range(rig: Rig) -> None:
    for number in range(4):
        order(rig, number)
        rig.sync()
    spans = [report.span for report in rig.observer.ranges]
    feed = rig.lake / "_pgcdc" / "messages"
    files = set(DeltaTable(str(feed)).file_uris())
    report = rig.engine().messages_range(spans[1])
    assert report.messages is not None
    assert report.messages.count == 1
    now = set(DeltaTable(str(feed)).file_uris())
    assert (len(files - now), len(now - files)) == (1, 1)
    rig.engine().messages_range(LsnRange(spans[0].start, spans[-1].end))
    assert contents(Lake(rig.lake).at().messages()) == ["0", "1", "2", "3"]
    order(rig, 4)
    rig.sync()
    check_points(rig)
    rig.settings = rig.settings.model_copy(update={"messages": (), "lake": rig.settings.lake})
    empty = rig.settings.layout.messages
    os.rename(path_of(empty), path_of(empty).with_name("away"))
    with pytest.raises(UsageError, match="the feed of messages"):
        rig.engine().messages_range(spans[0])


@pytest.mark.long
def test_messages_after_an_lsn_report_a_gap_if_retention_has_deleted_some(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        order(rig, number)
        rig.sync()
    first, last = (Lsn(lsn) for lsn in Lake(rig.lake).at().messages()["order_lsn"].to_pylist())
    idle = Lake(rig.lake).at().lsn
    maintain_at_once(rig, monkeypatch)
    order(rig, 2)
    rig.sync()
    at = Lake(rig.lake).at()
    with pytest.raises(FeedGap, match=r"lacks the messages between .*; read all messages that are left"):
        at.messages(after=Lsn(first - 1))
    with pytest.raises(FeedGap):
        at.messages(after=last)
    assert contents(at.messages()) == contents(at.messages(after=idle)) == ["2"]
    assert contents(at.messages(after=at.lsn)) == []


@pytest.mark.long
def test_messages_after_an_lsn_report_a_gap_if_the_log_was_cut_while_no_messages_were_asked_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(rig, 0)
    rig.sync()
    before, asked = Lake(rig.lake).at().lsn, rig.settings
    rig.settings = asked.model_copy(update={"messages": ()})
    order(rig, 1)
    rig.sync()
    maintain_at_once(rig, monkeypatch)
    rig.settings = asked
    order(rig, 2)
    rig.sync()
    at = Lake(rig.lake).at()
    with pytest.raises(FeedGap):
        at.messages(after=before)
    assert contents(at.messages()) == ["0", "2"]


@pytest.mark.long
def test_messages_after_an_lsn_report_a_gap_if_a_repair_replaced_a_file_that_the_log_has_only_in_part(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        order(rig, number)
        rig.sync()
    before = Lsn(Lake(rig.lake).at().messages()["order_lsn"][0].as_py())
    spans = [report.span for report in rig.observer.ranges]
    monkeypatch.setattr(feed_table, "FEWEST_MERGED", 2)
    with rig.engine()._by_hand(OperationKind.MAINTENANCE) as work:
        assert work.messages is not None
        assert work.messages.compact() == 1
        assert forget(work.log, spans[-1].start) > 0
        assert work.messages.forget(work.log.start) == 0
    assert contents(Lake(rig.lake).at().messages(after=before)) == ["0", "1"]
    rig.engine().messages_range(spans[-1])
    with pytest.raises(FeedGap):
        Lake(rig.lake).at().messages(after=before)
    assert contents(Lake(rig.lake).at().messages()) == ["1"]
    assert contents(Lake(rig.lake).at().messages(after=spans[-1].start)) == ["1"]


@pytest.mark.long
def test_failed_feed_of_logical_messages_delays_no_table(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise LakeError("is not well", thing="messages")

    order(rig, 1)
    with monkeypatch.context() as broken:
        broken.setattr(feed_messages, "derived", failing)
        rig.sync()
        at = Lake(rig.lake).at()
        assert at.arrow("orders").num_rows == 1
        with pytest.raises(LakeError, match="contains no logical messages"):
            at.messages()
        told = status(rig.settings)
        assert any(problem.thing == "feed of logical messages" for problem in told.problems)
    order(rig, 2)
    rig.sync()
    assert contents(Lake(rig.lake).at().messages()) == ["1", "2"]
    assert status(rig.settings).ok


@pytest.mark.long
def test_maintenance_merges_message_files_and_keeps_batches_whose_messages_the_feed_lacks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_table, "FEWEST_MERGED", 2)
    for number in range(5):
        order(rig, number)
        rig.sync()
    rig.engine().maintain(Allowance())
    assert contents(Lake(rig.lake).at().messages()) == ["0", "1", "2", "3", "4"]
    assert len(DeltaTable(str(rig.lake / "_pgcdc" / "messages")).file_uris()) == 1
    with rig.engine()._by_hand(OperationKind.MAINTENANCE) as work:
        assert flow_messages.messages_needed(work) == [Lake(rig.lake).at().lsn]
        work.messages = None
        assert flow_messages.messages_needed(work) == [work.log.start]


@pytest.mark.long
@pytest.mark.parametrize("where", ["feed", "point"])
def test_no_message_is_lost_or_repeated_after_a_run_died_before_it_published_a_point(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    order(rig, 1)
    with monkeypatch.context() as broken:
        if where == "feed":
            broken.setattr(feed_table, "replace_files", dies)
        else:
            broken.setattr(ConsistentPoints, "publish", dies)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
    order(rig, 2)
    rig.sync()
    check_points(rig)
    assert contents(Lake(rig.lake).at().messages()) == ["1", "2"]
