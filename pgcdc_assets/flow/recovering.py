"""Repairs what a power cut left of the lake, at the start of every operation that takes its lock."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.feed.recovery import recover_feeds
from pgcdc_assets.log.recovery import recover as recover_log
from pgcdc_assets.points.recovery import recover_ledgers
from pgcdc_assets.points.states import TableStates


def recover_log_and_feeds(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Repair all but the mirrors, which the target mends; yields each folder, and the files put aside there."""
    yield layout.change_log, recover_log(layout.change_log)
    yield from recover_ledgers(layout)
    yield from recover_feeds(layout, TableStates(layout).all())


def put_aside(folder: Location | str, names: tuple[str, ...]) -> str:
    """What was repaired, in words."""
    return f"{folder}: {len(names)} files of its log were torn, from {names[0]} on; put aside"
