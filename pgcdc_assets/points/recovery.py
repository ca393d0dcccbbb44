"""Repairs the change log, the ledgers and the feeds after a power cut. The target repairs the mirrors."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.delta.recovery import recover
from pgcdc_assets.log.commit import recover_log
from pgcdc_assets.points.states import TableStates


def recover_tables(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Repairs these Delta tables one after the other. Yields the folder of each, and the names of the damaged files
    that were renamed there, so that no reader uses them."""
    yield layout.change_log, recover_log(layout.change_log)
    for folder in (*layout.ledgers, layout.messages):
        yield folder, recover(folder).aside
    # The names of the feeds are in a ledger, which is repaired here.
    for folder in map(layout.changes, TableStates(layout).all()):
        yield folder, recover(folder).aside
