"""Writes and checks Parquet data files. Spark tasks write data files, and one Delta commit then adds them to the table.
A file's name contains a UUID, and readers do not see the file before the commit. So a task that runs twice leaves an
unused file, but never adds rows twice. Delta does not check the files that a commit names: it counts the rows of a
missing file, and reads columns with wrong types as NULL. So :func:`check_files` checks each file before the commit."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import Schema

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import unreadable
from pgcdc_assets.store import storage
from pgcdc_assets.store.scratch import DraftFile

if TYPE_CHECKING:
    import pyarrow.dataset as ds

OWN_PREFIX: Final = "_pgcdc_"
INDEXED_COLUMNS: Final = 32
"""How many columns of a table have statistics, in addition to the ``_pgcdc_`` columns. This is Delta's default, and
keeps the log of wide tables small."""
LONGEST_BOUND: Final = 64
"""The longest string in statistics, in characters. If a bound (the least or greatest value of a file) is longer, the
column has no bounds in this file, because with a shortened bound some readers would skip rows."""
HIGHEST_CHARACTER: Final = "\U0010ffff"
"""The character with which Delta ends a shortened bound. If a bound contains it, the column has no bounds in this file,
because delta-rs and Polars find no rows if a bound that is not shortened begins with this character."""
PARQUET_OPTIONS: Final[dict[str, Any]] = {
    # zstd needs less than half of snappy's space, and no more CPU (measured on mixed rows).
    "compression": "zstd",
    "store_schema": False,
    "store_decimal_as_integer": True,
    "version": "2.6",
}

DICTIONARY_SAMPLE: Final = 1000
"""How many of a file's first rows are checked to find columns with few distinct values. Only these columns get a
dictionary, because building a dictionary of many values would take a third of the writing time."""
DICTIONARY_SHARE: Final = 8
"""A column gets a dictionary if the checked rows have at most one distinct value per this many rows."""


OWN_NAME: Final = re.compile(r"part-[0-9a-f]{32}\.parquet")
"""Matches the names of data files that this package wrote. Spark's file names are longer."""

File = TypeVar("File")


@dataclass(frozen=True)
class FileReport:
    """A data file: its name in the table's folder, Delta's statistics as JSON, and the tags of its add action."""

    path: str
    size: int
    rows: int
    stats: str
    tags: Mapping[str, str] = field(default_factory=dict)


class DataFile:
    """A Parquet file that is being written. It is created by the first :meth:`write` with rows, so that there is never
    a file without rows. ``schema``: the columns, with the names that the table's files use."""

    def __init__(self, folder: Location, schema: pa.Schema) -> None:
        self.path = folder / f"part-{uuid.uuid4().hex}.parquet"
        self._draft: DraftFile | None = None
        self._schema = schema
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the file. After a failure it stays in its folder, but no commit names it."""
        if self._writer is not None and self._writer.is_open:
            self._writer.close()

    def write(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> None:
        """Append one row group. ``columns`` are in the schema's order."""
        table = pa.Table.from_arrays(list(columns), schema=self._schema)
        if table.num_rows == 0:
            return
        if self._writer is None:
            self._draft = storage.draft(self.path)
            self._writer = parquet_writer(self._draft, table)
        self._writer.write_table(table, row_group_size=table.num_rows)

    def finish(self) -> FileReport | None:
        """Close the file, make its content durable, and return its report; None if nothing was written."""
        if self._writer is None or self._draft is None:
            return None
        self._writer.close()
        footer, size = pq.read_metadata(self._draft.path), self._draft.size
        storage.put(self._draft, self.path)
        return FileReport(self.path.name, size, footer.num_rows, statistics(footer, self._schema))

    def discard(self) -> None:
        """Delete the file."""
        if self._draft is not None:
            self._draft.discard()


def parquet_writer(draft: DraftFile, first: pa.Table) -> pq.ParquetWriter:
    """Opens a Parquet writer. ``first`` are the file's first rows, which decide which columns get a dictionary."""
    told = [field.name for field in first.schema if _told(field.type)]
    return pq.ParquetWriter(
        draft.path, first.schema, write_statistics=told, use_dictionary=_repeating(first), **PARQUET_OPTIONS
    )


def _repeating(table: pa.Table) -> list[str]:
    sample = table.slice(0, DICTIONARY_SAMPLE)
    most = max(1, len(sample) // DICTIONARY_SHARE)
    plain = [field.name for field in sample.schema if not pa.types.is_nested(field.type)]
    return [name for name in plain if pc.count_distinct(sample[name], mode="all").as_py() <= most]


def statistics(footer: pq.FileMetaData, schema: pa.Schema) -> str:
    """Make Delta's statistics (JSON) of a file from its Parquet footer. A column has bounds only if readers can rely on
    them. Floats have no bounds, because NaN lies outside of any bounds. The footer has no bounds for them either,
    because Spark uses the footer's bounds too. Decimals are JSON strings, because a JSON number would lose digits.
    Strings are never shortened."""
    bounds: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}}
    nulls: dict[str, int] = {}
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    for index, name in _indexed(footer, schema):
        found = [group.column(index).statistics for group in groups]
        if any(one is None or not one.has_null_count for one in found):
            continue
        nulls[name] = sum(one.null_count for one in found)
        limits = _limits(schema.field(name).type, found)
        if limits is not None:
            bounds["minValues"][name], bounds["maxValues"][name] = limits
    return json.dumps({"numRecords": footer.num_rows, **bounds, "nullCount": nulls})


