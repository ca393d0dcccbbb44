"""Repairs the lake after a power cut. Every operation that takes the lake's lock does this first."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.feed.recovery import recover_feeds
from pgcdc_assets.log.recovery import recover as recover_log
from pgcdc_assets.points.recovery import recover_ledgers
from pgcdc_assets.points.states import TableStates


def recover_log_and_feeds(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Repair the log, the ledgers and the feeds; the target repairs the mirrors. Yields each folder, and the files that
    were put aside there."""
    yield layout.change_log, recover_log(layout.change_log)
    yield from recover_ledgers(layout)
    yield from recover_feeds(layout, TableStates(layout).all())


def put_aside(folder: Location | str, names: tuple[str, ...]) -> str:
    """The message about a repair."""
    return f"{folder}: {len(names)} files of its log were torn, from {names[0]} on; put aside"
