"""The columns of a change feed: names, and what one value column is called in feed and mirror.

A feed never needs column mapping: the names that Delta refuses are percent-encoded, all others stand
verbatim. Where no name of a table had to be encoded, a feed file that holds inserts alone can be read
as a file of the mirror too (readers take columns by name and ignore the rest).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc_assets.core.catalog import Column, Table

OP = "_pgcdc_op"
COMMIT_LSN = "_pgcdc_commit_lsn"
ORDINAL = "_pgcdc_ordinal"
"""2n for the old half of a key change (and the old image of a multiset's row), 2n + 1 otherwise."""
COMMIT_TS = "_pgcdc_commit_ts"
XID = "_pgcdc_xid"
UNCHANGED = "_pgcdc_unchanged"
"""attnums of the columns whose TOAST value was not sent; NULL where all stand here."""
RAW = "_pgcdc_raw"
LEAF = "_pgcdc_leaf"
HASH = "_pgcdc_hash"
ROW = "_pgcdc_row"

INSERT, PREIMAGE, POSTIMAGE, DELETE, TRUNCATE = (
    "insert", "update_preimage", "update_postimage", "delete", "truncate",
)  # fmt: skip
OPS = (INSERT, PREIMAGE, POSTIMAGE, DELETE, TRUNCATE)

_REFUSED = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")
"""What Delta refuses in a column's name without column mapping."""
_ESCAPE = re.compile(r"%[0-9A-F]{2}")


def feed_name(name: str) -> str:
    """A column's name in the feed: verbatim, or percent-encoded where Delta refuses it; injective."""
    if not (_REFUSED.search(name) or _ESCAPE.search(name) or name.startswith("_pgcdc")):
        return name
    text = _REFUSED.sub(lambda match: f"%{ord(match[0]):02X}", name.replace("%", "%25"))
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
    """The value columns of a table's feed, in attnum order."""
    return tuple(FeedColumn.of(column, table) for column in table.columns)


def verbatim(columns: Sequence[FeedColumn]) -> bool:
    """Whether feed and mirror call every column alike."""
    return all(column.name == column.source for column in columns)
