"""Computes the net effect of a table's events (rows of its change feed). Pure Arrow and numpy.

With a key, it is the *merge source*, with one row for each key, which is merged into the mirror (the *target*).
The last event of a key decides the key's row (:mod:`pgcdc_assets.mirror.net.keyhistory`). The first event says whether
the target must hold the key. If the first event is an update, a delete or the old half of a key change, the target must
hold the key. If the first event is an insert or a new half, the target must not hold the key. The column ``PRESENT``
passes this to :mod:`pgcdc_assets.mirror.delta.rowlookup`, which refuses the merge if the mirror disagrees.

Without a key, it is :class:`NetRows`: for each distinct row, how many equal rows are added or deleted. Such a table has
REPLICA IDENTITY FULL, so that every change contains complete row images. An update deletes one row that equals its old
image, and adds its new image. Rows are compared by the hash of their texts (``_pgcdc_hash``), and then value by value.
In a mirror, equal rows differ only in ``_pgcdc_row``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints, first_of_groups, list_texts, whole
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.feed.schema import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETE,
    HASH,
    LEAF,
    OP,
    OPS,
    ORDINAL,
    PREIMAGE,
    RAW,
    ROW,
    TRUNCATE,
    UNCHANGED,
    FeedColumn,
)
from pgcdc_assets.mirror.net.keyhistory import KeyOutcomes, connected, key_outcomes, moved

UPSERT, REMOVE = "U", "D"
"""The value of ``_pgcdc_op``: what the merge does with a row of the merge source."""
PRESENT = "_pgcdc_present"
"""Whether the target must hold the key: true, false, or NULL if that is not known."""
ORIGIN = "_pgcdc_origin"
"""Struct of a key and its ``_pgcdc_raw``. The target's row with this key has the values that the events lack. NULL: the
target's row with the merge source's own key has them."""
ARRIVES = "_pgcdc_arrives"
"""Column of events, only if the events were divided by key: whether the event is the new half of a key change. It then
has all values, and the old half may be in another unit of work."""
MASK = "_pgcdc_masked_"
"""Prefix of column names; the attnum follows. True: no event has the column's value (unchanged TOAST), so the value is
taken from the target's row."""
COUNT = "_pgcdc_count"
"""Column of ``NetRows.removed``: how many rows that equal this row are deleted from the target."""
MOVED = "a row changed its key, and the change log does not have all values of this row"
"""Why a repair is refused: the mirror may have another row under the new key, with other values."""


def after_truncates(events: pa.Table) -> pa.Table:
    """Remove every truncate and the events that it makes void: all earlier events of the table, or of the truncated
    leaf partition."""
    truncates = events.filter(pc.equal(events[OP], TRUNCATE))
    if not truncates.num_rows:
        return events
    events = events.filter(pc.not_equal(events[OP], TRUNCATE))
    whole = truncates if LEAF not in events.column_names else truncates.filter(pc.is_null(truncates[LEAF]))
    if whole.num_rows:
        events = events.filter(_later(events, *_newest(whole)))
    if LEAF not in events.column_names:
        return events
    named = truncates.filter(pc.is_valid(truncates[LEAF]))
    for leaf in pc.unique(named[LEAF]).to_pylist():
        later = _later(events, *_newest(named.filter(pc.equal(named[LEAF], leaf))))
        other = pc.fill_null(pc.not_equal(events[LEAF], leaf), True)
        events = events.filter(pc.or_(other, later))
    return events


def _newest(truncates: pa.Table) -> tuple[int, int]:
    lsn, ordinal = (truncates[name].to_numpy() for name in (COMMIT_LSN, ORDINAL))
    at = np.lexsort((ordinal, lsn))[-1]
    return int(lsn[at]), int(ordinal[at])


def _later(events: pa.Table, lsn: int, ordinal: int) -> pa.ChunkedArray:
    same = pc.and_(pc.equal(events[COMMIT_LSN], lsn), pc.greater(events[ORDINAL], ordinal))
    return pc.or_(pc.greater(events[COMMIT_LSN], lsn), same)


