"""The counts that syncs keep in a file of the lake for `pgcdc metrics`, and the trace spans that syncs send."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.meter import ENDPOINTS, Meter, RunCounts, TurnSpans, read_counts, turn_spans
from pgcdc_assets.flow.reports import Silent, TableTurn, Turn
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig

NOW = datetime.now(UTC)


@dataclass
class Log:
    """A stand-in for the log. Each batch became durable two seconds after its first commit. For the batches in
    ``merged`` (given by their end LSNs), this time is unknown, because their files were merged."""

    merged: set[int] = field(default_factory=set)

    def written(self, batches: Sequence[BatchSummary]) -> dict[Lsn, datetime]:
        return {one.end: one.first_commit_ts + timedelta(seconds=2) for one in batches
                if one.first_commit_ts is not None and one.end not in self.merged}  # fmt: skip


class NoPoints:
    def newest(self) -> None:
        return None


def batch(end: int, *, seconds_ago: float = 7, rows: dict[str, int] | None = None) -> BatchSummary:
    at = NOW - timedelta(seconds=seconds_ago)
    counts = {7: rows if rows is not None else {"I": 2, "D": 1}}
    return BatchSummary(Lsn(end - 10), Lsn(end), 1, 3, 5, at, at, counts if rows != {} else {}, {"C": 3}, 100,
                        {7: TableName("public", "t")}, (7,))  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout.of(tmp_path / "lake")
    path_of(found.own).mkdir(parents=True)
    return found


def meter_of(layout: Layout, log: Log | None = None) -> Meter:
    return Meter(layout, cast(Any, log or Log()), cast(Any, NoPoints()))


def read(layout: Layout) -> RunCounts:
    found = read_counts(layout)
    assert found is not None
    return found


def test_a_run_adds_to_the_counts_of_earlier_runs_and_counts_no_batch_again(layout: Layout) -> None:
    first = meter_of(layout)
    first.took([batch(20), batch(30)], {"transform": 0.3, "apply": 0.2})
    first.published(0.05)
    first.close()
    second = meter_of(layout)
    # The second run applies batches 20 and 30 again, as after a crash. They must not be counted twice.
    second.took([batch(20), batch(30), batch(40)], {"transform": 20.0, "apply": 0.2})
    second.close()
    found = read(layout)
    assert (found.transactions, found.rows, found.bytes) == (9, {"I": 6, "U": 0, "D": 3, "T": 0}, 300)
    assert found.turns["transform"].sum == pytest.approx(20.3)
    assert sum(found.turns["publish"].counts) == 1
    assert sum(found.durable.counts) == 3
    assert found.durable.sum == pytest.approx(6.0)
    assert found.upto == Lsn(40)


def test_time_until_a_batch_is_readable_is_measured_when_a_point_contains_the_batch(layout: Layout) -> None:
    found = meter_of(layout)
    found.took([batch(20)], {})
    assert sum(found.counts.readable.counts) == 0
    found.published(0.1)
    assert 7 <= found.counts.readable.sum <= 7 + (datetime.now(UTC) - NOW).total_seconds()
    found.took([batch(30)], {})
    found.unpublished()
    found.took([batch(40, rows={})], {})
    found.published(0.1)
    assert sum(found.counts.readable.counts) == 1, "batches that change no mirror need no point"


def test_time_until_a_batch_is_durable_is_not_measured_if_its_files_were_merged(layout: Layout) -> None:
    found = meter_of(layout, Log(merged={20}))
    found.took([batch(20), batch(30)], {})
    assert sum(found.counts.durable.counts) == 1


def test_counts_are_written_every_ten_seconds_but_only_every_minute_if_nothing_was_counted(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 30.0, 60.0, 60.0, 69.0, 70.0, 70.0, 70.0])
    monkeypatch.setattr("pgcdc_assets.flow.meter.time.monotonic", lambda: next(clock))
    found = meter_of(layout)
    found.write_if_due(lambda: 5000)
    assert read(layout).receiver_bytes == 5000
    for memory in (5000, 6000):
        found.write_if_due(lambda: 6000)
        assert read(layout).receiver_bytes == memory
    found.took([batch(20)], {})
    for transactions in (0, 3):
        found.write_if_due(lambda: 6000)
        assert read(layout).transactions == transactions
    found.close()
    assert read(layout).receiver_bytes is None, "the receiver has ended"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"since": 3}', b"\xff"])
def test_counts_start_at_zero_if_their_file_is_damaged(layout: Layout, content: bytes) -> None:
    path_of(layout.counts).write_bytes(content)
    assert read_counts(layout) is None
    found = meter_of(layout)
    found.took([batch(20)], {})
    found.close()
    assert read(layout).transactions == 3


def test_counts_that_cannot_be_written_do_not_stop_the_run(layout: Layout) -> None:
    path_of(layout.counts).mkdir()
    found = meter_of(layout)
    found.took([batch(20)], {})
    found.write_if_due(lambda: 1)
    found.close()
    assert found.counts.transactions == 3


# Trace spans of turns, as an OTLP collector receives them over HTTP ---------------------------------

T, U = TableName("public", "t"), TableName("public", "u")


class Collector:
    """An OTLP collector, which stores the trace spans that it receives."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805  (names of http.server)
                request = ExportTraceServiceRequest()
                request.ParseFromString(handler.rfile.read(int(handler.headers["Content-Length"])))
                self._take(handler.path, request)
                handler.send_response(200)
                handler.end_headers()

            def log_message(handler, *args: Any) -> None:  # noqa: N805
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _take(self, path: str, request: ExportTraceServiceRequest) -> None:
        assert path == "/v1/traces"
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans += scope.spans

    @contextmanager
    def running(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def attributes(self, name: str) -> dict[str, str | int]:
        (span,) = [span for span in self.spans if span.name == name]
        return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector().running() as found:
        monkeypatch.setenv(ENDPOINTS[0], found.endpoint)
        yield found


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_turn_has_a_trace_span_for_each_stage_and_table(collector: Collector) -> None:
    spans = turn_spans(Silent())
    assert spans is not None
    now = time.time()
    batch = BatchSummary(
        Lsn(1), Lsn(9), 1, 2, 5, datetime.fromtimestamp(now - 30, UTC), datetime.fromtimestamp(now - 29, UTC),
        {}, {}, 10, {}, (),
    )  # fmt: skip
    tables = [TableTurn(T, Lsn(9), 1, inserted=3, changes={"insert": 4}, seconds_apply=1.0), TableTurn(U, Lsn(9), 2)]
    spans._ended = now - 60
    spans.record(now - 5, Lsn(1), Turn(Lsn(9), tables, {"transform": 2.0, "apply": 2.0}), [batch], now - 1)
    spans.close()
    found = {span.name: span for span in collector.spans}
    assert found.keys() == {
        "turn", "receive", "transform public.t", "transform public.u", "apply public.t", "apply public.u", "publish",
    }  # fmt: skip
    assert collector.services == {"pgcdc"}
    whole = found.pop("turn")
    assert {span.parent_span_id for span in found.values()} == {whole.span_id}
    assert {span.trace_id for span in found.values()} == {whole.trace_id}
    assert [round(seconds(found[name])) for name in ("receive", "transform public.t", "apply public.t", "publish")] == [
        25, 2, 1, 1,
    ]  # fmt: skip
    assert round(seconds(whole)) == 30
    assert collector.attributes("receive") == {
        "pgcdc.start_lsn": "0/1", "pgcdc.end_lsn": "0/9", "pgcdc.transactions": 2,
    }  # fmt: skip
    applied = collector.attributes("apply public.t")
    assert (applied["pgcdc.table"], applied["pgcdc.rows.inserted"], applied["pgcdc.end_lsn"]) == ("public.t", 3, "0/9")


def test_without_a_telemetry_endpoint_no_trace_spans_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert turn_spans(Silent()) is None


def test_if_opentelemetry_is_not_installed_the_run_names_the_package_to_install(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lines(Silent):
        said = ""

        def progress(self, stage: str, message: str, **numbers: float | str) -> None:
            self.said += message

    found = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    told = Lines()
    assert turn_spans(told) is None
    assert "pip install 'pgcdc_assets[otel]'" in told.said


def test_a_telemetry_endpoint_that_does_not_answer_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:1")
    monkeypatch.setattr("pgcdc_assets.flow.meter._FLUSH_SECONDS", 0.2)
    spans = TurnSpans()
    began = time.monotonic()
    spans.record(time.time(), Lsn(1), Turn(Lsn(9), [TableTurn(T, Lsn(9), 1)], {}), [], time.time())
    spans.close()
    assert time.monotonic() - began < 5


@pytest.mark.long
@pytest.mark.spark
def test_a_sync_sends_trace_spans_of_its_turns_but_not_of_copies(rig: Rig, collector: Collector) -> None:
    rig.setup()
    rig.sync()
    assert collector.spans == [], "a copy sends no trace span"
    rig.conn.execute("INSERT INTO t VALUES (51), (52)")
    report = rig.sync()
    names = {span.name for span in collector.spans}
    assert names == {"turn", "receive", "transform public.t", "apply public.t", "publish"}
    assert collector.attributes("turn") == {"pgcdc.start_lsn": str(report.start), "pgcdc.end_lsn": str(report.end)}
    assert collector.attributes("apply public.t")["pgcdc.rows.inserted"] == 2
