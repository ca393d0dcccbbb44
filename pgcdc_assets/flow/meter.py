"""Measures what runs do: counts for ``pgcdc metrics``, and OpenTelemetry spans.

Counts: rows, transactions, the times of turns, and how long commits take. Each run adds to the counts of earlier runs,
in one small file of the lake. So the counts outlive a run, and a process that only reads the lake can report them. A
run that dies loses at most the counts of its last seconds.

Spans: for each turn, for operators with a tracing tool. Spans are sent by OTLP over HTTP, and only if the standard
variable ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set. The extra ``otel`` is needed.

| span | from | to |
|---|---|---|
| ``turn`` | the begin of ``receive`` | the end of ``publish`` |
| ``receive`` | the oldest commit by the source's clock, but not before the last turn's end | the turn's begin |
| ``transform TABLE`` | the turn's begin | the feeds of all tables are written |
| ``apply TABLE`` | the feeds of all tables are written | the table's commit |
| ``publish`` | all tables are applied | the point is durable |
"""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import StoreFailed
from pgcdc_assets.flow.reports import Observer, Turn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.summary import ROW_KINDS, BatchSummary
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store import storage

WRITE_SECONDS: Final = 10.0
"""Seconds between two writes of the file while something is counted. This is less than the usual 15 seconds between two
scrapes by Prometheus, and causes few requests to an object store."""
REST_SECONDS: Final = 60.0
"""Seconds between two writes while nothing is counted. Such a write only updates ``receiver_bytes``, the memory that
the receiver uses."""
BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds of the histograms' buckets, in seconds: from one small turn to an outage of an hour."""
STAGES: Final = ("transform", "apply", "publish")


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """The number of values in each bucket. The last bucket has the values above all bounds."""
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        """Add a value. A negative value counts as zero: it comes from two clocks that differ."""
        value = max(0.0, seconds)
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        texts = [*(repr(bound) for bound in BOUNDS), "+Inf"]
        return [(text, float(sum(self.counts[: place + 1]))) for place, text in enumerate(texts)]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        counts = [int(count) for count in data["counts"]]
        # A file with other buckets is from another release. Its counts cannot be continued.
        return cls(counts, float(data["sum"])) if len(counts) == len(BOUNDS) + 1 else cls()


@dataclass
class RunCounts:
    """The counts of all runs since ``since``. Each batch of the log is counted once, by the first turn that has it."""

    since: datetime
    upto: Lsn = ZERO
    """Batches up to this LSN are counted."""
    transactions: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROW_KINDS, 0))
    """Row messages by pgoutput's letter for the kind."""
    bytes: int = 0
    """Size of the messages, uncompressed."""
    turns: dict[str, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in STAGES})
    """Seconds of each turn, by stage."""
    durable: Histogram = field(default_factory=Histogram)
    """For each batch: seconds from its first commit on the source until the batch was durable in the log."""
    readable: Histogram = field(default_factory=Histogram)
    """For each batch: seconds from its first commit on the source until a consistent point contained it."""
    receiver_bytes: int | None = None
    """Resident memory of the receiver process."""
    succeeded: datetime | None = None
    """The last time when, in a sync in follow mode, the mirrors had applied the whole log and a point listed them."""
    written: datetime | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=datetime.isoformat)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        receiver, succeeded, written = data["receiver_bytes"], data["succeeded"], data["written"]
        return cls(
            since=datetime.fromisoformat(data["since"]),
            upto=Lsn(data["upto"]),
            transactions=int(data["transactions"]),
            rows={kind: int(data["rows"][kind]) for kind in ROW_KINDS},
            bytes=int(data["bytes"]),
            turns={stage: Histogram.from_json(data["turns"][stage]) for stage in STAGES},
            durable=Histogram.from_json(data["durable"]),
            readable=Histogram.from_json(data["readable"]),
            receiver_bytes=None if receiver is None else int(receiver),
            succeeded=None if succeeded is None else datetime.fromisoformat(succeeded),
            written=None if written is None else datetime.fromisoformat(written),
        )


def read_counts(layout: Layout) -> RunCounts | None:
    """The counts of a lake; None before the first run, or if the file cannot be read."""
    try:
        return RunCounts.from_json(json.loads(storage.read(layout.counts)))
    except (OSError, *MALFORMED):
        return None


class Meter:
    """Counts what one run does. The run holds the lake's lock, and calls every method in its own thread. If the file
    cannot be read or written, the run continues, and counts are lost."""

    def __init__(self, layout: Layout, log: ChangeLog, points: ConsistentPoints) -> None:
        self._layout = layout
        self._log = log
        self._points = points
        self._counts: RunCounts | None = None
        self._waiting: list[BatchSummary] = []
        """Counted batches with rows that no consistent point contains yet."""
        self._changed = False
        self._wrote = -REST_SECONDS

    @property
    def counts(self) -> RunCounts:
        if self._counts is None:
            self._counts = read_counts(self._layout)
        if self._counts is None:
            # Batches below the newest point are not counted, because it is not known when they became readable.
            newest = self._points.newest()
            self._counts = RunCounts(datetime.now(UTC), newest.replay_lsn if newest else ZERO)
        return self._counts

    def took(self, batches: Sequence[BatchSummary], seconds: Mapping[str, float]) -> None:
        """Count the ``seconds`` that a turn spent, by stage. Also count its ``batches``, except those that an earlier
        turn has counted."""
        counts = self.counts
        new = [batch for batch in batches if batch.end > counts.upto]
        written = self._log.written(new)
        for batch in new:
            counts.upto = batch.end
            counts.transactions += batch.transactions
            counts.bytes += batch.bytes
            for kinds in batch.rows.values():
                for kind, number in kinds.items():
                    counts.rows[kind] += number
            if batch.first_commit_ts is not None and batch.end in written:
                counts.durable.add((written[batch.end] - batch.first_commit_ts).total_seconds())
        self._waiting += [batch for batch in new if batch.rows]
        for stage, spent in seconds.items():
            counts.turns[stage].add(spent)
        self._changed |= bool(new or seconds)

    def published(self, seconds: float) -> None:
        """Count a point that was published in this many seconds. It contains all batches that turns have counted."""
        now = datetime.now(UTC)
        for batch in self._waiting:
            if batch.first_commit_ts is not None:
                self.counts.readable.add((now - batch.first_commit_ts).total_seconds())
        self.counts.turns["publish"].add(seconds)
        self.unpublished()
        self._changed = True

    def unpublished(self) -> None:
        """Forget the batches that wait for a point: they change no mirror, so no point is made for them."""
        self._waiting.clear()

    def succeeded(self) -> None:
        """Note that the mirrors have applied the whole log, and that a point lists them."""
        self.counts.succeeded = datetime.now(UTC)

    def write_if_due(self, receiver_bytes: Callable[[], int | None]) -> None:
        """Write the file every WRITE_SECONDS, or every REST_SECONDS if nothing was counted."""
        if time.monotonic() - self._wrote >= (WRITE_SECONDS if self._changed else REST_SECONDS):
            self.counts.receiver_bytes = receiver_bytes()
            self._write()

    def close(self) -> None:
        """Write what was counted since the last write. Called when the receiver has ended."""
        if self._changed or self.counts.receiver_bytes is not None:
            self.counts.receiver_bytes = None
            self._write()

    def _write(self) -> None:
        self._wrote = time.monotonic()
        self._changed = False
        self.counts.written = datetime.now(UTC)
        with suppress(OSError, StoreFailed):
            storage.replace(self._layout.counts, self.counts.to_json().encode())


if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

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
