"""What a scrape says, and that docs/reference/metrics.md names only metrics that exist."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.checks.health import TableFacts
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.metrics import families
from pgcdc_assets.metrics.families import FAMILIES
from tests.metrics.exposition import exposed, metrics_of, names, samples
from tests.metrics.moments import NOW, full_lake, lake, source

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"
_SUFFIX = re.compile(r"_(bucket|count|sum|created)$")


def test_each_metric_is_exposed() -> None:
    """The reference shows FAMILIES."""
    text = exposed(metrics_of(source(), full_lake()))
    assert {_SUFFIX.sub("", name) for name, _ in samples(text)} == FAMILIES.keys()


def test_the_page_names_no_metric_that_does_not_exist() -> None:
    assert {_SUFFIX.sub("", name) for name in names(PAGE.read_text())} <= FAMILIES.keys()


def test_values_of_a_lake_in_use() -> None:
    found = samples(exposed(metrics_of(source(), full_lake())))
    assert found["pgcdc_ready", ()] == 1
    assert found["pgcdc_slot_retained_bytes", ()] == 500
    assert found["pgcdc_slot_wal_limit_bytes", ()] == 8000
    statuses = {labels[0]: value for (name, labels), value in found.items() if name == "pgcdc_slot_wal_status"}
    assert statuses == {"reserved": 1, "extended": 0, "unreserved": 0, "lost": 0}
    assert found["pgcdc_slot_spilled_bytes_total", ()] == 4
    assert found["pgcdc_slot_streamed_bytes_total", ()] == 6
    assert found["pgcdc_lag_bytes", ("publish",)] == 100
    assert found["pgcdc_lag_seconds", ("publish",)] == 4
    assert found["pgcdc_table_lag_seconds", ("public.t",)] == 4
    assert found["pgcdc_in_progress_transactions", ()] == 2
    assert found["pgcdc_in_progress_oldest_seconds", ()] == pytest.approx(30, abs=20)
    assert (found["pgcdc_prepared_transactions", ()], found["pgcdc_prepared_oldest_seconds", ()]) == (1, 90)
    assert found["pgcdc_last_success_timestamp_seconds", ("sync",)] == NOW.timestamp() - 3
    assert found["pgcdc_last_failure_timestamp_seconds", ("maintenance",)] == NOW.timestamp() - 3600
    assert found["pgcdc_verified_equal", ("public.t",)] == 1
    assert found["pgcdc_mirror_bytes", ("public.t",)] == 123
    assert found["pgcdc_last_verified_lsn_bytes", ("public.t",)] == 800
    assert found["pgcdc_tables", ("streaming",)] == 2
    assert found["pgcdc_problems", ("error",)] == 1
    assert found["pgcdc_turn_seconds_bucket", ("+Inf", "apply")] == 0


def test_without_source_the_lake_is_shown() -> None:
    found = samples(exposed(metrics_of(None, full_lake())))
    assert {labels[0]: value for (name, labels), value in found.items() if name == "pgcdc_up"} == {
        "source": 0, "slot": 0, "lake": 1, "log": 1}  # fmt: skip
    assert found["pgcdc_ready", ()] == 0
    assert found["pgcdc_transform_lsn_bytes", ()] == 1000
    assert not [name for name, _ in found if name.startswith(("pgcdc_slot_", "pgcdc_lag_"))]


def test_without_lake_the_slot_is_shown() -> None:
    found = samples(exposed(metrics_of(source(1000), None)))
    assert {labels[0]: value for (name, labels), value in found.items() if name == "pgcdc_up"} == {
        "source": 1, "slot": 1, "lake": 0, "log": 0}  # fmt: skip
    assert found["pgcdc_slot_retained_bytes", ()] == 500
    assert found["pgcdc_lag_bytes", ("receive",)] == 100
    assert ("pgcdc_lag_bytes", ("publish",)) not in found


def test_without_slot_there_is_no_value_of_the_slot() -> None:
    found = samples(exposed(metrics_of(replace(source(), slot=None), lake())))
    assert (found["pgcdc_up", ("source",)], found["pgcdc_up", ("slot",)], found["pgcdc_ready", ()]) == (1, 0, 0)
    assert not [name for name, _ in found if name in ("pgcdc_slot_active", "pgcdc_slot_wal_status")]


def test_memory_of_a_receiver_that_is_dead_is_not_shown() -> None:
    found = samples(exposed(metrics_of(source(), lake(at_work=None))))
    assert ("pgcdc_receiver_resident_bytes", ()) not in found


def test_tables_beyond_the_limit_have_no_series_and_those_in_trouble_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "TABLES", 2)
    tables = tuple(TableFacts(TableName("public", f"t{n}"), TableState.STREAMING, Lsn(5)) for n in range(4))
    aside = TableFacts(TableName("public", "z"), TableState.SET_ASIDE, Lsn(5))
    found = samples(exposed(metrics_of(source(), lake(tables=(*tables, aside)))))
    shown = [labels[0] for name, labels in found if name == "pgcdc_replay_lsn_bytes"]
    assert shown == ["public.z", "public.t0"]
    assert found["pgcdc_tables_unlisted", ()] == 3
    assert found["pgcdc_tables", ("streaming",)] == 4


def test_labels_name_source_and_slot_and_no_secret() -> None:
    text = exposed(metrics_of(source(), full_lake()))
    assert "hunter2" not in text
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('slot="s",source="pgcdc"' in line for line in series)
