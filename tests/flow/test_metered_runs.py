"""The metrics of a real project: while a sync in follow mode runs, after it has ended, and after later syncs."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from pgcdc_assets.checks.report import TableReport, keep_proofs
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.meter import WRITE_SECONDS
from pgcdc_assets.metrics import readings
from pgcdc_assets.metrics.families import Metrics
from pgcdc_assets.metrics.movement import Movement
from tests.flow.rig import Rig, following, newest
from tests.metrics.moments import Samples, exposed, samples
from tests.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.long]

T = TableName("public", "t")


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr("pgcdc_assets.flow.meter.WRITE_SECONDS", 0.2)
    monkeypatch.setattr("pgcdc_assets.flow.meter.REST_SECONDS", 0.2)


def scraped(metrics: Metrics) -> Samples:
    metrics.seconds = 60.0
    return samples(exposed(metrics))


@pytest.mark.long
def test_metrics_show_a_running_sync_and_the_lag_after_the_sync_has_ended(rig: Rig) -> None:
    assert WRITE_SECONDS < 15, "the counts are written more often than Prometheus scrapes"
    rig.setup()
    rig.sync()
    metrics = Metrics(rig.settings, Movement(within=0.5))
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        goal = rig.commit("INSERT INTO t VALUES (1000, 'x', NULL), (1001, 'y', NULL)", "DELETE FROM u WHERE a = 1")
        wait_for(lambda: newest(rig).replay_lsn >= goal, what="the point")
        wait_for(lambda: scraped(metrics).get(("pgcdc_transactions_total", ())) == 1, what="the counts")
        found = scraped(metrics)
        assert (found["pgcdc_rows_total", ("insert",)], found["pgcdc_rows_total", ("delete",)]) == (2, 1)
        assert found["pgcdc_slot_active", ()] == 1
        assert found["pgcdc_tables", ("streaming",)] == 2
        for name in ("pgcdc_commit_to_durable_seconds", "pgcdc_commit_to_readable_seconds"):
            assert found[f"{name}_count", ()] == 1
            assert 0 < found[f"{name}_sum", ()] < 120
        stages = {labels[0] for (name, labels), count in found.items() if name == "pgcdc_turn_seconds_count" and count}
        assert stages == {"transform", "apply", "publish"}
        assert found["pgcdc_receiver_resident_bytes", ()] > 10 << 20
        assert found["pgcdc_point_lsn_bytes", ()] <= found["pgcdc_received_lsn_bytes", ()]
        wait_for(lambda: scraped(metrics)["pgcdc_ready", ()] == 1, what="readiness")
        # This transaction deletes the row that it inserted, so it changes no mirror. A point above the transaction is
        # made nevertheless. Otherwise the metrics would show a lag.
        rig.commit("INSERT INTO t VALUES (3000, 'x', NULL)", "DELETE FROM t WHERE id = 3000")
        wait_for(lambda: scraped(metrics)["pgcdc_transactions_total", ()] == 2, what="the counts")
        wait_for(lambda: scraped(metrics)["pgcdc_lag_seconds", ("publish",)] == 0, what="no lag")
        with closing(psycopg.connect(rig.settings.source or "")) as other:
            other.execute("INSERT INTO t SELECT g, 'open', NULL FROM generate_series(2000, 2010) g")
            wait_for(lambda: scraped(metrics)["pgcdc_lag_seconds", ("publish",)] == 0, what="no lag")
            other.rollback()
    # The sync has ended, so nothing receives what the source commits next.
    rig.commit("UPDATE t SET v = 'waits' WHERE id = 1000")
    scraped(metrics)
    wait_for(lambda: scraped(metrics)["pgcdc_ready", ()] == 0, what="a stopped replication")
    found = scraped(metrics)
    assert found["pgcdc_slot_active", ()] == 0
    assert found["pgcdc_lag_seconds", ("receive",)] > 0.5
    assert found["pgcdc_transactions_total", ()] == 2
    assert ("pgcdc_receiver_resident_bytes", ()) not in found
    keep_proofs(rig.settings.layout, [TableReport(T, lsn=goal)])

    def received() -> bool:
        # The server may write WAL by itself at any time. The log passes this WAL only in a sync, so each attempt
        # runs a sync.
        rig.sync(receive_only=True)
        return scraped(metrics)["pgcdc_lag_bytes", ("receive",)] == 0

    # After these syncs, the change is in the log, but not in the mirror. So readers cannot see the change yet.
    wait_for(received, what="the log")
    found = scraped(metrics)
    assert found["pgcdc_table_lag_seconds", ("public.t",)] > 0.5
    assert found["pgcdc_table_lag_seconds", ("public.u",)] == 0
    assert found["pgcdc_ready", ()] == 0
    assert "in the change log has waited" in metrics.reasons()[0]
    rig.sync()
    wait_for(lambda: scraped(metrics)["pgcdc_ready", ()] == 1, what="readiness again")
    found = scraped(metrics)
    assert (found["pgcdc_transactions_total", ()], found["pgcdc_rows_total", ("update",)]) == (3, 1)
    assert found["pgcdc_verified_equal", ("public.t",)] == 1
    assert found["pgcdc_mirror_bytes", ("public.t",)] > found["pgcdc_mirror_bytes", ("public.u",)] > 0
    assert found["pgcdc_last_success_timestamp_seconds", ("sync",)] > 0
