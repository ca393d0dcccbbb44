"""The columns of mirrors, and which tables cannot have a mirror."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, HASH, LEAF, RAW, REFUSED, ROW
from pgcdc_assets.protocol.text.typed import RAW_TYPE
from pgcdc_assets.protocol.text.types import arrow_type

OWN_COLUMNS: Final = frozenset((COMMIT_LSN, COMMIT_TS, RAW, LEAF, ROW, HASH))

_SQL_TYPES: Final = (
    (pa.types.is_boolean, "BOOLEAN"),
    (pa.types.is_int16, "SMALLINT"),
    (pa.types.is_int32, "INT"),
    (pa.types.is_int64, "BIGINT"),
    (pa.types.is_float32, "FLOAT"),
    (pa.types.is_float64, "DOUBLE"),
    (pa.types.is_date32, "DATE"),
    (pa.types.is_binary, "BINARY"),
    (pa.types.is_string, "STRING"),
)


def needs_column_mapping(names: Sequence[str]) -> bool:
    """Whether columns must be mapped because of their names. Others are not: some readers cannot read mapped tables."""
    return any(REFUSED.search(name) for name in names)


def refusal(table: Table) -> str | None:
    """Why a table cannot be mirrored at all, in words; None where it can."""
    names = [column.name for column in table.columns]
    reserved = [name for name in names if name.lower() in OWN_COLUMNS]
    if reserved:
        return f"column {reserved[0]} has a name that the mirror keeps for itself"
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            return f"columns {other} and {name} differ in case alone, which Delta Lake cannot hold"
    unlogged = [leaf.name for leaf in table.leaves if leaf.unlogged]
    return f"partition {unlogged[0]} is UNLOGGED, and what is written to it is in no stream" if unlogged else None


def way_back(name: TableName, *, refused: bool) -> str:
    """What to do about a table that is set aside. A new copy does not help one that cannot be mirrored."""
    if refused:
        return f"change that on the source, or leave the table out: '-{name}' in the setting `tables`"
    return f"run `pgcdc snapshot {name.shell}`"


@dataclass(frozen=True)
class MirrorSchema:
    """The columns of a mirror: the table's own, names verbatim, then ours. All nullable, keys too:
    delta-rs lets a NULL into a NOT NULL column, and readers then see a neighbour's value."""

    arrow: pa.Schema

    @classmethod
    def of(cls, table: Table) -> MirrorSchema:
        """LakeError where :func:`refusal` has a reason."""
        reason = refusal(table)
        if reason is not None:
            raise LakeError(f"cannot be mirrored: {reason}", thing=f"table {table.name}")
        fields = [pa.field(column.name, arrow_type(column.type)) for column in table.columns]
        return cls(pa.schema(fields + own_fields(table)))

    @property
    def mapped(self) -> bool:
        return needs_column_mapping(self.arrow.names)

    @property
    def ddl(self) -> str:
        """The columns as Spark's DDL names them."""
        return ", ".join(f"{sql_name(field.name)} {sql_type(field.type)}" for field in self.arrow)


def own_fields(table: Table) -> list[pa.Field]:
    """Our columns: position, texts that fit no type, and where needed the partition and the row's identity."""
    fields = [
        pa.field(COMMIT_LSN, pa.int64()),
        pa.field(COMMIT_TS, pa.timestamp("us", "UTC")),
        pa.field(RAW, RAW_TYPE),
    ]
    if table.partitioned:
        fields.append(pa.field(LEAF, pa.string()))
    if table.multiset:
        fields += [pa.field(ROW, pa.string()), pa.field(HASH, pa.int64())]
    return fields


def sql_type(type_: pa.DataType) -> str:
    """An Arrow type as Spark's DDL names it."""
    if pa.types.is_decimal(type_):
        return f"DECIMAL({type_.precision},{type_.scale})"
    if pa.types.is_timestamp(type_):
        return "TIMESTAMP" if type_.tz else "TIMESTAMP_NTZ"
    if pa.types.is_map(type_):
        return f"MAP<{sql_type(type_.key_type)},{sql_type(type_.item_type)}>"
    if pa.types.is_list(type_):
        return f"ARRAY<{sql_type(type_.value_type)}>"
    return next(name for fits, name in _SQL_TYPES if fits(type_))


def sql_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def sql_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def sql_path(path: Location) -> str:
    """Names a Delta table by its folder."""
    return f"delta.{sql_name(str(path))}"
