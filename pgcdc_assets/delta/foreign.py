"""Tables as delta-rs opens them, for its query engine."""

from __future__ import annotations

from deltalake import DeltaTable

from pgcdc_assets.core.location import Location
from pgcdc_assets.store import storage


def opened(folder: Location, version: int) -> DeltaTable:
    """One version of a table. Raises delta-rs's own errors."""
    return DeltaTable(folder.text, version=version, storage_options=storage.options(folder) or None)
