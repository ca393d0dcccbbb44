"""The text that a scrape gets, for readings that a test makes."""

from __future__ import annotations

import re
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pgcdc_assets.metrics.families import Metrics
from pgcdc_assets.metrics.movement import Movement
from pgcdc_assets.metrics.readings import LakeReading, Part, SourceReading
from pgcdc_assets.settings import Settings
from tests.metrics.moments import NOW

Samples = dict[tuple[str, tuple[str, ...]], float]
"""The values by name of the sample and its labels besides ``source`` and ``slot``."""


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
    """The names of our samples in an expression or an exposition."""
    return set(re.findall(r"\bpgcdc_[a-z_]+\b", text))
