"""One point of the lake: all mirrors at one LSN, and the ways to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog, DeltaVersion
from pgcdc_assets.errors import LakeError, UnknownTable
from pgcdc_assets.feed.messages import read_messages
from pgcdc_assets.mirror.delta.mirror import IDENTITY, own_position
from pgcdc_assets.mirror.delta.rowgroups import live_rows
from pgcdc_assets.points.points import Point
from pgcdc_assets.store import storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READ_EXACTLY: Final = {"datafusion.execution.parquet.coerce_int96": "us"}
"""Setting for DataFusion. An OPTIMIZE by a user writes timestamps as INT96. DataFusion would read these as nanoseconds,
and timestamps before 1678 and after 2261 would be wrong."""
_UNKNOWN: Final = frozenset({"typeWidening"})
"""Features of tables that delta-rs opens, but cannot query."""


@dataclass(frozen=True)
class LakeAt:
    """All mirrors with exactly the transactions below ``lsn`` applied."""

    _layout: Layout
    _point: Point

    @property
    def lsn(self) -> Lsn:
        return self._point.replay_lsn

    @property
    def tables(self) -> list[TableName]:
        """The tables in name order, except tables being copied, set aside, or changed by another writer."""
        return sorted(self._point.tables.keys() - self._point.changed.keys())

    @property
    def versions(self) -> Mapping[TableName, int]:
        """The Delta version of each mirror."""
        return self._point.tables

    def path(self, table: TableName | str) -> str:
        """The mirror's folder, as a path or URL for other readers; pass them :attr:`versions` too. LakeError if the
        version is not the version that was published, or if another writer has changed its rows."""
        return str(self._layout.mirror(self._as_published(table)))

    def arrow(self, table: TableName | str) -> pa.Table:
        """The mirror's rows, in no particular order, with the table's columns and ours (``_pgcdc_...``).

        DataFusion reads the rows, because pyarrow's own reader supports neither deletion vectors nor mapped columns.
        Tables with widened types, which DataFusion does not support, are read file by file. LakeError if the version is
        gone (older than the mirrors' retention), if it is not the version that was published, or if another writer
        changed its rows.
        """
        name = self._as_published(table)
        version = self._point.tables[name]
        try:
            found = _read(self._layout.mirror(name), version)
        except Exception as error:
            # delta-rs and DataFusion raise plain Exceptions if a file is missing or damaged.
            raise LakeError(f"version {version} cannot be read: {type(error).__name__}", thing=f"mirror {name}",
                            do="it may be older than the mirror's retention; take a newer LSN") from error  # fmt: skip
        return found.cast(pa.schema([field.with_type(_plain(field.type)) for field in found.schema]))

    def spark(self, session: SparkSession, table: TableName | str) -> DataFrame:
        """The mirror's rows as a data frame. The Spark session needs Delta Lake, and access to the lake's store."""
        name = self._as_published(table)
        reader = session.read.format("delta").option("versionAsOf", self._point.tables[name])
        return reader.load(self._layout.mirror(name).for_hadoop)

    def messages(self, after: Lsn | str | int = ZERO) -> pa.Table:
        """The logical messages below this point, in order. ``after``: leave out the messages below this LSN. To read
        only new messages, pass the ``lsn`` of the point that you read before.

        The transactional messages are exactly those of the transactions that the mirrors hold at this point. Messages
        outside transactions are placed among them by LSN. LakeError if the point has no messages (the setting
        ``messages`` was empty), or if the feed cannot be read.
        """
        start = Lsn.parse(after) if isinstance(after, str) else Lsn(after)
        if self._point.messages is None:
            raise LakeError("holds no messages", thing=f"consistent point {self.lsn}",
                            do="the setting `messages` asks for them, from the next run on")  # fmt: skip
        return read_messages(self._layout, LsnRange(min(start, self.lsn), self.lsn), self._point.messages)

    def _as_published(self, table: TableName | str) -> TableName:
        """The name of a table of the point. LakeError if the table's version records another position than the point:
        the version is then not the published version."""
        name = self._known(table)
        if (changed := self._point.changed.get(name)) is not None:
            raise LakeError(
                f"is not what the source has: {changed}", thing=f"mirror {name}", lsn=self.lsn,
                do=f"take an LSN from before that, or copy it anew with `pgcdc snapshot {name.shell}`",
            )  # fmt: skip
        published, version = self._point.positions[name], self._point.tables[name]
        delta = DeltaLog(self._layout.mirror(name)).at(version)
        found = own_position(delta.positions, delta.configuration.get(IDENTITY, ""), name)
        if found != published:
            raise LakeError(
                f"version {version} stands at {found}, but the one that was published stood at {published}",
                thing=f"mirror {name}", lsn=self.lsn,
                do=f"take a newer LSN; where the newest is refused too, run `pgcdc snapshot {name.shell}`",
            )  # fmt: skip
        return name

    def _known(self, table: TableName | str) -> TableName:
        name = TableName.parse(table) if isinstance(table, str) else table
        if name not in self._point.tables:
            raise UnknownTable(f"is not in the consistent point {self.lsn}", thing=f"table {name}")
        return name


def _read(folder: Location, version: int) -> pa.Table:
    table = DeltaLog(folder).at(version)
    if not queryable(table):
        return pa.concat_tables([table.columns.empty_table(), *live_rows(table)])
    engine = QueryBuilder(READ_EXACTLY).register("mirror", opened(folder, version))
    return pa.RecordBatchReader.from_stream(engine.execute("SELECT * FROM mirror")).read_all()


def _plain(type_: pa.DataType) -> pa.DataType:
    """The common Arrow type in place of a view type or large type of DataFusion."""
    if pa.types.is_string_view(type_) or pa.types.is_large_string(type_):
        return pa.string()
    if pa.types.is_binary_view(type_) or pa.types.is_large_binary(type_):
        return pa.binary()
    if pa.types.is_map(type_):
        return pa.map_(_plain(type_.key_type), _plain(type_.item_type))
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_plain(type_.value_type)))
    return type_


def queryable(table: DeltaVersion) -> bool:
    """Whether delta-rs's query engine reads the table."""
    return not table.features & _UNKNOWN


def opened(folder: Location, version: int) -> DeltaTable:
    """One version of a table. Raises delta-rs's own errors."""
    return DeltaTable(folder.text, version=version, storage_options=storage.options(folder) or None)
