"""Deletes files of the ledgers that nobody needs."""

from __future__ import annotations

from datetime import timedelta

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.delta.sweep import sweep


def sweep_ledgers(layout: Layout, grace: timedelta) -> None:
    """Delete the files that no recent version of the ledgers needs."""
    for ledger in (layout.consistent_points, layout.table_states, layout.untaken_rows):
        sweep(ledger, grace)
