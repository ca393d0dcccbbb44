"""The alarm rules and the board of deploy/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

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