def collapse(events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int] = ()) -> pa.Table:
    """Collapse the events of one table to a merge source, which has one row for each key. Its columns: ``_pgcdc_op``
    (``U``, ``D``), ``_pgcdc_present``, ``_pgcdc_commit_lsn``, ``_pgcdc_commit_ts``, ``_pgcdc_raw``, ``_pgcdc_leaf`` if
    the feed has it, the values under their feed names, ``_pgcdc_origin``, and ``_pgcdc_masked_<attnum>`` for each
    attnum in ``masked``, which lists the columns for which at least one value was not sent."""
    events = events.combine_chunks()
    if any(column.key for column in columns):
        arrives = events[ARRIVES].to_numpy() if ARRIVES in events.column_names else None
        net = key_outcomes(*_places(events, columns), _present_masks(events, masked), divided=arrives)
    else:
        # Of a table without a key, only inserts come here, so each event is one new row.
        every = np.arange(events.num_rows, dtype=np.int64)
        net = KeyOutcomes(every, every >= 0, every < 0, np.full(len(every), -1, dtype=np.int64))
    return _merge_source(events, columns, masked, net)


def collapse_touched(
    events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int], touched: LsnRange | None
) -> pa.Table:
    """Make the merge source of a repair from ``events``, which reach from the repaired range up to the mirror's
    position. It has only the keys that changed in the range ``touched`` (None: all keys), and the keys to which rows
    moved from these keys. A wrong mirror may or may not hold these keys, so the merge does not check this. Exception:
    if no event has one of a row's values, the value is read from the target. So the target must then hold the row.
    Raises MergeMismatch if such a row has changed its key, because the target may hold a different row under this
    key."""
    events = events.combine_chunks()
    places = _places(events, columns)
    net = key_outcomes(*places, _present_masks(events, masked), keep_transient=True)
    lacking = np.zeros(len(net.last), dtype=bool)
    for mask in net.masked.values():
        lacking |= mask
    key, op, lsn, ordinal = places
    wanted = np.ones(len(net.last), dtype=bool)
    if touched is not None:
        touches = (lsn >= int(touched.start)) & (lsn < int(touched.end))
        wanted = connected(key, op, lsn, ordinal, touches)[key[net.last]]
    if (lacking & wanted & moved(key, op, lsn, ordinal)[key[net.last]]).any():
        raise MergeMismatch(MOVED)
    rows = _merge_source(events, columns, masked, net)
    known = pa.array(lacking, mask=~lacking)
    rows = rows.set_column(rows.schema.get_field_index(PRESENT), PRESENT, known)
    return rows.filter(pa.array(wanted))


def _places(events: pa.Table, columns: Sequence[FeedColumn]) -> tuple[Ints, NDArray[np.int8], Ints, Ints]:
    """Key number, operation, commit LSN and ordinal of each event."""
    op = pc.index_in(events[OP], pa.array(OPS)).to_numpy().astype(np.int8)
    return key_numbers(events, columns), op, events[COMMIT_LSN].to_numpy(), events[ORDINAL].to_numpy()


def _merge_source(events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int], net: KeyOutcomes) -> pa.Table:
    names = {column.attnum: column.name for column in columns}
    taken = {names[attnum]: source for attnum, source in net.sources.items()}
    data: dict[str, pa.Array | pa.ChunkedArray] = {
        OP: pa.DictionaryArray.from_arrays(pa.array((~net.live).astype(np.int8)), [UPSERT, REMOVE]).cast(pa.string()),
        PRESENT: pa.array(net.present),
    }
    for name in (COMMIT_LSN, COMMIT_TS, *((LEAF,) if LEAF in events.column_names else ())):
        data[name] = events[name].take(pa.array(net.last))
    data[RAW] = _raw_taken(events, columns, net)
    for column in columns:
        data[column.name] = events[column.name].take(pa.array(taken.get(column.name, net.last)))
    none = np.zeros(len(net.last), dtype=bool)
    for attnum in masked:
        data[f"{MASK}{attnum}"] = pa.array(net.masked.get(attnum, none))
    data[ORIGIN] = _origins(events, columns, net.origin)
    return pa.table(data)


def key_numbers(events: pa.Table, columns: Sequence[FeedColumn]) -> Ints:
    """The number of each event's key: the distinct keys are numbered from 0. A key value that does not fit its type is
    NULL, and is identified by its text in ``_pgcdc_raw``."""
    number = np.zeros(events.num_rows, dtype=np.int64)
    raw = events[RAW] if events[RAW].null_count < events.num_rows else None
    for column in columns:
        if not column.key:
            continue
        number = _combined(number, _codes(events[column.name]))
        if raw is not None and events[column.name].null_count:
            number = _combined(number, _codes(raw_texts(raw, column.source)))
    return number


