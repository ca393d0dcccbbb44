"""The columns and comments of mirrors. Also decides which tables cannot have a mirror."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.delta.mapping import OURS, Columns, stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, HASH, LEAF, RAW, REFUSED, ROW
from pgcdc_assets.protocol.text.typed import RAW_TYPE
from pgcdc_assets.protocol.text.types import arrow_type

OWN_COLUMNS: Final = frozenset((COMMIT_LSN, COMMIT_TS, RAW, LEAF, ROW, HASH))


def needs_column_mapping(names: Sequence[str]) -> bool:
    """Whether a column name requires Delta's column mapping. Mapping is used only if it is needed, because some readers
    do not support it."""
    return any(REFUSED.search(name) for name in names)


def refusal(table: Table) -> str | None:
    """Why a table cannot be mirrored, as text; None if it can be mirrored."""
    if (unread := _unread(table)) is not None:
        return f"{unread} is not text in the source's encoding"
    names = [column.name for column in table.columns]
    reserved = [name for name in names if name.lower() in OWN_COLUMNS]
    if reserved:
        return f"column {reserved[0]} has the name of a column that pgcdc adds to mirrors"
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            return f"columns {other} and {name} differ only in case, which Delta Lake does not allow"
    itself = next((one for one in table.outside if one.oid == table.oid), None)
    if itself is not None:
        return f"it {itself.why}: its rows are not replicated"
    if table.unpublished:
        what = f"partition {table.unpublished[0].name} is in no publication, so its rows are not replicated"
        return f"{what}: give the partition a REPLICA IDENTITY if it has none, or run `pgcdc setup`"
    if table.uneven is not None:
        what = f"partition {table.uneven} is published with another row filter or other columns than other partitions"
        return f"{what}: publish all partitions alike"
    return None


def _unread(table: Table) -> str | None:
    """A part of the table's definition, such as a name, that is not text in the source's encoding, so that the mirror
    would have a wrong text. None if there is no such part."""
    if marked(str(table.name)):
        return "its name"
    for column in table.columns:
        if marked(column.name):
            return f"the name of column {column.name}"
        if marked(column.missing or ""):
            return f"the value that older rows have in column {column.name}"
    for leaf in (*table.leaves, *table.unpublished):
        if marked(str(leaf.name)):
            return f"the name of partition {leaf.name}"
    return "its row filter" if marked(table.row_filter or "") else None


def way_back(name: TableName, *, refused: bool) -> str:
    """What the operator can do about a table that is set aside. If it was ``refused``, a new copy cannot help."""
    if refused:
        return f"change that on the source, or exclude the table: '-{name}' in the setting `tables`"
    return f"run `pgcdc snapshot {name.shell}`"


def mirror_columns(table: Table) -> pa.Schema:
    """The columns of the table's mirror: the table's columns with their exact names, then the columns that pgcdc adds.
    All columns are nullable, even keys, because a value that does not fit its type is NULL. In a NOT NULL column,
    delta-rs would accept such a NULL, and readers would see the value of a neighbouring row. LakeError if
    :func:`refusal` returns a reason."""
    reason = refusal(table)
    if reason is not None:
        raise LakeError(f"cannot be mirrored: {reason}", thing=f"table {table.name}")
    fields = [pa.field(column.name, arrow_type(column.type)) for column in table.columns]
    return pa.schema(fields + own_fields(table))


def new_columns(schema: pa.Schema, *, mapped: bool = False, highest: int = 0) -> Columns:
    """The columns for a Delta table's metadata. They are mapped if a name requires this, or if ``mapped``."""
    return Columns.of(schema, mapped=mapped or needs_column_mapping(schema.names), highest=highest)


def own_fields(table: Table) -> list[pa.Field]:
    """The columns that pgcdc adds: commit LSN and time, and the texts of values that do not fit their type. A
    partitioned table also has the leaf partition, and a table without a key the identity and hash of the row."""
    fields = [pa.field(COMMIT_LSN, pa.int64()), pa.field(COMMIT_TS, pa.timestamp("us", "UTC")), pa.field(RAW, RAW_TYPE)]
    if table.partitioned:
        fields.append(pa.field(LEAF, pa.string()))
    if table.multiset:
        fields += [pa.field(ROW, pa.string()), pa.field(HASH, pa.int64())]
    return fields


@dataclass(frozen=True)
class Commented:
    """The metadata of a mirror with the comments of its table.

    A column's comment is stored as ``comment`` in the column's metadata, the table's comment as the description of the
    Delta table, because readers of Delta look there. If a comment comes from the source, the column's metadata or the
    table's properties have the mark :data:`pgcdc_assets.delta.mapping.OURS`. Such a comment is removed when the source
    removes it. A comment by another writer stays if the source has no comment in its place.
    """

    columns: Columns
    properties: Mapping[str, str]
    description: str | None
    """The description of the Delta table; None if it does not change."""

    @classmethod
    def of(cls, delta: DeltaVersion, table: Table, columns: Columns | None = None) -> Self:
        """The metadata of version ``delta``, with the comments of ``table``. ``columns``: new columns that replace the
        mirror's columns. Comments of columns that the mirror lacks are skipped."""
        held = stated(delta.metadata)
        same = {field["name"]: field["name"] for field in held.fields}
        left = Columns(held.fields, {}) if columns is None else columns.commented_as(held, same)
        told = left.commented(table.column_comments)
        comment, ours = table.comment, delta.configuration.get(OURS) == "true"
        if comment is None:
            return cls(told, {OURS: "false"} if ours else {}, "" if ours else None)
        return cls(told, {} if ours else {OURS: "true"}, comment)

    def held_by(self, delta: DeltaVersion) -> bool:
        """Whether the mirror already has this metadata."""
        same = self.columns.fields == stated(delta.metadata).fields and not self.properties
        return same and self.description in (None, delta.metadata.get("description"))
