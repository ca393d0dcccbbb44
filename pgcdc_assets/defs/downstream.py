"""Conditions for the assets that users build on mirrors."""

from __future__ import annotations

import dagster as dg


def mirror_updated() -> dg.AutomationCondition[dg.AssetKey]:
    """True whenever a mirror that the asset depends on has changed: like :meth:`dagster.AutomationCondition.eager`, but
    also if ranges of a mirror are missing.

    A table that was published later, or was set aside for a while, lacks the ranges before its copy until the retention
    drops their keys: ``eager`` would wait for them all that time, though the mirror holds them.
    """
    return dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing())
