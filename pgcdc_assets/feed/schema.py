"""The columns of a change feed, and the name of a value column in feed and mirror.

A feed needs no column mapping: names that Delta refuses are percent-encoded, other names stay as they are. If no name
had to be encoded, a feed file with only inserts can be used as a file of the mirror: readers ignore our columns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

import pyarrow as pa

from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.protocol.text.types import arrow_type

OP = "_pgcdc_op"
COMMIT_LSN = "_pgcdc_commit_lsn"
ORDINAL = "_pgcdc_ordinal"
"""2n for the old half of a key change or of an update in a multiset, 2n + 1 otherwise. n is the ``tx_ordinal``."""
COMMIT_TS = "_pgcdc_commit_ts"
XID = "_pgcdc_xid"
ORIGIN = "_pgcdc_origin"
"""Name of the transaction's replication origin; NULL for a transaction of the source itself."""
UNCHANGED = "_pgcdc_unchanged"
"""attnums of the columns whose TOAST value was not sent; NULL if the row has all values."""
RAW = "_pgcdc_raw"
LEAF = "_pgcdc_leaf"
HASH = "_pgcdc_hash"
ROW = "_pgcdc_row"

INSERT, PREIMAGE, POSTIMAGE, DELETE, TRUNCATE = (
    "insert", "update_preimage", "update_postimage", "delete", "truncate",
)  # fmt: skip
OPS = (INSERT, PREIMAGE, POSTIMAGE, DELETE, TRUNCATE)

REFUSED = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")
"""Characters that Delta refuses in a column's name without column mapping."""
_ESCAPE = re.compile(r"%[0-9A-F]{2}")


def feed_name(name: str) -> str:
    """Returns a column's name in the feed, percent-encoded if Delta refuses it. The mapping is injective."""
    if not (REFUSED.search(name) or _ESCAPE.search(name) or name.startswith("_pgcdc")):
        return name
    text = REFUSED.sub(lambda match: f"%{ord(match[0]):02X}", name.replace("%", "%25"))
    return "%5F" + text[1:] if text.startswith("_pgcdc") else text


@dataclass(frozen=True)
class FeedColumn:
    """One value column: ``name`` in the feed, ``source`` in PostgreSQL, the mirror and ``_pgcdc_raw``."""

    name: str
    source: str
    attnum: int
    key: bool

    @classmethod
    def of(cls, column: Column, table: Table) -> FeedColumn:
        return cls(feed_name(column.name), column.name, column.attnum, column.attnum in table.key)


def feed_columns(table: Table) -> tuple[FeedColumn, ...]:
    """Returns the value columns of a table's feed, in attnum order."""
    return tuple(FeedColumn.of(column, table) for column in table.columns)


def feed_schema(table: Table) -> pa.Schema:
    """Returns a feed's schema: our columns, then the table's. All columns are nullable: no reader may rely on NOT
    NULL."""
    own = [
        pa.field(OP, pa.string()),
        pa.field(COMMIT_LSN, pa.int64()),
        pa.field(ORDINAL, pa.int64()),
        pa.field(COMMIT_TS, pa.timestamp("us", "UTC")),
        pa.field(XID, pa.int64()),
        pa.field(ORIGIN, pa.string()),
        pa.field(UNCHANGED, pa.list_(pa.field("element", pa.int32()))),
        pa.field(RAW, pa.map_(pa.string(), pa.string())),
    ]
    if table.partitioned:
        own.append(pa.field(LEAF, pa.string()))
    if table.multiset:
        own += [pa.field(ROW, pa.string()), pa.field(HASH, pa.int64())]
    return pa.schema([*own, *(pa.field(feed_name(c.name), arrow_type(c.type)) for c in table.columns)])


@dataclass(frozen=True)
class FeedFacts:
    """Facts about the rows of a feed file, stored in the file's footer. These facts decide how the file is applied."""

    commit_min: int
    commit_max: int
    counts: dict[str, int]
    """Rows by operation."""
    masked: tuple[int, ...] = ()
    """attnums of the columns for which some value was not sent."""
    odd_keys: bool = False
    """Some key value does not fit its type and is in ``_pgcdc_raw``."""
    bucket: int | None = None
    """Number of the file's bucket of keys. None: the file may hold any key."""
    buckets: int = 1
    arrivals: bool = False
    """All rows are new halves of key changes. Their old halves are in files of other buckets."""

    @property
    def rows(self) -> int:
        return sum(self.counts.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        data = json.loads(text)
        return cls(**{**data, "masked": tuple(data["masked"])})


@dataclass(frozen=True)
class FeedFile:
    """One file of a feed; ``name`` is relative to the feed's folder, ``stats`` Delta's JSON."""

    name: str
    size: int
    stats: str
    facts: FeedFacts

    @property
    def report(self) -> FileReport:
        return FileReport(self.name, self.size, self.facts.rows, self.stats)


class FeedEnd(NamedTuple):
    """Where the changes of a table end before the end of the span."""

    lsn: Lsn
    """The first transaction whose changes the feed does not hold."""
    reason: str
    unread: bool = False
    """A row does not fit the table's structure: the next catalog check decides. If False, the table is set aside."""


@dataclass(frozen=True)
class FeedPart:
    """The changes of one table in one span: the input of an apply. Files may hold rows outside ``span`` (by
    ``commit_lsn``, end excluded). :class:`FeedFacts` count these rows too."""

    table: Table
    """The table with the columns of its copy, and the columns that were added up to the end of the span."""
    span: LsnRange
    files: tuple[FeedFile, ...]
    ended: FeedEnd | None = None
    """Set if the feed ends before the end of the requested span. ``span`` then ends there too."""

    @property
    def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for file in self.files:
            total.update(file.facts.counts)
        return dict(total)

    @property
    def rows(self) -> int:
        return sum(file.facts.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def insert_only(self) -> bool:
        return not self.counts.keys() - {INSERT}

    @property
    def key_changes(self) -> int:
        return 0 if self.table.multiset else self.counts.get(PREIMAGE, 0)

    @property
    def truncates(self) -> int:
        return self.counts.get(TRUNCATE, 0)

    @property
    def masked(self) -> tuple[int, ...]:
        return tuple(sorted({attnum for file in self.files for attnum in file.facts.masked}))

    @property
    def odd_keys(self) -> bool:
        return any(file.facts.odd_keys for file in self.files)
