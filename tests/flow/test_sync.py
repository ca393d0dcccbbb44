"""Whole syncs in this process, with a real server, a real receiver and Spark. Afterwards, mirrors are compared with the
source."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import closing
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from pgcdc_assets import Lake
from pgcdc_assets.checks.documents import InProgressDocument
from pgcdc_assets.checks.facts import read_tables
from pgcdc_assets.checks.positions import positions
from pgcdc_assets.checks.status import status
from pgcdc_assets.cli.console import ConsoleProgress
from pgcdc_assets.cli.maintenance import maintenance_json
from pgcdc_assets.cli.status_verify import verified
from pgcdc_assets.cli.sync import sync_json
from pgcdc_assets.core import retention
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, LockHeld, NotRepairable, RangeGap, SourceUnavailable, UnknownTable
from pgcdc_assets.feed import table
from pgcdc_assets.flow import copies, lock, maintenance, outcomes
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.reports import Silent, SyncReport
from pgcdc_assets.flow.requests import (
    OperatorRequests,
    follow_until,
    operator_requests,
    pause_apply,
    place_verify_request,
)
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta import compaction, deltatarget
from pgcdc_assets.mirror.delta.copy import copy_tables
from pgcdc_assets.mirror.delta.mirror import PROPERTIES
from pgcdc_assets.mirror.delta.removal import Unneeded
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import load_catalog
from pgcdc_assets.source.snapshot import export
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.fix_postgres import committed
from tests.flow.rig import Rig, T, U, following, newest, promised, turns, version
from tests.jsondocuments import checked
from tests.oracle import mirror_rows
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


def test_stream_abort_messages_are_skipped(rig: Rig) -> None:
    """PostgreSQL 18 sends Stream Abort after the rollback of a large transaction with savepoints."""
    rig.conn.execute(f"ALTER DATABASE {rig.conn.info.dbname} SET logical_decoding_work_mem = '64kB'".encode())
    rig.setup()
    rig.sync()
    for number, end in enumerate(("ROLLBACK", "COMMIT", "ROLLBACK"), 1):
        for statement in (
            "BEGIN", "SAVEPOINT s", f"UPDATE u SET b = {number}", "RELEASE s",
            f"UPDATE t SET big = repeat('{number}', 10000)", "SAVEPOINT z", "DELETE FROM t", "ROLLBACK TO z", end,
        ):  # fmt: skip
            rig.conn.execute(statement.encode())
    report = rig.sync()
    assert (report.transactions, report.rows) == (1, 100)
    assert (report.stream_aborts > 0) == (rig.conn.info.server_version >= 180000)
    rig.assert_equal()


@pytest.mark.parametrize("copy_again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_changes_can_be_read_since_a_point_that_is_newer_than_the_tables_last_change(
    rig: Rig, copy_again: bool
) -> None:
    """Changes of table u make newer points, while the mirror and the feed of table t get no commit. A reader of the
    changes of t must not be told that changes are missing."""
    rig.started()
    if copy_again:
        rig.conn.execute("DELETE FROM t WHERE id = 50")
        rig.sync()
        rig.engine().sync(Bounds(), copy_anew=[T])
    lake, done = Lake(rig.lake), newest(rig).replay_lsn
    for number in (1, 2):
        rig.conn.execute("UPDATE u SET v = v + 1")
        rig.sync()
        rig.conn.execute("UPDATE t SET v = 'new' WHERE id = %s", [number])
        rig.sync()
        point = lake.at()
        changes = [row for part in point.changes(T, done) for row in part.to_pylist()]
        assert [(row["_pgcdc_op"], row["id"]) for row in changes] == [("update_postimage", number)]
        done = point.lsn


def test_lsn_ranges_of_several_syncs_have_no_gaps_and_report_the_row_counts_of_mirrors(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test also checks that the small files of a changed feed are merged into one file when an LSN range ends."""
    monkeypatch.setattr(table, "FEWEST_MERGED", 2)
    rig.setup()
    rig.sync()
    counted: list[int] = []
    for n in range(3):
        rig.conn.execute("INSERT INTO t VALUES (%s, 'x', NULL)", (1000 + n,))
        rig.sync()
        counted += rig.conn.execute("SELECT count(*) FROM t").fetchone() or ()
    assert [report.tables[T].rows for report in rig.observer.ranges] == counted
    spans = [report.span for report in rig.observer.ranges]
    assert len(spans) == 3
    assert all(left.end == right.start for left, right in pairwise(spans))
    assert len(DeltaTable(path_of(rig.settings.layout.changes(T))).file_uris()) == 1
    rig.assert_equal()


