"""Health rules: facts in, problems in words out. Pure: the facts are read by :mod:`pgcdc_assets.checks.status`."""

from __future__ import annotations

from itertools import chain

from pgcdc_assets.checks import slothealth, tablehealth
from pgcdc_assets.checks.facts import Facts
from pgcdc_assets.checks.problem import Problem


def problems(facts: Facts) -> list[Problem]:
    """Every rule's findings, errors first."""
    found = list(chain.from_iterable(rule(facts) for rule in (*slothealth.RULES, *tablehealth.RULES)))
    return sorted(found, key=lambda problem: problem.severity != "error")
