"""Writes the comments of a table and its columns to its mirror, where readers of Delta look for them.

A column's comment is the ``comment`` of the column's metadata. A table's comment is the description in the table's
metadata. Each comment from the source has a mark beside it (:data:`pgcdc_assets.delta.mapping.OURS`): in the column's
metadata, or among the table's properties. The mark shows which comments may be removed when the source removes them. A
comment by another writer stays if the source has no comment there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.delta.mapping import OURS, Columns, stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.mirror.delta.mirror import Mirrors


@dataclass(frozen=True)
class Commented:
    """The metadata of a mirror with the comments of its table. ``description``: None leaves the description as it
    is."""

    columns: Columns
    properties: Mapping[str, str]
    description: str | None

    @classmethod
    def of(cls, delta: DeltaVersion, table: Table, columns: Columns | None = None) -> Self:
        """``columns``: the columns that the mirror is to get in place of its own. Columns of the table that it lacks
        are skipped."""
        held = stated(delta.metadata)
        same = {field["name"]: field["name"] for field in held.fields}
        left = Columns(held.fields, {}) if columns is None else columns.commented_as(held, same)
        told = left.commented(table.column_comments)
        comment, ours = table.comment, delta.configuration.get(OURS) == "true"
        if comment is None:
            return cls(told, {OURS: "false"} if ours else {}, "" if ours else None)
        return cls(told, {} if ours else {OURS: "true"}, comment)

    def stands(self, delta: DeltaVersion) -> bool:
        """Whether the mirror already has this metadata."""
        same = self.columns.fields == stated(delta.metadata).fields and not self.properties
        return same and self.description in (None, delta.metadata.get("description"))


def comment_mirror(mirrors: Mirrors, table: Table) -> int:
    """Write the comments of the table to its mirror; returns the mirror's version after that. The rows are not
    touched."""

    def attempt() -> int:
        mirror = mirrors.open(table.name)
        delta = mirror.delta
        if delta is None or mirror.snapshot_lsn is None:
            raise LakeError("has no copy that comments could be of", thing=f"mirror {table.name}")
        told = Commented.of(delta, table)
        if told.stands(delta):
            return delta.number
        return commit_columns(delta, told.columns, told.properties, description=told.description)

    return again_after_lost_races(attempt)
