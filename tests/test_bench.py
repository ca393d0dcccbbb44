"""Runs the bench at a tiny size: every measurement is made, saved and drawn. The numbers mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bench import bucket, copies, inprogress, streams
from bench.bucket import Buckets
from bench.costs import Costs
from bench.day import Day
from bench.latency import Latency
from bench.plot import draw, draw_curves
from bench.record import Record
from bench.scale import Scale
from bench.sensor import by_sensor
from bench.source import WORKLOADS
from pgcdc_assets.demo.server import EmbeddedServer

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture
def record() -> Record:
    return Record(0.001, {**dict.fromkeys(WORKLOADS, streams.FLOOR), "W4": copies.FLOOR})


def test_rates_are_measured_saved_and_drawn(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, record: Record
) -> None:
    bench = streams.Streams(server, server, spark, tmp_path, record)
    bench.turn(WORKLOADS["W1"], 0)
    copying = copies.Copies(server, spark, tmp_path, record)
    copying.turns(1, jdbc=False)
    record.save(tmp_path / "runs.json")
    draw(record, tmp_path / "rates.svg")
    kept = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert {run["what"] for run in kept if run["workload"] == "W1"} == {
        streams.FLOOR, streams.CROWDED, "receive, stream", "receive, stream, streaming off", "receive, SQL functions",
        "end to end", "native subscription",
    }  # fmt: skip
    assert all(run["rows"] == 400 for run in kept if run["workload"] == "W1")
    assert all(run["seconds"] > 0 for run in kept)
    assert record.ratio("W1", "end to end") is not None
    assert record.ratio("W4", "snapshot copy") is not None
    assert "</svg>" in (tmp_path / "rates.svg").read_text()
    assert any("receiver" in run["peak"] for run in kept)


def test_bucket_and_folder_are_measured(server: EmbeddedServer, spark: SparkSession, tmp_path: Path, s3: str) -> None:
    record = Record(0.001, {})
    Buckets(server, spark, tmp_path, record, s3).turns(1, 3)
    assert {run.what for run in record.runs if run.workload == bucket.WORKLOAD} == {
        f"{name}: {what}, {place}" for name in ("W1", "W2") for what in ("receive", "end to end")
        for place in bucket.PLACES
    }  # fmt: skip


def test_transactions_in_progress_are_measured(server: EmbeddedServer, spark: SparkSession, tmp_path: Path) -> None:
    record = Record(0.001, {inprogress.WORKLOAD: inprogress.FLOOR})
    inprogress.InProgress(server, spark, tmp_path, record).turns(1)
    record.save(tmp_path / "runs.json")
    draw(record, tmp_path / "rates.svg")
    draw_curves(record, tmp_path / "retained.svg")
    kept = json.loads((tmp_path / "runs.json").read_text())["runs"]
    floors = {inprogress.FLOOR, inprogress.STREAMED_FLOOR}
    assert {run["what"] for run in kept if run["workload"] == inprogress.WORKLOAD} == {
        *floors, "commit → readable, streaming auto", "commit → readable, streaming off",
    }  # fmt: skip
    curves = {run["what"]: run["curve"] for run in kept if run["workload"] == inprogress.RETAINED}
    assert set(curves) == {"slot, protocol 1", "slot, protocol 4, streaming"}
    for curve in curves.values():
        assert curve[0][0] < 0 < curve[-1][0]
        assert max(size for _, size in curve) > curve[-1][1]
    ours = [run for run in kept if run["what"] not in floors]
    assert all(0 < run["seconds"] < 60 for run in ours)
    streamed = {run["what"]: run["more"]["streamed MB"] > 0 for run in ours}
    assert streamed == {
        "commit → readable, streaming auto": True, "commit → readable, streaming off": False,
        "slot, protocol 1": False, "slot, protocol 4, streaming": True,
    }  # fmt: skip
    assert "</svg>" in (tmp_path / "retained.svg").read_text()


def test_latency_and_growth_are_measured(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.latency.WARM_UP", 1.0)
    latency = Latency(server, spark, tmp_path, record)
    latency.two_tables(3)
    latency.small_transactions(3)
    latency.at_rest(4)
    by_sensor(server, tmp_path, record, 3, from_idle=1)
    growth = Scale(server, spark, tmp_path, record)
    growth.tables([10])
    growth.mirrors([20_000])
    growth.batches([2])
    growth.ranges([100])
    Day(server, spark, tmp_path, record).hours(20_000, 1, 60)
    assert {run.workload for run in record.runs} == {"L", "S1", "S2", "S3", "S4", "S6"}
    assert all(0 < run.more["median s"] < 60 for run in record.runs if run.workload == "L")


def test_other_costs_are_measured(server: EmbeddedServer, spark: SparkSession, tmp_path: Path, record: Record) -> None:
    other = Costs(server, spark, tmp_path, record)
    other.events([3])
    other.keys(2_000, 100)
    other.values(50, 4)
    other.starts()
    assert {run.workload for run in record.runs} == {"S7", "S8", "S9", "S10"}
    assert all(run.cpu["driver"] > 0 and run.more["written_mb"] > 0 for run in record.runs if run.workload == "S7")
    assert all(run.cpu["process"] > 0 for run in record.runs if run.workload == "S10")
