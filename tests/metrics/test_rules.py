"""Alarm rules and board name only metrics and labels that exist, and docs/guides/alarms.md explains each alarm. With
Prometheus' own promtool, where it is installed, each alarm fires in its situation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import click
import pytest
import yaml

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.metrics.families import FAMILIES
from tests.metrics.exposition import names
from tests.metrics.rules import ALARMS, BOARD, ROOT, RULES, board_expressions

_SUFFIX = re.compile(r"_(bucket|count|sum)$")


def family(name: str) -> str:
    bare = _SUFFIX.sub("", name)
    return bare if FAMILIES.get(bare, ("",))[0] == "histogram" else name


@pytest.mark.parametrize("expressions", [list(ALARMS.values()), list(board_expressions())], ids=["alarms", "board"])
def test_expressions_name_metrics_and_labels_that_exist(expressions: list[str]) -> None:
    assert {family(name) for text in expressions for name in names(text)} <= FAMILIES.keys()
    for text in expressions:
        for name, matchers in re.findall(r"(pgcdc_\w+)\{([^}]*)\}", text):
            known = {"source", "slot", "le", *FAMILIES[family(name)][2]}
            assert set(re.findall(r"(\w+)=", matchers)) <= known, text


def test_the_board_shows_every_metric_except_positions() -> None:
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
def test_commands_and_configuration_of_the_pages_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for line in re.findall(r"`pgcdc ([^`]+)`", text):
        words = line.replace("TABLE", "public.t").replace(":9187", "127.0.0.1:9187").split()
        name, found, rest = pgcdc.resolve_command(click.Context(pgcdc), words)
        assert found is not None, name
        if words not in (["snapshot"], ["heal"]):
            found.make_context(name, rest)
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        assert yaml.safe_load(block) == yaml.safe_load(RULES.with_name("prometheus.yml").read_text())


def test_each_alarm_is_tried() -> None:
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
