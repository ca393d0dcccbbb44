"""The columns of a change feed, and the facts of its files.

A feed needs no Delta column mapping, because column names that Delta refuses are percent-encoded. If no name had to be
encoded, a feed file that contains only inserts can become a file of the mirror without being rewritten. Readers of the
mirror ignore the feed's own columns (``_pgcdc_op``, ...).
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
"""Order of the changes in a transaction: 2n + 1 for the change with ``tx_ordinal`` n. An update that changes the key,
or of a table without a key, is stored as two rows: the old image with 2n, and the new image with 2n + 1."""
COMMIT_TS = "_pgcdc_commit_ts"
XID = "_pgcdc_xid"
ORIGIN = "_pgcdc_origin"
"""Name of the transaction's replication origin; NULL for a transaction of the source itself."""
UNCHANGED = "_pgcdc_unchanged"
"""attnums of the columns whose TOAST value is missing because it was not sent; NULL if the row has all values."""
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
    """Returns a column's name in the feed. It is percent-encoded if Delta refuses it, or if it begins with ``_pgcdc``.
    Different names have different results."""
    if not (REFUSED.search(name) or _ESCAPE.search(name) or name.startswith("_pgcdc")):
        return name
    text = REFUSED.sub(lambda match: f"%{ord(match[0]):02X}", name.replace("%", "%25"))
    return "%5F" + text[1:] if text.startswith("_pgcdc") else text


@dataclass(frozen=True)
class FeedColumn:
    """One value column of a feed: ``name`` is its name in the feed, ``source`` its name in PostgreSQL, in the mirror
    and in ``_pgcdc_raw``."""

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
    """Returns a feed's schema: the ``_pgcdc`` columns, then the table's columns. All columns are nullable, because rows
    may lack values."""
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
    """Facts about the rows of a feed file, stored in the Parquet footer. They decide how the file is applied."""

    commit_min: int
    commit_max: int
    counts: dict[str, int]
    """Number of rows by operation."""
    masked: tuple[int, ...] = ()
    """attnums of the columns for which at least one value was not sent."""
    odd_keys: bool = False
    """Whether at least one key value does not fit its type, so that its text is in ``_pgcdc_raw``."""
    bucket: int | None = None
    """The bucket to which all keys in the file belong, from 0. None: the file may contain any key."""
    buckets: int = 1
    """Into how many buckets the table's keys are divided."""
    arrivals: bool = False
    """Whether all rows are new images of updates that changed the key. Their old images are in other files, because
    they may belong to other buckets."""

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
    """One file of a feed. ``name`` is relative to the feed's folder, ``stats`` are Delta's file statistics as JSON."""

    name: str
    size: int
    stats: str
    facts: FeedFacts

    @property
    def report(self) -> FileReport:
        return FileReport(self.name, self.size, self.facts.rows, self.stats)


class FeedEnd(NamedTuple):
    """Where and why the changes of a table end before the end of the span."""

    lsn: Lsn
    """``commit_lsn`` of the first transaction whose changes the feed does not contain."""
    reason: str
    unread: bool = False
    """True if a row does not fit the recorded structure of the table. The next catalog check then decides what happens
    to the table. If False, the table is set aside: its changes are no longer applied until the operator acts."""


@dataclass(frozen=True)
class FeedPart:
    """The changes of one table in one span, which are the input of an apply. ``files`` may also contain rows whose
    ``commit_lsn`` is outside of ``span``. The counts include these rows."""

    table: Table
    """The table with the columns of its snapshot copy, and the columns that were added up to the end of the span."""
    span: LsnRange
    files: tuple[FeedFile, ...]
    ended: FeedEnd | None = None
    """Set if the feed ends before the end of the requested span. ``span`` then has the same end as the feed."""

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
