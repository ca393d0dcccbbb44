"""Shuts out a writer that has lost the lake and may not know it yet: it was stopped, or cut off, and wakes.

Its next commit to a table is the number behind the newest that it has seen, and is refused if there is one. So whoever
inherits the lake puts an empty commit on each table first, on the change log before all others. The writer then looks
again who holds the lake; the receiver, which holds nothing itself, sees another leader in the log.
"""

from __future__ import annotations

import logging

from pgcdc_assets.core.layout import DELTA_LOG, Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.commit import fence
from pgcdc_assets.delta.logfiles import COMMIT
from pgcdc_assets.store import storage

_log = logging.getLogger(__name__)


def shut_out(layout: Layout, leader: int) -> None:
    """Put a commit of the new leader on all tables of the lake. ``leader`` is higher than that of any leader before."""
    tables = _newest(layout.root)
    _log.warning("the last writer did not give the lake back: its commits are shut out of %d tables", len(tables))
    for folder in sorted(tables, key=lambda folder: folder != layout.change_log):
        fence(folder, tables[folder], leader)


def _newest(root: Location) -> dict[Location, int]:
    """The newest version of each Delta table."""
    found: dict[Location, int] = {}
    for entry in storage.walk(root, hidden=True):
        folder, _, name = entry.name.rpartition(f"/{DELTA_LOG}/")
        if folder and (commit := COMMIT.fullmatch(name)):
            table = root / folder
            found[table] = max(found.get(table, -1), int(commit[1]))
    return found
