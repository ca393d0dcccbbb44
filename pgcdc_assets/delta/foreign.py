"""Opens tables with delta-rs, for its query engine."""

from __future__ import annotations

from typing import Final

from deltalake import DeltaTable

from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.store import storage

_UNKNOWN: Final = frozenset({"typeWidening"})
"""Features of tables that delta-rs opens, but cannot query."""


def queryable(table: DeltaVersion) -> bool:
    """Whether delta-rs's query engine reads the table."""
    return not table.features & _UNKNOWN


def opened(folder: Location, version: int) -> DeltaTable:
    """One version of a table. Raises delta-rs's own errors."""
    return DeltaTable(folder.text, version=version, storage_options=storage.options(folder) or None)
