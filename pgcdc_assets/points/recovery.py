"""Mends what a power cut left of the tables of points, states and untaken rows."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.recovery import recover


def recover_ledgers(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Mend one table after the other; yields the folder of each, and the files put aside there."""
    for ledger in (layout.table_states, layout.consistent_points, layout.untaken_rows):
        yield ledger, recover(ledger).aside
