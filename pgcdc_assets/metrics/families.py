"""The metrics as Prometheus' metric families. docs/reference/metrics.md shows the content of ``FAMILIES``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import version
from threading import Lock
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pgcdc_assets.core.formats import EPOCH
from pgcdc_assets.flow.meter import Histogram
from pgcdc_assets.flow.outcomes import OperationKind, Outcome
from pgcdc_assets.metrics.movement import Lags, Movement, StageLag, received_lsn
from pgcdc_assets.metrics.readings import WAIT_SECONDS, LakeReading, Readings, SourceReading, now
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.slot.slot import SlotStatus
from pgcdc_assets.structure.record import TableState

TABLES: Final = 1000
"""The most tables that get their own series. If there are more tables, tables in a state other than streaming take
precedence."""
WAL_STATUS: Final = ("reserved", "extended", "unreserved", "lost")
KINDS: Final = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}
FAMILIES: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "pgcdc_build_info": ("gauge", "Always 1. The label `version` has the version of pgcdc.", ("version",)),
    "pgcdc_up": ("gauge", "1 if source, lake or log can be read, or if the slot exists and is not lost.", ("part",)),
    "pgcdc_ready": ("gauge", "1 if /readyz reports that replication makes progress or has nothing to do.", ()),
    "pgcdc_reading_age_seconds": ("gauge", "Seconds since the values of a part (source, lake) were read.", ("part",)),
    "pgcdc_problems": ("gauge", "Number of problems that `pgcdc status` reports.", ("severity",)),
    "pgcdc_source_wal_lsn_bytes": ("gauge", "LSN of the end of the source's durable WAL.", ()),
    "pgcdc_received_lsn_bytes": ("gauge", "LSN up to which all of the source's WAL was received.", ()),
    "pgcdc_transform_lsn_bytes": (
        "gauge",
        "LSN up to which the change log is durable. This LSN is confirmed to the slot.",
        (),
    ),
    "pgcdc_point_lsn_bytes": ("gauge", "LSN of the newest consistent point.", ()),
    "pgcdc_replay_lsn_bytes": ("gauge", "LSN up to which a table's mirror is complete.", ("table",)),
    "pgcdc_lag_bytes": (
        "gauge",
        "Bytes of WAL that a stage is behind the source: receive, apply, publish.",
        ("stage",),
    ),
    "pgcdc_lag_seconds": ("gauge", "Age of the oldest transaction that a stage has not processed.", ("stage",)),
    "pgcdc_table_lag_bytes": ("gauge", "Bytes of WAL that a table's mirror is behind the source.", ("table",)),
    "pgcdc_table_lag_seconds": ("gauge", "Age of the oldest transaction that a mirror does not contain.", ("table",)),
    "pgcdc_slot_active": ("gauge", "1 if a process reads the slot.", ()),
    "pgcdc_slot_retained_bytes": ("gauge", "Bytes of WAL that the source keeps for the slot.", ()),
    "pgcdc_slot_safe_wal_bytes": ("gauge", "Bytes of WAL that the source can write before the slot may be lost.", ()),
    "pgcdc_slot_wal_limit_bytes": (
        "gauge",
        "max_slot_wal_keep_size of the source in bytes. Absent if it sets no limit.",
        (),
    ),
    "pgcdc_slot_wal_status": ("gauge", "1 for the slot's current wal_status, 0 for the others.", ("status",)),
    "pgcdc_slot_decoded_bytes_total": ("counter", "Bytes that the source decoded for the slot.", ()),
    "pgcdc_slot_spilled_bytes_total": ("counter", "Decoded bytes that the source wrote to its disk.", ()),
    "pgcdc_slot_streamed_bytes_total": (
        "counter",
        "Decoded bytes of transactions that were sent before their commit.",
        (),
    ),
    "pgcdc_rows_total": ("counter", "Row changes that syncs read from the change log.", ("kind",)),
    "pgcdc_transactions_total": ("counter", "Transactions that syncs read from the change log.", ()),
    "pgcdc_log_bytes_total": ("counter", "Uncompressed bytes of the messages that syncs read from the change log.", ()),
    "pgcdc_lake_bytes": ("gauge", "Size of a part of the lake. The only part is change_log.", ("part",)),
    "pgcdc_mirror_bytes": ("gauge", "Size of a mirror's data files. A scrape reads two mirrors at most.", ("table",)),
    "pgcdc_turn_seconds": (
        "histogram",
        "Duration of one pass over new changes, by stage: transform, apply, publish.",
        ("stage",),
    ),
    "pgcdc_commit_to_durable_seconds": (
        "histogram",
        "From the commit of a batch's first transaction on the source until the batch was durable in the change log.",
        (),
    ),
    "pgcdc_commit_to_readable_seconds": (
        "histogram",
        "From the commit of a batch's first transaction on the source until a consistent point contained the batch.",
        (),
    ),
    "pgcdc_tables": ("gauge", "Number of tables in each state.", ("state",)),
    "pgcdc_tables_unlisted": ("gauge", "Tables without their own series, because there are more than 1,000.", ()),
    "pgcdc_apply_paused": ("gauge", "1 while apply is paused by `pgcdc pause apply`.", ()),
    "pgcdc_in_progress_transactions": ("gauge", "Transactions that are being received before their commit.", ()),
    "pgcdc_in_progress_bytes": ("gauge", "Bytes received of transactions that are not committed yet.", ()),
    "pgcdc_in_progress_oldest_seconds": (
        "gauge",
        "Seconds since pgcdc received the first part of the oldest transaction in progress. Each run starts at 0.",
        (),
    ),
    "pgcdc_prepared_transactions": ("gauge", "Prepared transactions in the lake that are not committed yet.", ()),
    "pgcdc_prepared_oldest_seconds": ("gauge", "Age of the oldest prepared transaction that is not committed yet.", ()),
    "pgcdc_receiver_resident_bytes": (
        "gauge",
        "Memory of the receiver process. The value is at most a minute old.",
        (),
    ),
    "pgcdc_last_success_timestamp_seconds": ("gauge", "When an operation last succeeded.", ("operation",)),
    "pgcdc_last_failure_timestamp_seconds": (
        "gauge",
        "When an operation last failed. Absent if it has succeeded since.",
        ("operation",),
    ),
    "pgcdc_last_verified_timestamp_seconds": ("gauge", "When `pgcdc verify` last compared a table.", ("table",)),
    "pgcdc_last_verified_lsn_bytes": ("gauge", "LSN at which `pgcdc verify` last compared a table.", ("table",)),
    "pgcdc_verified_equal": (
        "gauge",
        "1 if source and mirror were equal in the last comparison, 0 if they differed.",
        ("table",),
    ),
}
"""By the name of a metric: its type, its text, and its labels. All metrics also have the labels ``source`` and
``slot``."""
_KINDS_OF_FAMILY: Final[dict[str, type[Metric]]] = {
    "gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily,
}  # fmt: skip


@dataclass(eq=False)
class Metrics(Collector):
    """Reads source and lake at each scrape. ``seconds``: the time limit of a scrape."""

    settings: Settings
    movement: Movement = field(default_factory=Movement)
    seconds: float = WAIT_SECONDS
    clock: Callable[[], datetime] = now

    def __post_init__(self) -> None:
        self.readings = Readings(self.settings)
        self._one_at_a_time = Lock()
        """Held while ``movement`` compares the readings of a scrape with those of the last scrape. Scrapes may overlap,
        because each request has its own thread."""

    def collect(self) -> Iterator[Metric]:
        source, lake = self.readings.take(self.seconds)
        at = self.clock()
        lags, reasons = self._judged(source, lake, at)
        page = _Page((self.settings.name, self.settings.slot))
        page.add("pgcdc_build_info", 1, version("pgcdc_assets"))
        page.add("pgcdc_ready", not reasons)
        for part in (self.readings.source, self.readings.lake):
            if part.age is not None:
                page.add("pgcdc_reading_age_seconds", part.age, part.name)
        slot = source.slot if source is not None else None
        page.add("pgcdc_up", source is not None, "source")
        page.add("pgcdc_up", slot is not None and not slot.lost, "slot")
        page.add("pgcdc_up", lake is not None and lake.answers, "lake")
        page.add("pgcdc_up", lake is not None and lake.log is not None, "log")
        if source is not None:
            _source(page, source, lake)
        for stage, lag in (("receive", lags.receive), ("apply", lags.apply), ("publish", lags.publish)):
            _lag(page, "pgcdc_lag", lag, stage)
        if lake is not None:
            _status(page, lake, at)
            _tables(page, lake, lags)
        return page.families()

    def reasons(self) -> list[str]:
        """Why replication is not ready; empty if it is ready."""
        return self._judged(*self.readings.take(self.seconds), self.clock())[1]

    def _judged(
        self, source: SourceReading | None, lake: LakeReading | None, at: datetime
    ) -> tuple[Lags, list[str]]:  # fmt: skip
        """The lags, and why replication is not ready."""
        parts = ((self.readings.source, source is not None), (self.readings.lake, lake is not None))
        found = [f"{part.name}: {part.why}" for part, there in parts if not there]
        if lake is not None and not lake.answers:
            found += [f"{problem.thing} {problem.what}" for problem in lake.status.problems]
        with self._one_at_a_time:
            lags = self.movement.see(source, lake, at)
            return lags, found + self.movement.reasons(source, lake, lags, at)


class _Page:
    """Collects the values of one scrape. A family without a value is left out."""

    def __init__(self, common: tuple[str, ...]) -> None:
        self._common = common
        self._families: dict[str, Metric] = {}

    def add(self, name: str, value: float | datetime | None, *labels: str) -> None:
        """Add a value, unless it is None. A time is given as Unix time."""
        if value is None:
            return
        number = (value - EPOCH) / timedelta(seconds=1) if isinstance(value, datetime) else float(value)
        self._of(name).add_metric([*self._common, *labels], number)  # type: ignore[attr-defined]

    def histogram(self, name: str, found: Histogram, *labels: str) -> None:
        self._of(name).add_metric([*self._common, *labels], found.buckets, found.sum)  # type: ignore[attr-defined]

    def families(self) -> Iterator[Metric]:
        return iter([self._families[name] for name in FAMILIES if name in self._families])

    def _of(self, name: str) -> Metric:
        if name not in self._families:
            kind, text, labels = FAMILIES[name]
            self._families[name] = _KINDS_OF_FAMILY[kind](name, text, labels=("source", "slot", *labels))  # type: ignore[call-arg]
        return self._families[name]


def _source(page: _Page, source: SourceReading, lake: LakeReading | None) -> None:
    page.add("pgcdc_source_wal_lsn_bytes", source.flush_lsn)
    page.add("pgcdc_received_lsn_bytes", received_lsn(source, lake))
    page.add("pgcdc_slot_wal_limit_bytes", source.wal_limit_bytes)
    if source.slot is not None:
        _slot(page, source.slot, source)


def _slot(page: _Page, slot: SlotStatus, source: SourceReading) -> None:
    page.add("pgcdc_slot_active", slot.active)
    if slot.restart_lsn is not None:
        page.add("pgcdc_slot_retained_bytes", max(0, source.flush_lsn - slot.restart_lsn))
    page.add("pgcdc_slot_safe_wal_bytes", slot.safe_wal_size)
    present = "lost" if slot.lost else slot.wal_status
    for known in WAL_STATUS:
        page.add("pgcdc_slot_wal_status", known == present, known)
    page.add("pgcdc_slot_decoded_bytes_total", slot.decoded.total_bytes)
    page.add("pgcdc_slot_spilled_bytes_total", slot.decoded.spill_bytes)
    page.add("pgcdc_slot_streamed_bytes_total", slot.decoded.stream_bytes)


def _lag(page: _Page, name: str, lag: StageLag | None, *labels: str) -> None:
    if lag is not None:
        page.add(f"{name}_bytes", lag.bytes, *labels)
        page.add(f"{name}_seconds", lag.seconds, *labels)


def _status(page: _Page, lake: LakeReading, at: datetime) -> None:
    found = lake.status
    for severity in ("error", "warning"):
        page.add("pgcdc_problems", sum(one.severity == severity for one in found.problems), severity)
    if not lake.answers:
        return
    page.add("pgcdc_transform_lsn_bytes", lake.log)
    page.add("pgcdc_point_lsn_bytes", None if lake.point is None else lake.point.replay_lsn)
    page.add("pgcdc_lake_bytes", lake.log_bytes, "change_log")
    page.add("pgcdc_apply_paused", lake.paused)
    held, prepared = found.in_progress, found.prepared
    page.add("pgcdc_in_progress_transactions", held.number if held else 0)
    page.add("pgcdc_in_progress_bytes", held.bytes if held else 0)
    page.add("pgcdc_in_progress_oldest_seconds", held.age.total_seconds() if held else 0)
    page.add("pgcdc_prepared_transactions", len(prepared))
    since = min((EPOCH + timedelta(microseconds=one.prepare_ts) for one in prepared), default=at)
    page.add("pgcdc_prepared_oldest_seconds", max(0.0, (at - since).total_seconds()))
    for kind in OperationKind:
        outcome = found.last.get(kind, Outcome())
        # A sync in follow mode records its outcome only about once a minute. The file with the run's counts has the
        # time of the newest success.
        following = lake.counts.succeeded if lake.counts is not None and kind is OperationKind.SYNC else None
        succeeded = max((one for one in (outcome.succeeded, following) if one is not None), default=None)
        page.add("pgcdc_last_success_timestamp_seconds", succeeded, kind)
        page.add("pgcdc_last_failure_timestamp_seconds", None if outcome.failed is None else outcome.failed.at, kind)
    if lake.counts is not None:
        _counts(page, lake)


def _counts(page: _Page, lake: LakeReading) -> None:
    counts = lake.counts
    assert counts is not None
    for letter, kind in KINDS.items():
        page.add("pgcdc_rows_total", counts.rows[letter], kind)
    page.add("pgcdc_transactions_total", counts.transactions)
    page.add("pgcdc_log_bytes_total", counts.bytes)
    for stage, found in counts.turns.items():
        page.histogram("pgcdc_turn_seconds", found, stage)
    page.histogram("pgcdc_commit_to_durable_seconds", counts.durable)
    page.histogram("pgcdc_commit_to_readable_seconds", counts.readable)
    if lake.status.at_work is not None:
        # Report the value only while a sync runs. Otherwise, it is an old value that the last run left in the file.
        page.add("pgcdc_receiver_resident_bytes", counts.receiver_bytes)


def _tables(page: _Page, lake: LakeReading, lags: Lags) -> None:
    tables = sorted(lake.status.tables, key=lambda table: (table.state is TableState.STREAMING, table.name))
    states = Counter(table.state for table in tables)
    for state in TableState:
        if state is not TableState.MOVED:
            page.add("pgcdc_tables", states[state], state)
    page.add("pgcdc_tables_unlisted", max(0, len(tables) - TABLES))
    for table in tables[:TABLES]:
        name = str(table.name)
        page.add("pgcdc_replay_lsn_bytes", table.replay_lsn, name)
        page.add("pgcdc_mirror_bytes", lake.mirror_bytes.get(table.name), name)
        _lag(page, "pgcdc_table_lag", lags.tables.get(name), name)
        proof = lake.proofs.get(table.name)
        if proof is not None:
            page.add("pgcdc_last_verified_timestamp_seconds", proof.at, name)
            page.add("pgcdc_last_verified_lsn_bytes", proof.lsn, name)
            page.add("pgcdc_verified_equal", proof.equal, name)
