"""Repairs the ledgers of points, states and untaken rows after a power cut."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.recovery import recover


def recover_ledgers(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Repair one ledger after the other; yields the folder of each ledger, and the files that were put aside there."""
    for ledger in (layout.table_states, layout.consistent_points, layout.untaken_rows):
        yield ledger, recover(ledger).aside
