"""What an undo reverts: a range, one key, or one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import LakeError, UsageError
from pgcdc_assets.feed.schema import COMMIT_LSN, OP, RAW, TRUNCATE, XID, FeedColumn, feed_columns
from pgcdc_assets.lake.netchange import net_change
from pgcdc_assets.lake.reversal import reversal
from pgcdc_assets.lake.rowhistory import key_scalar, keyed
from pgcdc_assets.lake.tableat import TableAt
from pgcdc_assets.mirror.net.neteffect import key_numbers


def undo_range(earlier: TableAt, later: TableAt, key: Mapping[str, Any] | Any = None) -> str:
    """SQL that takes the table, or the row with this key, from its state at ``later`` back to its state at
    ``earlier``."""
    change = net_change(later.mirror, earlier.mirror, later.table)
    if key is not None:
        change = _with_key(change, keyed(later.table, key))
    return reversal(change, later.table)


def commit_of(at: TableAt, xid: int) -> Lsn:
    """The ``commit_lsn`` of a transaction that changed the table. LakeError unless the feed contains exactly one.
    ``xid``: 32 bits, or 64 bits as pg_current_xact_id() returns it. The stream sends no epoch, so none is compared."""
    if type(xid) is not int:
        raise UsageError(f"the xid {xid!r} is not an integer")
    only = pc.field(XID) == xid & 0xFFFFFFFF
    found = {lsn for rows in at.feed.rows(at.feed.covered, only) for lsn in rows[COMMIT_LSN].to_pylist()}
    if len(found) != 1:
        what = "contains no change" if not found else "contains changes of several transactions"
        raise LakeError(f"{what} with the xid {xid}", thing=f"change feed of {at.name}",
                        do="name the transaction by its commit_lsn")  # fmt: skip
    return Lsn(found.pop())


def undo_transaction(earlier: TableAt, later: TableAt, commit_lsn: Lsn) -> str:
    """SQL that takes the rows that a transaction changed back to their state at ``earlier``. The two points are the
    nearest ones, and other transactions may lie between them. LakeError if they changed the same rows."""
    feed, table = later.feed, later.table
    feed.require(earlier.point.replay_lsn)
    parts = [feed.schema.empty_table(), *feed.rows(LsnRange(earlier.point.replay_lsn, later.point.replay_lsn))]
    rows = pa.concat_tables(parts)
    mine = pc.equal(rows[COMMIT_LSN], int(commit_lsn))
    own, others = rows.filter(mine), rows.filter(pc.invert(mine))
    if not own.num_rows:
        raise LakeError("contains no change of this transaction", thing=f"change feed of {later.name}", lsn=commit_lsn)
    change = net_change(later.mirror, earlier.mirror, table)
    if others.num_rows:
        columns = [column for column in feed_columns(table) if column.key]
        emptied = pc.any(pc.equal(rows[OP], TRUNCATE)).as_py()
        keys = [_keys(side, columns) for side in (own, others)]
        if not columns or emptied or _among(keys[0], keys[1], columns).any():
            raise LakeError(
                f"was changed in the same rows by other transactions, and no point lies between them and this one: the "
                f"nearest points are {earlier.point.replay_lsn} and {later.point.replay_lsn}",
                thing=f"table {later.name}", lsn=commit_lsn, do="undo the range between these points instead",
            )  # fmt: skip
        change = change.filter(pa.array(_among(_images_keys(change, columns), keys[0], columns)))
    return reversal(change, table)


def _with_key(change: pa.Table, key: Mapping[str, Any]) -> pa.Table:
    kept = pa.array(np.ones(change.num_rows, dtype=bool))
    for name, value in key.items():
        values = _image_values(change, name)
        kept = pc.and_(kept, pc.fill_null(pc.equal(values, key_scalar(name, value, values.type)), False))
    return change.filter(kept)


def _image_values(change: pa.Table, name: str) -> pa.ChunkedArray:
    before, after = (pc.struct_field(change[side], name) for side in ("before", "after"))
    return pc.if_else(change["before"].is_valid(), before, after)


def _keys(rows: pa.Table, columns: list[FeedColumn]) -> pa.Table:
    return rows.select([*(column.name for column in columns), RAW])


def _images_keys(change: pa.Table, columns: list[FeedColumn]) -> pa.Table:
    """The keys of a net change, under the names of the feed."""
    named = {column.name: _image_values(change, column.source) for column in columns}
    return pa.table({**named, RAW: _image_values(change, RAW)})


def _among(rows: pa.Table, others: pa.Table, columns: list[FeedColumn]) -> Any:
    """For each row, whether ``others`` has its key."""
    number = key_numbers(pa.concat_tables([rows, others.cast(rows.schema)]), columns)
    return np.isin(number[: rows.num_rows], number[rows.num_rows :])
