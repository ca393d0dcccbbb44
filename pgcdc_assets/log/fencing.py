"""Shuts out a writer that has lost the lake and may not know it yet, because it was stopped or cut off, and continues.

That writer's next commit to a table takes the number after the newest version that the writer has seen. The commit is
refused if that number exists. So the new holder of the lake first puts an empty commit on each table, and on the change
log before all other tables. The old writer then checks again who holds the lake. Its receiver, which holds nothing
itself, sees another leader in the log.
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
    """Put a commit of the new leader on all tables of the lake. ``leader`` is higher than the number of any earlier
    leader."""
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
