"""Deletes files of tables: files that nobody needs any more, or all files of a table.

VACUUM's rule goes by the clock and by the removals in the log. Here a file stays as long as a version that somebody may
be reading refers to it: a promised version, the newest version, or a version that was the newest recently.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.log import open_delta
from pgcdc_assets.delta.references import LogListing, references
from pgcdc_assets.store import storage
from pgcdc_assets.store.base import Entry


def unneeded(listing: LogListing, versions: Collection[int], newest: int, before: float) -> list[Entry]:
    """The data files and deletion vectors that neither these versions nor the newest refer to, and that have been in
    the folder since ``before``. The age matters because a file is put there before the commit that names it."""
    needed = references(listing, versions, newest).needed
    return [entry for entry in storage.walk(listing.folder) if entry.name not in needed and entry.placed <= before]


def sweep(folder: Location, grace: timedelta) -> int:
    """Delete the files that are needed by no version that was the table's newest within ``grace``; returns how many.

    This is for tables without promised older versions. 0 if there is no table.
    """
    table = open_delta(folder)
    if table is None:
        return 0
    before, listing = time.time() - grace.total_seconds(), LogListing.of(folder)
    young = listing.first_young(table.number, before)
    held = [version for version in range(young, table.number + 1) if listing.holds(version)]
    old = unneeded(listing, held, table.number, before)
    storage.delete([folder / entry.name for entry in old])
    return len(old)


def remove_table(folder: Location) -> tuple[int, int]:
    """Remove all files of a table; returns their number and their bytes.

    The log is removed last, and its first file last of all, because that file says whose table it is.
    """
    found = {entry.name: entry.size for entry in storage.walk(folder, hidden=True)}
    of_log = sorted((name for name in found if name.startswith(f"{DELTA_LOG}/")), reverse=True)
    storage.delete([folder / name for name in found.keys() - set(of_log)])
    for name in of_log:
        storage.delete([folder / name])
    storage.delete_folder(folder)
    return len(found), sum(found.values())
