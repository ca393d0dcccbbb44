"""Removes a whole table. What is left after a crash is still known as that table, and can be removed again."""

from __future__ import annotations

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.store import storage


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
