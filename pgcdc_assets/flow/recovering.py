"""Repairs what a power cut left of the lake, at the start of whatever takes its lock."""

from __future__ import annotations

from collections.abc import Iterator

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.recovery import recover
from pgcdc_assets.log.recovery import recover as recover_log
from pgcdc_assets.points.states import TableStates


def recover_log_and_feeds(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """All but the mirrors, which are measured by the points: each folder, and the files put aside there."""
    yield layout.change_log, recover_log(layout.change_log)
    for ledger in (layout.table_states, layout.consistent_points, layout.untaken_rows, layout.messages):
        yield ledger, recover(ledger).aside
    for name in TableStates(layout).all():
        yield layout.changes(name), recover(layout.changes(name)).aside


def put_aside(folder: Location, names: tuple[str, ...]) -> str:
    """What was repaired, in words."""
    return f"{folder}: {len(names)} files of its log were torn, from {names[0]} on; put aside"
