"""Reads the rows of a mirror directly from its files, for tables that delta-rs cannot query."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.delta.mapping import physical
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget


def live_rows(table: DeltaVersion) -> Iterator[pa.Table]:
    """All live rows, by row groups, under the table's own column names. LakeError for a file that is missing or
    damaged."""
    held = held_columns(table)
    source = MergeTarget(table.folder, physical(held, table.schema), tuple(held.names), table.files)
    for group in source.groups({}):
        rows = group.read(held.names)
        yield rows if group.alive.all() else rows.filter(pa.array(group.alive))


def held_columns(table: DeltaVersion) -> pa.Schema:
    """The columns of a table, with the table's own names and types."""
    return pa.schema(pa.schema(table.schema.to_arrow()))