def test_follow_mode_stops_at_a_commit_boundary_and_a_second_writer_is_refused(rig: Rig) -> None:
    rig.setup()
    with pytest.raises(SourceUnavailable):
        Engine(rig.settings, "host=/nowhere", rig.observer, rig.session, "sync").sync(Bounds())
    last = partial(outcomes.read, rig.settings.layout)
    assert last()["sync"].failed is not None
    stop = threading.Event()
    reports: list[SyncReport] = []
    thread = threading.Thread(target=lambda: reports.append(rig.engine("follow").sync(Bounds(follow=True, stop=stop))))
    thread.start()
    try:
        points = ConsistentPoints(rig.settings.layout)
        wait_for(lambda: points.newest() is not None, what="the first consistent point")
        with pytest.raises(LockHeld, match="follow"):
            rig.sync()
        goal = rig.commit("UPDATE u SET v = v + 1")
        wait_for(lambda: (newest := points.newest()) is not None and newest.replay_lsn >= goal, what="the update")
        wait_for(lambda: last()["sync"].failed is None, what="the word that it succeeds")
        assert last()["sync"].under_way is not None
    finally:
        stop.set()
        thread.join(120)
    rig.assert_equal()
    assert reports[0].transactions == 1


# Syncs with faults ----------------------------------------------------------------------------------


