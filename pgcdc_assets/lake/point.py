"""One point of the lake: all mirrors at one LSN, and the ways to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import pyarrow as pa

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.errors import LakeError, UnknownTable, UsageError
from pgcdc_assets.feed.messages import read_messages
from pgcdc_assets.lake.scan import MirrorScan
from pgcdc_assets.lake.tableat import RowHistory, TableAt
from pgcdc_assets.mirror.delta.mirror import IDENTITY, own_position
from pgcdc_assets.points.points import Point

if TYPE_CHECKING:
    import pyarrow.compute as pc
    from duckdb import DuckDBPyConnection, DuckDBPyRelation
    from polars import LazyFrame
    from pyspark.sql import DataFrame, SparkSession

Result = TypeVar("Result")
_OPENED: Final = 16
"""Mirrors that are opened at the same time. In an object store, opening takes several requests."""


@dataclass(frozen=True)
class LakeAt:
    """The mirrors at one consistent point. They contain exactly the transactions with ``commit_lsn < lsn``.

    Methods take a table as text (``public.orders``) or as :class:`TableName`. Methods that read raise UnknownTable if
    the point does not list the table. They raise LakeError if the mirror's version was deleted (it is older than the
    mirrors' retention), if it is not the version that was published, or if another writer changed its rows.
    """

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
    def versions(self) -> Versions:
        """The Delta version of each mirror."""
        return Versions(self._point.tables)

    def path(self, table: TableName | str) -> str:
        """The mirror's folder, as a path or URL for other readers of Delta tables. They must read the version that
        :attr:`versions` gives."""
        return str(self._layout.mirror(self._as_published(table).name))

    def arrow(
        self, table: TableName | str, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.Table:  # fmt: skip
        """The mirror's rows, in no particular order, with the table's columns and pgcdc's columns (``_pgcdc_...``).

        ``columns``: only these columns. ``filter``: only rows for which this is true, like ``pc.field("id") > 5``.
        Parts of files whose statistics show that no row can match are not read. Raises UsageError for an unknown
        column.
        """
        return self.batches(table, columns, filter).read_all()

    def batches(
        self, table: TableName | str, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.RecordBatchReader:  # fmt: skip
        """Like :meth:`arrow`, but batch by batch: at most one row group of one file is in memory."""
        return self._as_published(table).batches(columns, filter)

    def polars(self, table: TableName | str) -> LazyFrame:
        """The mirror's rows as a lazy frame. Needs the package ``polars``."""
        from pgcdc_assets.lake.views import polars_frame

        return polars_frame(self._as_published(table))

    def duckdb(self, tables: Iterable[TableName | str] | None = None) -> DuckDBPyConnection:
        """A new DuckDB connection with a view of each of these tables (by default of all tables). A query names them
        like ``sales.orders``; the schema ``public`` may be left out. Each query reads the rows again. Needs the package
        ``duckdb``."""
        from pgcdc_assets.lake.views import MirrorDataset, duckdb_connection

        return duckdb_connection(MirrorDataset(scan) for scan in self._scans(self.tables if tables is None else tables))

    def sql(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> pa.Table:
        """The result of a query in DuckDB's SQL, with all tables as in :meth:`duckdb`. Raises DuckDB's own errors for
        a wrong query."""
        return self.in_duckdb(query, lambda connection: _rows(connection.sql(query, params=parameters)))

    def in_duckdb(self, query: str, use: Callable[[DuckDBPyConnection], Result]) -> Result:
        """The result of ``use``, which runs the query on a connection that has the tables that the query names."""
        from pgcdc_assets.lake.views import in_duckdb

        return in_duckdb(self._scans(self._named(query)), use)

    @overload
    def spark(self, session: SparkSession) -> None: ...

    @overload
    def spark(self, session: SparkSession, table: TableName | str) -> DataFrame: ...

    def spark(self, session: SparkSession, table: TableName | str | None = None) -> DataFrame | None:
        """The mirror's rows as a data frame. Without a table, makes a temporary view of each table instead. The view of
        ``public.orders`` is named ``orders``, and the view of ``sales.orders`` is named `` `sales.orders` ``.

        The session needs Delta Lake (see :func:`pgcdc_assets.delta_session`), and access to the store.
        """
        from pgcdc_assets.lake.views import spark_views

        if table is None:
            spark_views({scan.name: self._frame(session, scan) for scan in self._scans(self.tables)})
            return None
        return self._frame(session, self._as_published(table))

    def messages(self, after: Lsn | str | int = ZERO) -> pa.Table:
        """The logical messages below this point, in order. ``after``: leave out the messages below this LSN. To read
        only new messages, pass the ``lsn`` of the point that you read before.

        The transactional messages are exactly the messages of the transactions that the mirrors contain at this point.
        Messages outside transactions are placed among them by LSN. Raises LakeError if the point has no messages (the
        setting ``messages`` was empty), or if the feed cannot be read. Raises FeedGap if ``after`` is not zero, and the
        feed lacks messages above it.
        """
        start = Lsn.of(after)
        if self._point.messages is None:
            raise LakeError("contains no logical messages", thing=f"consistent point {self.lsn}",
                            do="choose messages by the setting `messages`; later points contain them")  # fmt: skip
        return read_messages(self._layout, LsnRange(min(start, self.lsn), self.lsn), self._point.messages)

    def changes(self, table: TableName | str, after: Lsn | str | int) -> Iterator[pa.Table]:
        """The table's changes from ``after``, the LSN of an earlier point, up to this point. They are ordered by
        ``(_pgcdc_commit_lsn, _pgcdc_ordinal)``, and returned as tables of bounded size.

        The tables have the columns of the change feed, but ``_pgcdc_unchanged`` has names of columns instead of their
        attnums. Raises FeedGap before the first table, if the feed does not contain all changes."""
        return self.table_at(table).changes(Lsn.of(after))

    def history(self, table: TableName | str, key: Mapping[str, Any] | Any) -> RowHistory:
        """Every change of one row, up to this point, that the change feed still contains. ``key``: a mapping from the
        names of the key columns to their values. If the key has one column, ``key`` may also be the value."""
        return self.table_at(table).history(key)

    def table_at(self, table: TableName | str) -> TableAt:
        """The table at this point, as an input for a comparison of two points."""
        scan = self._as_published(table)
        return TableAt(self._layout, self._point, scan.name, scan.table)

    def _frame(self, session: SparkSession, scan: MirrorScan) -> DataFrame:
        reader = session.read.format("delta").option("versionAsOf", scan.table.number)
        return reader.load(self._layout.mirror(scan.name).for_hadoop)

    def _scans(self, tables: Iterable[TableName | str]) -> list[MirrorScan]:
        from pgcdc_assets.lake.views import refuse_same_names

        with ThreadPoolExecutor(_OPENED, thread_name_prefix="lake") as pool:
            scans = list(pool.map(self._as_published, tables))
        refuse_same_names(scan.name for scan in scans)
        return scans

    def _named(self, query: str) -> list[TableName]:
        """The tables whose names occur in the query, so that the Delta logs of other tables are not opened. All tables
        if no name occurs, as in SHOW TABLES."""
        text = query.replace('""', '"').lower()
        return [table for table in self.tables if table.name.lower() in text] or self.tables

    def _as_published(self, table: TableName | str) -> MirrorScan:
        """A table of the point. Raises LakeError if the mirror's version records another position than the point does,
        because the version is then not the one that was published."""
        name = self._known(table)
        if (changed := self._point.changed.get(name)) is not None:
            raise LakeError(
                f"does not match the source: {changed}", thing=f"mirror {name}", lsn=self.lsn,
                do=f"use an earlier LSN, or copy the table again with `pgcdc snapshot {name.shell}`",
            )  # fmt: skip
        published, version = self._point.positions[name], self._point.tables[name]
        delta = DeltaLog(self._layout.mirror(name)).at(version)
        found = own_position(delta.positions, delta.configuration.get(IDENTITY, ""), name)
        if found != published:
            raise LakeError(
                f"version {version} records the LSN {found}, but recorded {published} when the point was published",
                thing=f"mirror {name}", lsn=self.lsn,
                do=f"use a newer LSN; if the newest point fails too, run `pgcdc snapshot {name.shell}`",
            )  # fmt: skip
        return MirrorScan(name, delta)

    def _known(self, table: TableName | str) -> TableName:
        name = TableName.parse(table) if isinstance(table, str) else table
        if name not in self._point.tables:
            raise UnknownTable(f"is not in the consistent point {self.lsn}", thing=f"table {name}")
        return name


def _rows(result: DuckDBPyRelation | None) -> pa.Table:
    if result is None:
        raise UsageError("has no result; write a SELECT", thing="query")
    return result.to_arrow_table()


class Versions(Mapping[TableName, int]):
    """Delta versions by table. A key may also be a text, like ``public.orders``."""

    def __init__(self, versions: Mapping[TableName, int]) -> None:
        self._versions = versions

    def __getitem__(self, table: TableName | str) -> int:
        return self._versions[TableName.parse(table) if isinstance(table, str) else table]

    def __iter__(self) -> Iterator[TableName]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)