def _codes(values: pa.Array | pa.ChunkedArray) -> Ints:
    values = whole(values)
    if pa.types.is_floating(values.type):
        values = pc.add(values, 0.0)  # -0 and 0 are one key to Spark and to Delta's readers
    elif pa.types.is_list(values.type):
        # Arrow cannot dictionary-encode lists. Equal lists get equal texts.
        values = list_texts(values, pc.cast(pa.array(_codes(values.flatten())), pa.string()))
    codes: Ints = values.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    return codes


def _combined(left: Ints, right: Ints) -> Ints:
    """Number the distinct pairs from 0, without gaps, so that the numbers stay small and their products never
    overflow."""
    if not len(left) or not left.any():
        return right
    numbers: Ints = np.unique(left * (int(right.max()) + 1) + right, return_inverse=True)[1].astype(np.int64)
    return numbers


def _present_masks(events: pa.Table, attnums: Sequence[int]) -> dict[int, Bools]:
    """For each attnum, which events lack the column's value. Attnums of which no value is missing are left out."""
    lists = events[UNCHANGED]
    masks = {attnum: np.zeros(events.num_rows, dtype=bool) for attnum in attnums}
    if lists.null_count == events.num_rows:
        return {}
    rows = pc.list_parent_indices(lists).to_numpy()
    numbers = pc.list_flatten(lists).to_numpy()
    for attnum, mask in masks.items():
        mask[rows[numbers == attnum]] = True
    return {attnum: mask for attnum, mask in masks.items() if mask.any()}


def raw_texts(raw: pa.ChunkedArray, name: str) -> pa.Array:
    """For each row, the text of the column ``name`` in ``raw``, a column of ``_pgcdc_raw`` maps. NULL if the map lacks
    it."""
    return whole(pc.map_lookup(raw, pa.scalar(name), "first"))


def _raw_taken(events: pa.Table, columns: Sequence[FeedColumn], net: KeyOutcomes) -> pa.Array:
    """The ``_pgcdc_raw`` of each row of the merge source. A column's text is taken from the same event as its value."""
    raw = events[RAW]
    sources = {column.source: net.sources[column.attnum] for column in columns if column.attnum in net.sources}
    if raw.null_count == len(raw) or not sources:
        return raw.take(pa.array(net.last))
    names = pc.unique(map_keys(raw)).to_pylist()
    texts = {name: raw_texts(raw, name).take(pa.array(sources.get(name, net.last))) for name in names}
    return raw_maps(texts, len(net.last), raw.type)


def map_keys(raw: pa.ChunkedArray) -> pa.Array:
    """All names in a column of ``_pgcdc_raw`` maps."""
    # In Arrow, a NULL map may still have entries in the child array. Dropping the NULLs drops these entries too.
    return pa.concat_arrays([chunk.drop_null().keys for chunk in raw.chunks] or [pa.array([], pa.string())])


def raw_maps(texts: Mapping[str, pa.Array], rows: int, kind: pa.DataType) -> pa.Array:
    """Build a column of maps from column name to text. ``texts`` has at least one name, and for each name an array with
    one text or NULL for each row. A row without any text gets NULL."""
    found = [(name, np.flatnonzero(text.is_valid().to_numpy(zero_copy_only=False))) for name, text in texts.items()]
    owner = np.concatenate([at for _, at in found])
    order = np.argsort(owner, kind="stable")
    keys = pa.concat_arrays([pa.repeat(pa.scalar(name, pa.string()), len(at)) for name, at in found])
    items = pa.concat_arrays([texts[name].cast(pa.string()).drop_null() for name, _ in found])
    counts = np.bincount(owner, minlength=rows)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    maps = pa.MapArray.from_arrays(
        pa.array(offsets), keys.take(pa.array(order)), items.take(pa.array(order)), mask=pa.array(counts == 0)
    )
    return maps.cast(kind)


def _origins(events: pa.Table, columns: Sequence[FeedColumn], origin: Ints) -> pa.Array:
    """The column ORIGIN: for each row of the merge source, the key of event ``origin``; NULL if that is -1."""
    at = pa.array(np.maximum(origin, 0))
    names = [*(column.name for column in columns if column.key), RAW]
    if not events.num_rows:
        values = [events[name].combine_chunks() for name in names]
    else:
        values = [events[name].take(at).combine_chunks() for name in names]
    return pa.StructArray.from_arrays(values, names=names, mask=pa.array(origin < 0))


# Tables without a key -------------------------------------------------------------------------------


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
