"""A sync in follow mode reconnects after it has lost the source. It ends when a limit such as ``max_seconds``
is reached, or with an error that waiting cannot cure."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.cli.sync import _code
from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import IdentityMismatch, LockHeld, SlotActive, SourceUnavailable
from pgcdc_assets.flow import stream
from pgcdc_assets.flow.copies import COPY_ROUNDS
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent, SyncReport
from pgcdc_assets.settings import Settings
from tests.fix_postgres import TEST_SETTINGS, fresh_database
from tests.flow.rig import following, newest, rig_of
from tests.servers import new_server
from tests.waiting import wait_for

TERMINATED = SourceUnavailable("terminating connection due to administrator command", thing="db/shop")
STARTING = SourceUnavailable("the database system is starting up", thing="db/shop")
HELD = SlotActive("is held by pid 7 of the server", thing="slot s")
RAN = SyncReport(ZERO, ZERO, ZERO, [], 1, 1, 1, 0, 1.0, [])
LOST = replace(RAN, lost=TERMINATED)


class Lines(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        self.lines.append(f"{stage}: {message}")


class Scripted(Engine):
    """An engine whose syncs return the reports or raise the errors of ``script``, one after the other."""

    def __init__(self, script: Iterable[SyncReport | Exception]) -> None:
        self.progress_lines = Lines()
        super().__init__(Settings(source="host=/nowhere"), "host=/nowhere", self.progress_lines, pytest.fail, "follow")
        self._script = iter(script)

    def _sync(
        self, bounds: Bounds, copy_anew: Sequence[TableName] = (), heal: Sequence[TableName] = ()
    ) -> SyncReport:  # fmt: skip
        step = next(self._script)
        if isinstance(step, Exception):
            raise step
        return step


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_PAUSE", 0.01)


def test_follow_mode_reconnects_after_increasing_pauses() -> None:
    engine = Scripted([LOST, STARTING, HELD, LockHeld("`pgcdc maintain` writes"), RAN])
    report = engine.sync(Bounds(follow=True))
    assert (report.transactions, report.lost) == (2, None)
    assert engine.progress_lines.lines == [
        f"source: {TERMINATED}; next try in 0.01 s", f"source: {STARTING}; next try in 0.02 s",
        f"source: {HELD}; next try in 0.04 s",
        "source: `pgcdc maintain` writes; wait for that process, or stop it; next try in 0.08 s",
    ]  # fmt: skip


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(follow=True)], ids=["sync", "follow"])
@pytest.mark.parametrize("error", [STARTING, HELD], ids=["unreachable", "slot held"])
def test_sync_ends_with_an_error_if_its_first_try_to_reach_the_source_fails(bounds: Bounds, error: Exception) -> None:
    with pytest.raises(type(error)):
        Scripted([error]).sync(bounds)


def test_sync_not_in_follow_mode_repeats_copies_and_exits_with_3_if_a_table_stays_uncopied() -> None:
    behind = replace(RAN, left=[(TableName("public", "t"), "was rewritten")])
    engine = Scripted([behind] * (COPY_ROUNDS + 1))
    report = engine.sync(Bounds())
    assert (report.left, _code(report)) == (behind.left, 3)
    with pytest.raises(StopIteration):
        engine._sync(Bounds())
    report = Scripted([behind, RAN]).sync(Bounds())
    assert (report.left, _code(report)) == ([], 0)
    with pytest.raises(SourceUnavailable):
        Scripted([behind, STARTING]).sync(Bounds())


def test_sync_ends_if_another_session_took_its_slot_while_a_command_held_the_lake() -> None:
    with pytest.raises(SlotActive):
        Scripted([replace(RAN, gave_way=True), HELD]).sync(Bounds(follow=True))


def test_sync_ends_if_the_error_during_an_outage_cannot_be_cured_by_waiting() -> None:
    with pytest.raises(IdentityMismatch):
        Scripted([LOST, IdentityMismatch("is another database")]).sync(Bounds(follow=True))


@pytest.mark.parametrize("bounds", [
    Bounds(follow=True, max_seconds=0.2), Bounds(follow=True, idle_seconds=0.2),
], ids=["max_seconds", "idle_seconds"])  # fmt: skip
def test_a_limit_reached_during_an_outage_ends_the_sync_with_the_outages_error(
    bounds: Bounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FIRST_PAUSE", 600.0)
    with pytest.raises(SourceUnavailable, match="administrator command"):
        Scripted([LOST]).sync(bounds)


def test_stop_during_an_outage_ends_the_sync_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_PAUSE", 600.0)
    bounds = Bounds(follow=True)
    threading.Timer(0.1, bounds.stop.set).start()
    assert Scripted([LOST]).sync(bounds).transactions == 1


def test_a_queued_dagster_run_ends_a_sync_during_an_outage_with_the_outages_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "FIRST_PAUSE", 600.0)
    bounds = Bounds(follow=True)
    threading.Timer(0.1, bounds.give_way.set).start()
    with pytest.raises(SourceUnavailable):
        Scripted([LOST]).sync(bounds)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_follow_mode_continues_after_the_server_restarted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pg_version: int, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        new_server(tmp_path / "pg", pg_version, settings=TEST_SETTINGS) as server, fresh_database(server) as database,
        rig_of(database, spark, Settings(source=database.conninfo, slot="s")) as rig,
    ):  # fmt: skip
        rig.setup()
        rig.sync()
        with following(rig):
            wait_for(rig.streaming, what="the stream")
            rig.conn.close()
            server.stop(mode=mode)
            server.start(survive=False)
            rig.conn = database.connect()
            goal = rig.commit("UPDATE u SET v = 7")
            wait_for(lambda: newest(rig).replay_lsn >= goal, what="the update")
        rig.assert_equal()
        rig.conn.close()
