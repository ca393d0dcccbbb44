"""One table at one point: its mirror's version, its structure, and its change feed as the point sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import UnknownTable
from pgcdc_assets.feed.messages import read_messages
from pgcdc_assets.feed.schema import UNCHANGED, feed_name
from pgcdc_assets.lake.changefeed import ChangeFeed
from pgcdc_assets.lake.rowhistory import RowHistory, keyed, row_history, with_messages
from pgcdc_assets.mirror.delta.mirror import IDENTITY
from pgcdc_assets.points.points import Point
from pgcdc_assets.points.states import TableStates


@dataclass(frozen=True)
class TableAt:
    layout: Layout
    point: Point
    name: TableName
    mirror: DeltaVersion

    @cached_property
    def table(self) -> Table:
        """The table in its present structure, which may be newer than the mirror's version."""
        row = TableStates(self.layout).get(self.name)
        if row is None or row.table is None:
            raise UnknownTable("has no recorded structure", thing=f"table {self.name}")
        return row.table

    @cached_property
    def feed(self) -> ChangeFeed:
        owner = self.mirror.configuration.get(IDENTITY, "")
        return ChangeFeed.at(self.layout, self.name, self.mirror, owner, self.point.replay_lsn)

    def changes(self, after: Lsn) -> Iterator[pa.Table]:
        """The changes at or above ``after`` and below the point, in order. FeedGap if some are missing."""
        feed = self.feed
        feed.require(after)
        for rows in feed.rows(LsnRange(min(after, feed.covered.end), feed.covered.end)):
            named = _named(rows[UNCHANGED].combine_chunks(), self.table)
            yield rows.set_column(rows.schema.get_field_index(UNCHANGED), UNCHANGED, named)

    def history(self, key: Mapping[str, Any] | Any) -> RowHistory:
        versions = row_history(self.feed, self.table, keyed(self.table, key))
        commits, messages = versions["lsn"].to_pylist(), None
        if self.point.messages is not None:
            span = LsnRange(Lsn(min(commits, default=0)), Lsn(max(commits, default=0) + 1))
            messages = read_messages(self.layout, span, self.point.messages, commits)
        return RowHistory(self.feed.covered.start, with_messages(versions, messages))


def _named(attnums: pa.ListArray, table: Table) -> pa.ListArray:
    """The feed's column names in place of attnums."""
    former = table.lineage.former if table.lineage is not None else ()
    names = {column.attnum: feed_name(column.name) for column in (*former, *table.columns)}
    found = pa.array([names.get(attnum, str(attnum)) for attnum in attnums.flatten().to_pylist()], pa.string())
    lengths = pc.fill_null(pc.list_value_length(attnums), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    return pa.ListArray.from_arrays(offsets, found, mask=attnums.is_null())
