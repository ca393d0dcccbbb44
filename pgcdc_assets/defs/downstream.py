"""For the assets that you build on mirrors."""

from __future__ import annotations

import dagster as dg


def mirror_updated() -> dg.AutomationCondition[dg.AssetKey]:
    """Whenever a mirror that it depends on has changed: :meth:`dagster.AutomationCondition.eager`, also where ranges of
    a mirror are missing.

    A table that was published later, or was set aside for a while, lacks the ranges before its copy until the retention
    drops their keys: ``eager`` would wait for them all that time, though the mirror holds them.
    """
    return dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing())
