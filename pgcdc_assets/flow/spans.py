"""Sends OpenTelemetry spans for each turn, for operators with a tracing tool. Spans are sent by OTLP over HTTP, and
only if the standard variable ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set. The extra ``otel`` is needed.

| span | from | to |
|---|---|---|
| ``turn`` | the begin of ``receive`` | the end of ``publish`` |
| ``receive`` | the oldest commit by the source's clock, but not before the last turn's end | the turn's begin |
| ``transform TABLE`` | the turn's begin | the feeds of all tables are written |
| ``apply TABLE`` | the feeds of all tables are written | the table's commit |
| ``publish`` | all tables are applied | the point is durable |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.reports import Observer
from pgcdc_assets.log.summary import BatchSummary

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from pgcdc_assets.flow.turn import Turn

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE: Final = "pgcdc"
"""The name of the service, unless ``OTEL_SERVICE_NAME`` gives another name."""
_FLUSH_SECONDS: Final = 2.0
"""Seconds that a run waits at its end until the remaining spans are sent."""
_LACKING: Final = (
    "no spans are sent: OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed; "
    "run `pip install 'pgcdc_assets[otel]'`"
)


def turn_spans(observer: Observer) -> TurnSpans | None:
    """The spans of one run; None without an endpoint, or if OpenTelemetry is not installed, which is reported."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        return TurnSpans()
    except ImportError:
        observer.progress("trace", _LACKING)
        return None


class TurnSpans:
    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
        self._provider: TracerProvider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Tracer = self._provider.get_tracer("pgcdc_assets")
        self._ended = time.time()

    def record(self, began: float, start: Lsn, turn: Turn, batches: Sequence[BatchSummary], applied: float) -> None:
        """Write the spans of a turn that ends now. ``began``, ``applied``: :func:`time.time` when the turn began, and
        when all tables were applied. ``start``: the lowest ``replay_lsn`` of the followed tables when the turn began.
        ``batches``: the batches that the turn applied."""
        from opentelemetry import trace

        ended = time.time()
        commits = [batch.first_commit_ts.timestamp() for batch in batches if batch.first_commit_ts is not None]
        received = min(began, max(self._ended, min(commits, default=began)))
        derived = min(applied, began + turn.seconds.get("transform", 0.0))
        lsns = {"pgcdc.start_lsn": str(start), "pgcdc.end_lsn": str(turn.upto)}
        whole = self._tracer.start_span("turn", start_time=_ns(received), attributes=lsns)
        within = trace.set_span_in_context(whole)

        def span(name: str, begin: float, end: float, **attributes: Any) -> None:
            found: Span = self._tracer.start_span(
                name, within, start_time=_ns(begin), attributes={**lsns, **attributes}
            )
            found.end(_ns(end))

        transactions = sum(batch.transactions for batch in batches)
        span("receive", received, began, **{"pgcdc.transactions": transactions})
        for table in turn.tables:
            span(f"transform {table.table}", began, derived, **_of(table.table, table.changes))
            end = min(applied, derived + table.seconds_apply)
            net = {"inserted": table.inserted, "updated": table.updated, "deleted": table.deleted}
            span(f"apply {table.table}", derived, end, **_of(table.table, net))
        span("publish", applied, ended)
        whole.end(_ns(ended))
        self._ended = ended

    def close(self) -> None:
        """Send the remaining spans. Waits at most ``_FLUSH_SECONDS``."""
        sending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        sending.start()
        sending.join(_FLUSH_SECONDS)


def _of(table: TableName, counts: dict[str, int]) -> dict[str, Any]:
    return {"pgcdc.table": str(table), **{f"pgcdc.rows.{kind}": count for kind, count in counts.items()}}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
