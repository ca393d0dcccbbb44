"""Applies the health rules: takes facts and returns problems in words. Pure: :mod:`pgcdc_assets.checks.status` reads
the facts."""

from __future__ import annotations

from itertools import chain

from pgcdc_assets.checks import slothealth, tablehealth
from pgcdc_assets.checks.facts import Facts
from pgcdc_assets.checks.problem import Problem


def problems(facts: Facts) -> list[Problem]:
    """The problems that the rules find, errors first."""
    found = list(chain.from_iterable(rule(facts) for rule in (*slothealth.RULES, *tablehealth.RULES)))
    return sorted(found, key=lambda problem: problem.severity != "error")
