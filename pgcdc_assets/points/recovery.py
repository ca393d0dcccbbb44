"""Mends what a power cut left of the points, the states and what no mirror took."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.recovery import recover


def recover_ledgers(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Each folder, and the files put aside there; one is mended as the next is asked for."""
    for ledger in (layout.table_states, layout.consistent_points, layout.untaken_rows):
        yield ledger, recover(ledger).aside