def _indexed(footer: pq.FileMetaData, schema: pa.Schema) -> list[tuple[int, str]]:
    """The columns that get statistics, as (index in the file, name). Nested columns get no statistics."""
    plain = [field.name for field in schema if _told(field.type)]
    values = [name for name in plain if not name.startswith(OWN_PREFIX)][:INDEXED_COLUMNS]
    wanted = {*values, *(name for name in plain if name.startswith(OWN_PREFIX))}
    leaves = ((index, footer.schema.column(index)) for index in range(footer.num_columns))
    # A Parquet column inside a nested column has a path that is longer than its name. A dot in the path does not show
    # this, because the name of a column may have dots.
    return [(index, leaf.name) for index, leaf in leaves if leaf.path == leaf.name and leaf.name in wanted]


def _told(type_: pa.DataType) -> bool:
    return not (pa.types.is_nested(type_) or pa.types.is_floating(type_))


def _limits(type_: pa.DataType, found: Sequence[Any]) -> tuple[Any, Any] | None:
    told = [one for one in found if one.has_min_max]
    if not told or any(not one.has_min_max and one.num_values for one in found) or not _bounded(type_):
        return None
    low, high = min(one.min for one in told), max(one.max for one in told)
    if isinstance(low, str) and (max(len(low), len(high)) > LONGEST_BOUND or HIGHEST_CHARACTER in low + high):
        return None
    return _stated(low), _stated(high)


def _bounded(type_: pa.DataType) -> bool:
    is_kind = pa.types
    return bool(
        is_kind.is_integer(type_) or is_kind.is_decimal(type_) or is_kind.is_date(type_)
        or is_kind.is_timestamp(type_) or is_kind.is_string(type_)
    )  # fmt: skip


def _stated(value: Any) -> Any:
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if value.tzinfo else "")
    return value.isoformat() if isinstance(value, date) else value


def check_files(folder: Location, files: Sequence[FileReport], schema: Schema, optional: Collection[str] = ()) -> None:
    """Check that each file exists, has the reported size and number of rows, and has the table's columns with exactly
    their types. ``optional`` columns may be missing. Raises LakeError."""
    places = [folder / file.path for file in files]
    heads = storage.together(folder, [partial(storage.head, data) for data in places])
    footers = storage.together(folder, [partial(read_footer, data) for data in places])
    for file, data, found, footer in zip(files, places, heads, footers, strict=True):
        if found is None or (found.size, footer.num_rows) != (file.size, file.rows):
            raise LakeError(
                "is missing, or its size or number of rows is not what the task that wrote it reported", thing=str(data)
            )
        if odd := odd_columns(footer.schema.to_arrow_schema(), schema, optional):
            raise LakeError(f"does not have the columns and types of its table: {', '.join(odd)}", thing=str(data))


def odd_columns(file: pa.Schema, table: Schema, optional: Collection[str] = ()) -> list[str]:
    """The names of columns that have another type in the file than in the table, or that only one of them has. Allowed
    are additional ``_pgcdc_`` columns in the file, and missing ``optional`` columns."""
    expected = {str(field.metadata.get("delta.columnMapping.physicalName", field.name)): str(field.type)
                for field in table.fields}  # fmt: skip
    found = {field.name: str(field.type) for field in Schema.from_arrow(file).fields}
    needed = [name for name in expected if name in found or name not in optional]
    odd = [name for name in needed if found.get(name) != expected[name]]
    return sorted(odd + [name for name in found if name not in expected and not name.startswith(OWN_PREFIX)])


def in_int96(footer: pq.FileMetaData) -> bool:
    """Whether a file has timestamps in Parquet's old form INT96, which Spark writes by default. Readers that convert
    INT96 to nanoseconds, such as delta-rs, read wrong values before 1678 and after 2261."""
    return any(footer.schema.column(place).physical_type == "INT96" for place in range(footer.num_columns))


def opened_parquet(path: Location, **options: Any) -> pq.ParquetFile:
    """Opens a Parquet file of the lake, for a ``with`` block. ``options`` are passed to pyarrow's reader."""
    return pq.ParquetFile(storage.open_file(path), **options)


def write_parquet(rows: pa.Table, to: Location) -> None:
    """Write a complete file in one call. An existing file is replaced."""
    made = storage.draft(to)
    pq.write_table(rows, made.path, compression="zstd")
    storage.put(made, to)


def dataset(paths: Sequence[Location], schema: pa.Schema) -> ds.Dataset:
    """Opens several files as one dataset. Columns of ``schema`` that a file lacks are NULL."""
    # Imported here because it imports pandas, which the receiver does not need.
    import pyarrow.dataset as ds

    form = ds.ParquetFileFormat()
    return ds.FileSystemDataset([form.make_fragment(storage.open_file(path)) for path in paths], schema, form)


def read_footer(path: Location) -> pq.FileMetaData:
    """The footer of a Parquet file. Raises LakeError, which names the file, if it cannot be read."""
    try:
        with opened_parquet(path) as file:
            return file.metadata
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from None


def neighbours(
    files: Iterable[File], weight: Callable[[File], int], *, largest: int, full: int, fewest: int = 2
) -> Iterator[list[File]]:
    """Yield groups of small files to merge, in the order of ``files``, each with a total ``weight`` of at most
    ``full``. Files whose weight is ``largest`` or more are skipped. The last group is left out if it has fewer than
    ``fewest`` files: it can be merged later, with files that are added until then."""
    group: list[File] = []
    size = 0
    for file in files:
        more = weight(file)
        if more >= largest:
            continue
        if size + more > full:
            if len(group) > 1:
                yield group
            group, size = [], 0
        group.append(file)
        size += more
    if len(group) >= fewest:
        yield group
