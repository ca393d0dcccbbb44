"""The net effect of changes on a table without a key: for each distinct row, how many equal rows are added or deleted.
Such a table has REPLICA IDENTITY FULL, so that every change contains complete row images. An update deletes one row
that equals its old image, and adds its new image. Rows are compared by the hash of their texts (``_pgcdc_hash``), and
then value by value. In a mirror, equal rows differ only in ``_pgcdc_row``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Ints, first_of_groups
from pgcdc_assets.feed.schema import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETE,
    HASH,
    LEAF,
    OP,
    ORDINAL,
    PREIMAGE,
    RAW,
    ROW,
    FeedColumn,
)
from pgcdc_assets.mirror.net.neteffect import key_numbers

COUNT = "_pgcdc_count"
"""Column of ``removed``: how many rows that equal this row are deleted from the target."""


@dataclass(frozen=True)
class NetRows:
    """The net effect. ``added``: the rows to add, with the feed's column names. ``removed``: the distinct rows to
    delete, with COUNT. ``removed`` has the column ``_pgcdc_leaf`` only if rows may be deleted only in this leaf
    partition."""

    added: pa.Table
    removed: pa.Table


def net_rows(events: pa.Table, columns: Sequence[FeedColumn], *, by_leaf: bool = True) -> NetRows:
    """Compute the net effect of these events. Truncates, and the events that they make void, must have been removed. If
    equal rows are both added and deleted, they cancel each other. If more are added than deleted, the newest added rows
    remain. ``by_leaf``: deleted rows are searched only in the leaf partition of their event. False for a table that is
    published via its root: its events lack the leaf, but rows of a snapshot copy have it."""
    events = events.combine_chunks()
    group = _groups(events, columns)
    leaving = pc.is_in(events[OP], pa.array([DELETE, PREIMAGE])).to_numpy().astype(bool)
    net = np.bincount(group, weights=np.where(leaving, -1, 1)).astype(np.int64)
    order = np.lexsort((events[ORDINAL].to_numpy(), events[COMMIT_LSN].to_numpy()))
    fill = _latest(group, order[~leaving[order]], np.maximum(net, 0))
    lost = _latest(group, order, (net < 0).astype(np.int64))
    values = [column.name for column in columns]
    own = [name for name in (COMMIT_LSN, COMMIT_TS, RAW, LEAF, ROW, HASH) if name in events.column_names]
    removed = events.select([HASH, RAW, *([LEAF] if LEAF in own and by_leaf else []), *values]).take(pa.array(lost))
    removed = removed.append_column(COUNT, pa.array(-net[group[lost]], pa.int64()))
    return NetRows(events.select([*own, *values]).take(pa.array(fill)), removed)


def _latest(group: Ints, candidates: Ints, wanted: Ints) -> Ints:
    """For every group g, the last ``wanted[g]`` of the ``candidates``, which are row numbers in the order of the
    events."""
    backwards = candidates[::-1]
    return backwards[first_of_groups(group[backwards], wanted)]


def _groups(events: pa.Table, columns: Sequence[FeedColumn]) -> Ints:
    """Number the distinct rows, by hash and leaf. Only if different rows have the same hash, values are compared
    too."""
    parts = [FeedColumn(HASH, HASH, 0, True)]
    if LEAF in events.column_names:
        parts.append(FeedColumn(LEAF, LEAF, 0, True))
    group = key_numbers(events, parts)
    if not len(group):
        return group
    member = np.unique(group, return_index=True)[1].astype(np.int64)[group]
    plain = [column for column in columns if not pa.types.is_nested(events[column.name].type)]
    values = ((column, events[column.name].combine_chunks()) for column in plain)
    if all(_same(array, array.take(pa.array(member))) for _, array in values):
        return group
    return key_numbers(events, [*parts, *(replace(column, key=True) for column in plain)])


def _same(left: pa.Array, right: pa.Array) -> bool:
    if pa.types.is_floating(left.type):
        left, right = (pc.if_else(pc.is_nan(side), None, side) for side in (left, right))
    equal = pc.fill_null(pc.equal(left, right), pc.and_(pc.is_null(left), pc.is_null(right)))
    return bool(pc.all(equal).as_py())
