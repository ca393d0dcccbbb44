"""The metrics that a scrape returns. The alarm rules, the board (a dashboard for Grafana) and docs/reference/metrics.md
name only metrics that exist. A *reading* reads the source or the lake for the next scrape."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pyarrow as pa
import pytest
import yaml

from pgcdc_assets import Lake
from pgcdc_assets.checks.health import TableFacts
from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.metrics import families, readings
from pgcdc_assets.metrics.families import FAMILIES
from pgcdc_assets.metrics.readings import LakeReader, Part
from pgcdc_assets.settings import Settings
from pgcdc_assets.structure.record import TableState
from tests.lake.lakes import written_tables
from tests.metrics.moments import (
    ALARMS,
    BOARD,
    NOW,
    ROOT,
    RULES,
    board_expressions,
    exposed,
    full_lake,
    lake,
    metrics_of,
    names,
    samples,
    source,
)
from tests.waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"
_SUFFIX = re.compile(r"_(bucket|count|sum|created)$")


def test_a_scrape_returns_every_metric() -> None:
    """``FAMILIES`` contains all metrics, and the list in docs/reference/metrics.md is generated from it."""
    text = exposed(metrics_of(source(), full_lake()))
    assert {_SUFFIX.sub("", name) for name, _ in samples(text)} == FAMILIES.keys()


def test_the_page_of_metrics_names_only_existing_metrics() -> None:
    assert {_SUFFIX.sub("", name) for name in names(PAGE.read_text())} <= FAMILIES.keys()


def test_metrics_have_the_values_of_source_and_lake() -> None:
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


def test_without_source_the_metrics_of_the_lake_remain() -> None:
    found = samples(exposed(metrics_of(None, full_lake())))
    assert {labels[0]: value for (name, labels), value in found.items() if name == "pgcdc_up"} == {
        "source": 0, "slot": 0, "lake": 1, "log": 1}  # fmt: skip
    assert found["pgcdc_ready", ()] == 0
    assert found["pgcdc_transform_lsn_bytes", ()] == 1000
    assert not [name for name, _ in found if name.startswith(("pgcdc_slot_", "pgcdc_lag_"))]


def test_without_lake_the_metrics_of_the_slot_remain() -> None:
    found = samples(exposed(metrics_of(source(1000), None)))
    assert {labels[0]: value for (name, labels), value in found.items() if name == "pgcdc_up"} == {
        "source": 1, "slot": 1, "lake": 0, "log": 0}  # fmt: skip
    assert found["pgcdc_slot_retained_bytes", ()] == 500
    assert found["pgcdc_lag_bytes", ("receive",)] == 100
    assert ("pgcdc_lag_bytes", ("publish",)) not in found


def test_without_slot_there_is_no_metric_of_the_slot() -> None:
    found = samples(exposed(metrics_of(replace(source(), slot=None), lake())))
    assert (found["pgcdc_up", ("source",)], found["pgcdc_up", ("slot",)], found["pgcdc_ready", ()]) == (1, 0, 0)
    assert not [name for name, _ in found if name in ("pgcdc_slot_active", "pgcdc_slot_wal_status")]


def test_a_scrape_does_not_return_the_memory_of_a_dead_receiver() -> None:
    found = samples(exposed(metrics_of(source(), lake(at_work=None))))
    assert ("pgcdc_receiver_resident_bytes", ()) not in found


def test_only_a_limited_number_of_tables_have_metrics_and_tables_set_aside_come_first(
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


def test_labels_of_metrics_name_source_and_slot_but_no_secret() -> None:
    text = exposed(metrics_of(source(), full_lake()))
    assert "hunter2" not in text
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('slot="s",source="pgcdc"' in line for line in series)


# If reading the source hangs or fails, metrics of the lake are still returned, and vice versa ---------


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event. The readings of the test hang until the event is set."""
    gate = threading.Event()
    yield gate
    gate.set()


def value(part: Part[int], seconds: float = 5) -> int | None:
    part.begin()
    return part.value(time.monotonic() + seconds)


def test_reading_that_hangs_delays_no_scrape_and_is_started_only_once(gate: threading.Event) -> None:
    began: list[int] = []

    def hang() -> int:
        began.append(1)
        gate.wait()
        return 7

    part = Part("lake", hang)
    assert value(part, 0.05) is None
    assert value(part, 0.05) is None
    assert (part.why, len(began)) == ("does not answer in time", 1)
    gate.set()
    assert value(part) == 7


