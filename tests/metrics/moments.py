"""Builds the readings of source and lake that a scrape uses, for one moment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pgcdc_assets.checks.health import TableFacts, error
from pgcdc_assets.checks.positions import Pending
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.checks.report import Proof
from pgcdc_assets.checks.status import Status
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.meter import RunCounts
from pgcdc_assets.flow.outcomes import Failure, Outcome
from pgcdc_assets.log.announcements import Announcement
from pgcdc_assets.log.transactions import PreparedKey, PreparedTransaction
from pgcdc_assets.metrics.families import Metrics
from pgcdc_assets.metrics.movement import Movement
from pgcdc_assets.metrics.readings import LakeReading, Part, SourceReading
from pgcdc_assets.points.points import Point
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.slot.slot import Decoded, SlotStatus
from pgcdc_assets.structure.record import TableState

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
T, U = TableName("public", "t"), TableName("public", "u")


def slot(**changed: Any) -> SlotStatus:
    values: dict[str, Any] = dict.fromkeys(SlotStatus.__dataclass_fields__)
    values |= {
        "name": "s", "plugin": "pgoutput", "database": "d", "connected_to": "d", "temporary": False, "active": True,
        "restart_lsn": Lsn(500), "confirmed_flush_lsn": Lsn(900), "wal_lsn": Lsn(1000), "wal_status": "reserved",
        "safe_wal_size": 7000, "decoded": Decoded(1, 2, 3, 4, 5, 6),
    }  # fmt: skip
    return SlotStatus(**values | changed)


def source(flush: int = 1000, **of_slot: Any) -> SourceReading:
    return SourceReading(Lsn(flush), slot(**of_slot), 8000)


def lake(
    log: int | None = 1000, point: int | None = 1000, *, pending: Mapping[TableName, tuple[int, float]] | None = None,
    complete: int | None = None, ago: float = 0, now: datetime = NOW, **of_status: Any,
) -> LakeReading:  # fmt: skip
    """``pending``: by table, the start LSN of the oldest transaction that the mirror lacks, and how many seconds ago
    this transaction was committed. ``ago``: the age of the newest point in seconds."""
    tables = tuple(TableFacts(name, TableState.STREAMING, Lsn(point or 0)) for name in (T, U))
    values = {"tables": tables, "problems": (), "at_work": "`pgcdc follow`"} | of_status
    return LakeReading(
        status=Status(None, None, None, None, **values),
        answers=True,
        log=None if log is None else Lsn(log),
        complete=None if log is None else Lsn(complete or log),
        log_bytes=77,
        point=None if point is None else Point(Lsn(point), now - timedelta(seconds=ago), {T: 1, U: 1}, {}),
        pending={name: Pending(Lsn(start), now - timedelta(seconds=seconds))
                 for name, (start, seconds) in (pending or {}).items()},
        counts=RunCounts(NOW - timedelta(days=1), receiver_bytes=9000, succeeded=NOW - timedelta(seconds=3)),
        proofs={T: Proof(Lsn(800), True, NOW - timedelta(days=2))},
        alive=now - timedelta(seconds=ago),
        mirror_bytes={T: 123},
    )  # fmt: skip


def full_lake() -> LakeReading:
    """A lake for which every metric has a value."""
    prepared = PreparedTransaction(PreparedKey(7, "g", Lsn(240)), int(NOW.timestamp() - 90) * 1_000_000, frozenset(),
                                   None, 3, 300, None, 2)  # type: ignore[arg-type]  # fmt: skip
    failed = Failure("maintain", NOW - timedelta(hours=1), "no room")
    return lake(
        pending={T: (900, 4)},
        in_progress=Announcement(2, 5000, 9, Lsn(600), datetime.now(UTC) - timedelta(seconds=30)),
        prepared=(prepared,),
        problems=(error(ProblemCode.SLOT_LOST, "slot", "is odd", "mend it"),),
        last={"sync": Outcome(NOW - timedelta(hours=5)), "maintenance": Outcome(None, failed)},
    )


Samples = dict[tuple[str, tuple[str, ...]], float]
"""Maps the name of a sample, and the values of its labels without ``source`` and ``slot``, to the value of the
sample."""


def metrics_of(source: SourceReading | None, lake: LakeReading | None) -> Metrics:
    found = Metrics(Settings(source="host=h password=hunter2", slot="s"), Movement(), clock=lambda: NOW)
    found.readings.source = Part("source", cast(Any, lambda: source))
    found.readings.lake = Part("lake", cast(Any, lambda: lake))
    return found


def exposed(metrics: Metrics) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    return {
        (one.name, tuple(value for name, value in one.labels.items() if name not in ("source", "slot"))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def names(text: str) -> set[str]:
    """The names of pgcdc's samples in a PromQL expression, in the text that a scrape returns, or on a page."""
    return set(re.findall(r"\bpgcdc_[a-z_]+\b", text))


ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/pgcdc.json").read_text())
ALARMS: dict[str, str] = {
    rule["alert"]: rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}


def board_expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (found["definition"] for found in BOARD["templating"]["list"] if found["type"] == "query")
