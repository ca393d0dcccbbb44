"""Repairs the feeds after a power cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.recovery import recover


def recover_feeds(layout: Layout, names: Iterable[TableName]) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Repair one feed after the other; yields the folder of each feed, and the files that were put aside there."""
    yield layout.messages, recover(layout.messages).aside
    for name in names:
        yield layout.changes(name), recover(layout.changes(name)).aside