def test_during_a_slow_reading_a_scrape_returns_the_last_value_up_to_an_age_limit(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([1, 2])

    def slow() -> int:
        found = next(answers)
        if found == 2:
            gate.wait()
        return found

    part = Part("lake", slow)
    assert value(part) == 1
    monkeypatch.setattr(readings, "FRESH_SECONDS", 0.0)
    assert value(part, 0.05) == 1
    monkeypatch.setattr(readings, "STALE_SECONDS", 0.0)
    assert value(part, 0.05) is None


def test_a_scrape_uses_the_last_reading_while_it_is_fresh() -> None:
    answers = iter([1, 2])
    part = Part("source", lambda: next(answers))
    assert [value(part), value(part)] == [1, 1]


def test_the_message_of_a_failed_reading_is_shown_only_for_an_error_of_pgcdc() -> None:
    def away() -> int:
        raise SourceUnavailable("does not answer", thing="u@h/d")

    def broken() -> int:
        raise RuntimeError("password=hunter2")

    part = Part("source", away)
    assert value(part) is None
    assert part.why == "u@h/d: does not answer"
    part = Part("source", broken)
    assert value(part) is None
    assert part.why == "cannot be read: RuntimeError"
    wait_for(lambda: not [one for one in threading.enumerate() if one.name == "read-source"], what="the end")


def test_each_scrape_reads_the_sizes_of_only_a_few_mirrors_and_only_of_new_versions(tmp_path: Path) -> None:
    rows = pa.table({"id": range(100)})
    layout = written_tables(Location.of(tmp_path / "lake"), {TableName("public", name): rows for name in "abc"})
    reader, versions = LakeReader(Settings(lake=tmp_path / "lake")), Lake(layout.root).at().versions
    found = [reader._mirror_bytes(versions) for _ in range(3)]
    assert [len(sizes) for sizes in found] == [2, 3, 3]
    assert {name.name: size for name, size in found[-1].items()} == {
        name: sum(file.stat().st_size for file in (tmp_path / "lake/public" / name).glob("*.parquet")) for name in "abc"
    }  # fmt: skip
    shutil.rmtree(tmp_path / "lake/public")
    assert reader._mirror_bytes(versions) == found[-1], "no file is read again"
    newer = dict.fromkeys(versions, 9)
    assert reader._mirror_bytes(newer) == found[-1], "what cannot be read keeps its last size"
    assert reader._mirror_bytes(newer) == found[-1]


# The alarm rules and the board use only metrics and labels that exist, and docs/guides/alarms.md explains each alarm

_ENDING = re.compile(r"_(bucket|count|sum)$")


def family(name: str) -> str:
    bare = _ENDING.sub("", name)
    return bare if FAMILIES.get(bare, ("",))[0] == "histogram" else name


@pytest.mark.parametrize("expressions", [list(ALARMS.values()), list(board_expressions())], ids=["alarms", "board"])
def test_expressions_of_alarms_and_board_name_existing_metrics_and_labels(expressions: list[str]) -> None:
    assert {family(name) for text in expressions for name in names(text)} <= FAMILIES.keys()
    for text in expressions:
        for name, matchers in re.findall(r"(pgcdc_\w+)\{([^}]*)\}", text):
            known = {"source", "slot", "le", *FAMILIES[family(name)][2]}
            assert set(re.findall(r"(\w+)=", matchers)) <= known, text


def test_the_board_shows_every_metric_except_lsns_and_a_few_listed_metrics() -> None:
    shown = {family(name) for text in board_expressions() for name in names(text)}
    left = FAMILIES.keys() - shown
    assert {name for name in left if not name.endswith("_lsn_bytes")} == {
        "pgcdc_reading_age_seconds", "pgcdc_tables_unlisted", "pgcdc_apply_paused", "pgcdc_table_lag_bytes",
        "pgcdc_last_failure_timestamp_seconds",
    }  # fmt: skip


def test_panels_of_the_board_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_each_alarm_has_a_section_that_explains_it() -> None:
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs/guides/alarms.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(ALARMS)


@pytest.mark.parametrize("page", ["guides/alarms.md", "guides/monitoring.md", "reference/metrics.md"])
def test_pages_about_metrics_use_existing_commands_and_the_deployed_prometheus_yml(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for line in re.findall(r"`pgcdc ([^`]+)`", text):
        words = line.replace("TABLE", "public.t").replace(":9187", "127.0.0.1:9187").split()
        # The context has the settings of pgcdc, because Click stores the help options of the first context in the
        # command.
        context = click.Context(pgcdc, **pgcdc.context_settings)
        name, found, rest = pgcdc.resolve_command(context, words)
        assert found is not None, name
        if words not in (["snapshot"], ["heal"]):
            found.make_context(name, rest, parent=context)
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        assert yaml.safe_load(block) == yaml.safe_load(RULES.with_name("prometheus.yml").read_text())


def test_each_alarm_has_a_test_of_its_rule() -> None:
    tried = set(re.findall(r'alertname="(\w+)"', (ROOT / "tests/metrics/alerts.test.yml").read_text()))
    assert tried == ALARMS.keys()


def test_each_alarm_fires_in_its_situation_and_no_alarm_fires_without_cause() -> None:
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for command in (["check", "rules", str(RULES)], ["check", "config", str(RULES.with_name("prometheus.yml"))],
                    ["test", "rules", str(ROOT / "tests/metrics/alerts.test.yml")]):  # fmt: skip
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
