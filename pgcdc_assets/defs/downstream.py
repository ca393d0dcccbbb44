"""Conditions for the assets that users build on mirrors."""

from __future__ import annotations

import dagster as dg


def mirror_updated() -> dg.AutomationCondition[dg.AssetKey]:
    """True when a mirror that the asset depends on has changed. Like :meth:`dagster.AutomationCondition.eager`, but
    true also if ranges of a mirror are missing.

    If a table was added to the publication later, or was set aside for some time, its mirror has no materialisation for
    the ranges before its copy. ``eager`` would wait until retention drops the keys of these ranges, although the mirror
    holds their rows.
    """
    return dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing())
