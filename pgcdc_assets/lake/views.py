"""Mirrors of one point for DuckDB, Polars and Spark.

DuckDB and Polars get rows from :mod:`pgcdc_assets.lake.scan` and not from their own readers of Delta tables. The
reason: Polars' reader refuses mapped columns and widened types, and DuckDB downloads its reader when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pgcdc_assets.core.names import TableName, quoted
from pgcdc_assets.errors import LakeError, MachineError
from pgcdc_assets.lake.scan import MirrorScan

if TYPE_CHECKING:
    import duckdb
    import polars
    from pyspark.sql import DataFrame

Result = TypeVar("Result")


class MirrorDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """A mirror for DuckDB. For each query, DuckDB calls :meth:`scanner` with the columns and the filter of the query.
    The filter does not contain conditions for which Arrow's rules differ from SQL's, such as ``>`` with NaN."""

    def __init__(self, scan: MirrorScan) -> None:
        super().__init__(scan.schema.empty_table())
        self.scan = scan
        self.failure: Exception | None = None
        """The error that ended a query. DuckDB raises its own error, which contains only the text of this error."""

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_: Any) -> Scanned:
        rows = self.scan.batches(columns, filter)
        return Scanned(pa.RecordBatchReader.from_batches(rows.schema, self._read(rows)))

    def _read(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except Exception as error:
            self.failure = error
            raise


@dataclass(frozen=True)
class Scanned:
    """The parts of a scanner that DuckDB uses. Arrow's own scanner is not used, because it reads ahead in another
    thread, and Python crashes if the process ends while this thread reads."""

    rows: pa.RecordBatchReader

    @property
    def projected_schema(self) -> pa.Schema:
        return self.rows.schema

    def to_reader(self) -> pa.RecordBatchReader:
        return self.rows


def duckdb_connection(mirrors: Iterable[MirrorDataset]) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory with a view of each mirror. Tables of the schema ``public`` need no schema in queries."""
    connection: duckdb.DuckDBPyConnection = package("duckdb").connect()
    # Without this setting, DuckDB would write a progress bar to stdout, into the result of `pgcdc sql`.
    connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
    connection.execute("CREATE SCHEMA IF NOT EXISTS public")
    for mirror in mirrors:
        name = mirror.scan.name
        # The name of the database is needed, because schemas named `temp` or `system` would be taken for databases.
        schema = f"memory.{quoted(name.schema)}"
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}; USE {schema}")
        connection.from_arrow(mirror).create_view(name.name)
    connection.execute("USE memory.main; SET search_path = 'public,main'")
    return connection


def in_duckdb(scans: Iterable[MirrorScan], use: Callable[[duckdb.DuckDBPyConnection], Result]) -> Result:
    """The result of ``use``, which gets a connection with a view of each mirror. Raises LakeError if a mirror cannot be
    read, and DuckDB's own errors."""
    mirrors = [MirrorDataset(scan) for scan in scans]
    with duckdb_connection(mirrors) as connection:
        # Otherwise DuckDB would look for an unknown table among the variables of this program.
        connection.execute("SET python_enable_replacements = false")
        try:
            return use(connection)
        except package("duckdb").Error:
            for mirror in mirrors:
                if mirror.failure is not None:
                    raise mirror.failure from None
            raise


def polars_frame(scan: MirrorScan) -> polars.LazyFrame:
    """A lazy frame, which reads only the columns that a query needs, batch by batch."""
    pl = package("polars")

    def read(
        columns: list[str] | None, predicate: polars.Expr | None, limit: int | None, _: int | None
    ) -> Iterator[polars.DataFrame]:  # fmt: skip
        for batch in scan.batches(columns):
            frame = pl.from_arrow(batch)
            if limit is not None:
                frame = frame.head(limit)
                limit -= len(frame)
            yield frame if predicate is None else frame.filter(predicate)
            if limit == 0:
                return

    schema = pl.from_arrow(scan.schema.empty_table()).schema
    frame: polars.LazyFrame = import_module("polars.io.plugins").register_io_source(read, schema=schema)
    return frame


def spark_views(frames: Mapping[TableName, DataFrame]) -> None:
    """A temporary view of each frame. Spark's temporary views have no schema: the view of ``public.orders`` is
    ``orders``, and the view of ``sales.orders`` is `` `sales.orders` ``."""
    for name, frame in frames.items():
        view = name.name if name.schema == "public" else f"{name.schema}.{name.name}"
        frame.createOrReplaceTempView("`" + view.replace("`", "``") + "`")


def refuse_same_names(tables: Iterable[TableName]) -> None:
    """Raises LakeError if the names of two tables differ only in case, because DuckDB and Spark ignore case in
    names."""
    known: dict[tuple[str, str], TableName] = {}
    for table in tables:
        other = known.setdefault((table.schema.lower(), table.name.lower()), table)
        if other != table:
            what = f"cannot be a view together with {other}, because DuckDB and Spark ignore case in names"
            raise LakeError(what, thing=f"table {table}", do="read only one of these tables")


def package(name: str) -> Any:
    """The module of an optional package. Raises MachineError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise MachineError("is not installed", thing=f"package {name}", do=f"run `pip install {name}`") from None