@pytest.mark.long
def test_stop_cancels_a_copy_that_has_not_started_a_spark_job_yet(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop arrives while the copy takes its snapshot, so there is no Spark job that could be cancelled."""
    rig.setup()
    stop = threading.Event()
    real = export.exported_snapshot

    def stopped(*args: Any, **more: Any) -> Any:
        stop.set()
        time.sleep(0.5)
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "exported_snapshot", stopped)
        assert rig.sync(follow=True, stop=stop).copied == []
    assert {copy.table for copy in rig.sync().copied} == {T, U}
    rig.assert_equal()


@pytest.mark.long
def test_run_ends_when_every_table_is_set_aside(rig: Rig) -> None:
    rig.conn.execute("DROP TABLE u")
    rig.setup()

    class Renamed(Silent):
        """An observer that renames a column of t right after the copy, inserts a row, and waits until the log has the
        row."""

        def copied(self, report: CopyReport) -> None:
            rig.conn.execute("ALTER TABLE t RENAME v TO w")
            goal = rig.commit("INSERT INTO t VALUES (999, 'x', NULL)")
            wait_for(lambda: ChangeLog(rig.settings.layout).open().position() >= goal, what="the change in the log")

    assert rig.settings.source is not None
    settings = rig.settings.model_copy(update={"schema_changes": "set_aside"})
    engine = Engine(settings, rig.settings.source, Renamed(), rig.session, "test")
    reports = []
    thread = threading.Thread(target=lambda: reports.append(engine.sync(Bounds(max_seconds=120))))
    thread.start()
    thread.join(100)
    assert [table for table, _ in reports[0].set_aside] == [T]


# Tables that are altered or locked during their copy ------------------------------------------------


@pytest.mark.long
def test_copy_that_is_outdated_at_its_end_is_repeated_by_the_next_sync(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the copy of table u ends, the publication lacks u for a moment, so the stream may lack changes of u. The
    stored state of u gives this reason.

    The test prevents a second round of copies in the first sync. Otherwise the first sync would repeat the copy
    itself, because it has not reached its end LSN yet.
    """
    rig.setup()
    begin = copies.Copies.begin

    def and_then(session: Any, conninfo: str, tables: Any, *more: Any) -> Any:
        failures = copy_tables(session, conninfo, tables, *more)
        rig.conn.execute("ALTER PUBLICATION pgcdc DROP TABLE u; ALTER PUBLICATION pgcdc ADD TABLE u")
        return failures

    def once(run: copies.Copies, but: Collection[TableName] = ()) -> None:
        if not run.made:
            begin(run, but)

    with monkeypatch.context() as patch:
        patch.setattr(deltatarget, "copy_tables", and_then)
        patch.setattr(copies.Copies, "begin", once)
        rig.sync()
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    t, u = read_tables(rig.settings.layout, catalog)
    assert (t.state, u.state) == (TableState.STREAMING, TableState.WAITING)
    assert u.reason is not None
    assert "lacked the table for some time" in u.reason
    rig.assert_equal("public.t")
    assert [copy.table for copy in rig.sync().copied] == [U]
    rig.assert_equal()


# Commands during a sync in follow mode --------------------------------------------------------------


def caught_up(rig: Rig) -> None:
    goal = rig.commit("UPDATE t SET v = v || '.' WHERE id = 50")
    wait_for(lambda: newest(rig).replay_lsn >= goal, what="the change")


def lose(rig: Rig, name: TableName, condition: str) -> None:
    """Deletes the rows that fulfil ``condition`` from a mirror, with delta-rs and not with pgcdc."""
    mirror = DeltaTable(path_of(rig.settings.layout.mirror(name)))
    left = QueryBuilder().register("t", mirror).execute(f"SELECT * FROM t WHERE NOT {condition}").read_all()
    write_deltalake(mirror, pa.table(left), mode="overwrite")


@pytest.mark.long
def test_repairs_and_copies_work_during_a_sync_in_follow_mode(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    rig.commit("UPDATE t SET v = 'new' WHERE id IN (1, 2)", "UPDATE u SET v = 7 WHERE a = 3")
    rig.sync()
    (closed,) = rig.observer.ranges

    def last() -> outcomes.Outcome:
        return outcomes.read(rig.settings.layout)["repair"]

    with following(rig) as run:
        assert rig.engine("check").check_range(closed.span).transactions == 1
        lose(rig, U, "a = 3")
        lose(rig, T, "id = 2")
        report = rig.engine("repair public.u").repair(U, closed.span)
        assert (report.tables[U].inserted, report.tables[U].version) == (1, version(rig, U))
        wait_for(lambda: newest(rig).tables[U] == version(rig, U), what="a point of the repaired mirror")
        with pytest.raises(NotRepairable, match=r"copy it again: `pgcdc snapshot"):
            rig.engine("repair public.t").repair(T, closed.span)
        assert (failed := last().failed) is not None
        assert (failed.command, failed.thing) == ("repair public.t", "public.t")
        with pytest.raises(UnknownTable):
            rig.engine("snapshot").sync(Bounds(), copy_anew=[U, TableName("public", "nope")])
        with pytest.raises(UnknownTable):
            rig.engine("forget").forget([TableName("public", "nope")])

        copied = rig.engine("snapshot public.t").sync(Bounds(), copy_anew=[T])
        (copy,) = copied.copied
        assert (copy.table, copied.set_aside) == (T, [])
        point = newest(rig)
        assert point.replay_lsn >= copy.consistent_point
        assert set(point.tables) == {T, U}
        assert last().failed is None, "a table that was copied again needs no repair"
        rig.assert_equal()
        caught_up(rig)
        rig.assert_equal()
        assert run.is_alive()
        with pytest.raises(LockHeld, match="follow"):
            rig.sync()
    assert rig.sync().copied == []
    rig.assert_equal()


@pytest.mark.long
def test_maintenance_works_during_a_sync_in_follow_mode(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(compaction, "MOST_SMALL", 1)
    rig.settings = rig.settings.model_copy(update={"retention": timedelta(0), "range_seconds": 1.0})
    rig.setup()
    rig.sync()
    rig.commit("UPDATE u SET v = 7 WHERE a = 3")
    rig.sync()
    with following(rig):
        rig.commit("UPDATE u SET v = 8 WHERE a = 4")
        wait_for(lambda: len(rig.observer.ranges) == 2, what="a range")
        kept = rig.engine("maintain").maintain(Allowance())
        assert kept.log_files > 0
        assert (kept.optimized, kept.failed) == ([U], [])
        with pytest.raises(RangeGap, match="begins below the log"):
            rig.engine("repair").repair(U, rig.observer.ranges[0].span)
        caught_up(rig)
        assert newest(rig).tables[U] == version(rig, U), (
            "the point lists the version that the maintenance made of a mirror without changes"
        )
        wait_for(lambda: len(rig.observer.ranges) == 3, what="the next range")
        rig.assert_equal()
    spans = [report.span for report in rig.observer.ranges]
    assert spans[2].start >= kept.log_start
    assert all(left.end <= right.start for left, right in pairwise(spans))
    assert outcomes.read(rig.settings.layout)["maintenance"].succeeded is not None


@pytest.mark.long
def test_waiting_command_starts_only_after_verify_has_its_point_and_a_second_command_is_refused(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    layout, reports, stop = rig.settings.layout, list[SyncReport](), threading.Event()
    waits = threading.Thread(target=lambda: reports.append(rig.engine("snapshot").sync(Bounds(), copy_anew=[U])))
    with following(rig), place_verify_request(layout) as held:
        wait_for(rig.streaming, what="the stream")
        threading.Timer(1, stop.set).start()
        with pytest.raises(LockHeld, match="`pgcdc follow`"):
            rig.engine("snapshot").sync(Bounds(stop=stop), copy_anew=[T])
        assert lock.waiting(layout) is None
        waits.start()
        wait_for(lambda: lock.waiting(layout) is not None, what="the command")
        with pytest.raises(LockHeld, match=r"`pgcdc snapshot` \(pid \d+\) already waits for this lake"):
            rig.engine("repair").repair(U, LsnRange(Lsn(0), Lsn(1)))
        at = rig.flush()
        rig.conn.execute("UPDATE u SET v = v + 1")
        held.at(at)
        wait_for(lambda: ConsistentPoints(layout).has(at), what="the point")
        point = ConsistentPoints(layout).at(at)
        assert point is not None
        assert set(point.tables) == {T, U}, "the copy began only after verify had its point"
        waits.join(120)
    assert [copy.table for copy in reports[0].copied] == [U]
    rig.assert_equal()


# The operator's requests to running syncs -----------------------------------------------------------


def _write(rig: Rig, number: int) -> Lsn:
    """Inserts a row. Returns the flush LSN after its commit. Tests wait for the row, not for this LSN, because the
    server may have written other WAL after the commit."""
    rig.conn.execute("INSERT INTO t VALUES (%s, 'new')", (number,))
    return rig.flush()


def _logged(rig: Rig) -> Lsn:
    return ChangeLog(rig.settings.layout).position()


def _ids(rig: Rig) -> set[int]:
    return {int(row[0]) for row in mirror_rows(rig.lake, "public/t", ["id"])}


def test_operators_requests_are_valid_until_the_operator_withdraws_them(rig: Rig) -> None:
    layout = rig.settings.layout
    assert operator_requests(layout) == OperatorRequests()
    follow_until(layout, Lsn(0x10))
    assert pause_apply(layout, paused=True)
    assert not pause_apply(layout, paused=True)
    assert operator_requests(layout) == OperatorRequests(Lsn(0x10), paused=True)
    assert operator_requests(layout).reached(Lsn(0x10))
    follow_until(layout, None)
    assert pause_apply(layout, paused=False)
    assert operator_requests(layout) == OperatorRequests()
    storage.replace(layout.endpos, b"nowhere")
    with pytest.raises(LakeError, match="does not contain an LSN"):
        operator_requests(layout)


def test_slot_advances_while_applying_is_paused(rig: Rig) -> None:
    layout = rig.settings.layout
    rig.setup()
    rig.sync()
    point = newest(rig)
    with following(rig):
        pause_apply(layout, paused=True)
        # The sync reads the pause request each time before it applies changes. So it does not apply the change of
        # ``_write``. The log gets above ``before`` only when the sync has received this change.
        before = rig.flush()
        _write(rig, 1001)
        wait_for(lambda: _logged(rig) > before, what="the change in the log")
        at = _logged(rig)
        assert newest(rig) == point
        found = positions(rig.settings)
        assert (found["apply"], found["replay_lsn"], found["at_work"]) == ("paused", str(point.replay_lsn), "follow")
        assert Lsn.parse(found["flush_lsn"] or "") >= at
        for refused in (
            lambda: rig.engine("repair").repair(T, LsnRange(Lsn(1), at)),
            lambda: rig.engine("apply").apply_range([T], LsnRange(Lsn(1), at)),
            lambda: rig.engine("snapshot").sync(Bounds(), copy_anew=[U]),
        ):
            with pytest.raises(LakeError, match=r"paused.*pgcdc resume apply"):
                refused()
        pause_apply(layout, paused=False)
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the change in the mirror")
    rig.assert_equal()


@pytest.mark.long
@pytest.mark.parametrize("early", [True, False], ids=["before the run", "during the run"])
def test_follow_mode_ends_at_the_requested_lsn(rig: Rig, early: bool) -> None:
    layout = rig.settings.layout
    rig.setup()
    rig.sync()
    reports: list[SyncReport] = []
    run = threading.Thread(target=lambda: reports.append(rig.engine("follow").sync(Bounds(follow=True))))
    if early:
        end = _write(rig, 1001)
        _write(rig, 1002)
        follow_until(layout, end)
        run.start()
    else:
        run.start()
        wait_for(rig.streaming, what="the stream")
        first = _write(rig, 1000)
        # The operator withdraws this request before the sync reaches its LSN, so the sync continues.
        follow_until(layout, Lsn(first + (1 << 40)))
        wait_for(lambda: 1000 in _ids(rig), what="the first change")
        follow_until(layout, None)
        # This LSN is 1 MiB ahead, so that WAL that the server writes by itself does not reach it.
        end = Lsn(rig.flush() + (1 << 20))
        follow_until(layout, end)
        _write(rig, 1001)
        # The sync reads the request before it applies this change.
        wait_for(lambda: 1001 in _ids(rig), what="the second change")
        message = "SELECT pg_logical_emit_message(true, 'other', repeat('x', 2 << 20))"
        rig.commit(message, "INSERT INTO t VALUES (1002, 'new')")
    run.join(120)
    assert not run.is_alive()
    (report,) = reports
    assert report.end <= end
    assert 1001 in _ids(rig)
    assert 1002 not in _ids(rig)
    assert positions(rig.settings)["endpos"] == str(end)

    follow_until(layout, None)
    rig.sync()
    rig.assert_equal()


# `status` shows the transactions in progress that a sync has received -------------------------------

SIZE = 4 << 20
MANY = "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(%s::int, %s::int) g"


def _open(rig: Rig) -> InProgressDocument | None:
    return status(rig.settings).to_json()["in_progress"]


@pytest.mark.timeout(300)
def test_status_shows_transactions_in_progress_with_size_and_age(rig: Rig) -> None:
    rig.conn.execute(f"ALTER DATABASE {rig.conn.info.dbname} SET logical_decoding_work_mem = '64kB'".encode())
    rig.setup()
    rig.sync()
    with closing(psycopg.connect(rig.settings.source or "", autocommit=True)) as other:
        _followed(rig, other)
        assert _open(rig) is None, "no receiver runs any more"
    rig.assert_equal()


def _followed(rig: Rig, other: psycopg.Connection[Any]) -> None:
    """Runs a sync in follow mode, and opens three large transactions on ``other`` during the sync. The first
    transaction is committed, the second is rolled back, and the third is still open when the function returns."""
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        assert _open(rig) is None
        start = rig.flush()
        other.execute("BEGIN")
        other.execute(MANY, (1001, 6000))
        ((xid,),) = other.execute("SELECT pg_current_xact_id()::text::int").fetchall()
        wait_for(lambda: (found := _open(rig)) is not None and found["bytes"] > SIZE, what="the open transaction")
        found = _open(rig)
        assert found is not None
        assert (found["transactions"], found["oldest"]["xid"]) == (1, xid)
        assert start <= Lsn.parse(found["oldest"]["lsn"]) <= rig.flush()
        age = found["oldest"]["age_seconds"]
        wait_for(lambda: (later := _open(rig)) is not None and later["oldest"]["age_seconds"] > age, what="its age")
        # While the large transaction is open, another transaction commits, and a point with its row is published.
        between = rig.commit("INSERT INTO u VALUES (1000, 1, NULL)")
        wait_for(lambda: newest(rig).replay_lsn >= between, what="the transaction between")
        assert _open(rig) is not None
        rig.assert_equal()
        other.execute("SAVEPOINT s")
        other.execute(MANY, (20001, 25000))
        other.execute("ROLLBACK TO s")
        end = committed(other)
        wait_for(lambda: _open(rig) is None, what="its end")
        wait_for(lambda: newest(rig).replay_lsn >= end, what="its rows")
        rig.assert_equal()
        other.execute("BEGIN")
        other.execute(MANY, (7001, 12000))
        wait_for(lambda: _open(rig) is not None, what="the next one")
        other.execute("ROLLBACK")
        wait_for(lambda: _open(rig) is None, what="its rollback")
        other.execute("BEGIN")
        other.execute(MANY, (7001, 12000))
        wait_for(lambda: _open(rig) is not None, what="the last one")


# A sync deletes old points and old versions of mirrors ----------------------------------------------


def commits(rig: Rig, table: str) -> int:
    return len(list((rig.lake / f"public/{table}/_delta_log").glob("*.json")))


@pytest.mark.long
def test_number_of_kept_points_and_commits_does_not_grow_with_the_number_of_turns(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(retention, "LADDER", ((timedelta(0), timedelta(days=40_000)),))
    monkeypatch.setattr(maintenance, "THIN_AFTER_VERSIONS", 3)
    monkeypatch.setitem(PROPERTIES, "delta.checkpointInterval", "3")
    delete = Unneeded.delete

    def refused(found: Unneeded) -> None:
        if found.mirror.name == T:
            raise LakeError("cannot be read", thing="a file of t")
        delete(found)

    monkeypatch.setattr(Unneeded, "delete", refused)
    told: list[str] = []
    monkeypatch.setattr(rig.observer, "progress", lambda stage, message, **numbers: told.append(message))
    rig.setup()
    rig.sync()
    turns(rig, 8)
    assert len(ConsistentPoints(rig.settings.layout).all()) <= 4
    assert commits(rig, "u") <= 6 < 9 <= commits(rig, "t")
    assert any("old versions of public.t were not deleted" in message for message in told)
    assert len({lsn for lsn, _ in promised(rig)}) == len(ConsistentPoints(rig.settings.layout).all())
    rig.assert_equal()
    turns(rig, 1, first=2000)
    rig.assert_equal()


# The JSON documents of real commands match their schemas --------------------------------------------


def _by_table(document: Any, field: str) -> dict[str, Any]:
    return {table["name"]: table[field] for table in document["tables"]}


def _status(rig: Rig) -> Any:
    return checked("status", status(rig.settings).to_json())


@pytest.mark.long
def test_json_documents_from_the_first_copy_to_maintenance_match_their_schemas(rig: Rig) -> None:
    rig.setup()
    first = checked("sync", sync_json(rig.sync()))
    assert {copied["name"]: copied["rows"] for copied in first["copied"]} == {"public.t": 50, "public.u": 50}

    pause_apply(rig.settings.layout, paused=True)
    rig.conn.execute("INSERT INTO t VALUES (51, 'new')")
    rig.sync()
    behind = _status(rig)
    # Only the mirror of t lacks a transaction, so only t has a lag in seconds. Both tables have a lag in bytes.
    lag = _by_table(behind, "lag_seconds")
    assert lag["public.t"] > 0
    assert behind["lag_seconds"] == lag["public.t"]
    assert _by_table(behind, "lag_bytes").keys() == {"public.t", "public.u"}
    assert checked("positions", positions(rig.settings))["apply"] == "paused"

    pause_apply(rig.settings.layout, paused=False)
    rig.conn.execute("UPDATE u SET v = 0 WHERE a = 1")
    second = checked("sync", sync_json(rig.sync()))
    assert second["ok"]
    level = _status(rig)
    assert level["last"]["sync"]["failed"] is None
    assert set(_by_table(level, "state").values()) == {"streaming"}

    def sync_to(lsn: Lsn, max_seconds: float | None = None, /) -> None:
        rig.sync(until=lsn)

    report = verified(rig.settings, rig.settings.source or "", None, ConsoleProgress(), sync_to)
    compared = checked("verify", report.to_json())
    assert _by_table(compared, "verdict") == {"public.t": "equal", "public.u": "equal"}
    assert checked("maintain", maintenance_json(rig.engine("maintain").maintain(Allowance())))["ok"]
