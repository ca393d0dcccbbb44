"""Finds the files of a table that nobody needs any more: removed files, and files that killed processes left.

VACUUM's rule goes by the clock and by the removals in the log. Here a file stays as long as a version that somebody may
be reading refers to it: a promised version, the newest version, or a version that was the newest recently.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta

from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.log import open_delta
from pgcdc_assets.delta.loglisting import LogListing
from pgcdc_assets.delta.references import references
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
