"""Computes the net effect of a table's changes per key: the source of the merge. Pure Arrow and numpy.

The last event of a key decides the key's row (:mod:`pgcdc_assets.mirror.net.keyhistory`). The first event says whether
the target must hold the key. If the first event is an update, a delete or the old half of a key change, the target must
hold the key. If the first event is an insert or a new half, the target must not hold the key. The column ``PRESENT``
passes this to :mod:`pgcdc_assets.mirror.delta.rowlookup`, which refuses the merge if the mirror disagrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints, list_texts, whole
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, LEAF, OP, OPS, ORDINAL, RAW, TRUNCATE, UNCHANGED, FeedColumn
from pgcdc_assets.mirror.net.keyhistory import KeyOutcomes, connected, key_outcomes

UPSERT, REMOVE = "U", "D"
"""The value of ``_pgcdc_op``: what the merge does with a row of the merge source."""
PRESENT = "_pgcdc_present"
"""Whether the target must hold the key: true, false, or NULL if that is not known."""
ORIGIN = "_pgcdc_origin"
"""Struct of a key and ``_pgcdc_raw``: the key whose target row supplies the masked values. NULL: the row's own key."""
ARRIVES = "_pgcdc_arrives"
"""Column of events, if the events were divided by key: whether the event is the new half of a key change, which has all
its values. The old half may be in another unit of work."""
MASK = "_pgcdc_masked_"
"""Column name prefix, followed by the attnum. True: keep the value from the target row."""


@dataclass(frozen=True)
class Remaining:
    """The events that remain after truncates are removed, together with the events that the truncates make void."""

    events: pa.Table
    truncated: bool
    """Whether the whole table was truncated. The remaining events are then the complete table."""
    leaves: tuple[str, ...]
    """Leaves that were truncated, by the value of ``_pgcdc_leaf``."""


def after_truncates(events: pa.Table) -> Remaining:
    """Remove every truncate and the events that it makes void: all earlier events, or those of the truncated leaf."""
    truncates = events.filter(pc.equal(events[OP], TRUNCATE))
    if not truncates.num_rows:
        return Remaining(events, False, ())
    events = events.filter(pc.not_equal(events[OP], TRUNCATE))
    whole = truncates if LEAF not in events.column_names else truncates.filter(pc.is_null(truncates[LEAF]))
    if whole.num_rows:
        events = events.filter(_later(events, *_newest(whole)))
    if LEAF not in events.column_names:
        return Remaining(events, True, ())
    named = truncates.filter(pc.is_valid(truncates[LEAF]))
    leaves = tuple(pc.unique(named[LEAF]).to_pylist())
    for leaf in leaves:
        later = _later(events, *_newest(named.filter(pc.equal(named[LEAF], leaf))))
        other = pc.fill_null(pc.not_equal(events[LEAF], leaf), True)
        events = events.filter(pc.or_(other, later))
    return Remaining(events, whole.num_rows > 0, () if whole.num_rows else leaves)


def _newest(truncates: pa.Table) -> tuple[int, int]:
    lsn, ordinal = (truncates[name].to_numpy() for name in (COMMIT_LSN, ORDINAL))
    at = np.lexsort((ordinal, lsn))[-1]
    return int(lsn[at]), int(ordinal[at])


def _later(events: pa.Table, lsn: int, ordinal: int) -> pa.ChunkedArray:
    same = pc.and_(pc.equal(events[COMMIT_LSN], lsn), pc.greater(events[ORDINAL], ordinal))
    return pc.or_(pc.greater(events[COMMIT_LSN], lsn), same)


def collapse(events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int] = ()) -> pa.Table:
    """Collapse the events of one table to a merge source: one row per key. Columns: ``_pgcdc_op`` (``U``, ``D``),
    ``_pgcdc_present``, ``_pgcdc_commit_lsn``, ``_pgcdc_commit_ts``, ``_pgcdc_raw``, ``_pgcdc_leaf`` if the feed has it,
    the values under their feed names, ``_pgcdc_origin``, and ``_pgcdc_masked_<attnum>`` for each attnum in ``masked``
    (columns for which at least one value was not sent)."""
    events = events.combine_chunks()
    if any(column.key for column in columns):
        arrives = events[ARRIVES].to_numpy() if ARRIVES in events.column_names else None
        net = key_outcomes(*_places(events, columns), _present_masks(events, masked), divided=arrives)
    else:
        # A table without a key is followed for inserts only, so every event is a row of its own.
        every = np.arange(events.num_rows, dtype=np.int64)
        net = KeyOutcomes(every, every >= 0, every < 0, np.full(len(every), -1, dtype=np.int64))
    return _merge_source(events, columns, masked, net)


def collapse_touched(
    events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int], touched: LsnRange | None
) -> pa.Table:
    """Collapse ``events``, which reach up to the mirror's position, to the merge source of a repair. The merge source
    has only the keys that changed in ``touched`` (None: all keys), and the keys to which rows moved from these keys. It
    is not known whether the target holds these keys. The target must hold a row only if a value of the row is masked,
    and then under the row's newest key."""
    events = events.combine_chunks()
    places = _places(events, columns)
    net = key_outcomes(*places, _present_masks(events, masked), keep_transient=True)
    rows = _merge_source(events, columns, masked, replace(net, origin=np.full_like(net.origin, -1)))
    lacking = np.zeros(len(net.last), dtype=bool)
    for mask in net.masked.values():
        lacking |= mask
    known = pa.array(lacking, mask=~lacking)
    rows = rows.set_column(rows.schema.get_field_index(PRESENT), PRESENT, known)
    if touched is None:
        return rows
    key, op, lsn, ordinal = places
    wanted = connected(key, op, lsn, ordinal, (lsn >= int(touched.start)) & (lsn < int(touched.end)))
    return rows.filter(pa.array(wanted[key[net.last]]))


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
    """Number the distinct keys from 0. A key value that does not fit its type is identified by its text."""
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
    """Number the distinct pairs from 0 without gaps, so that a product of two such numbers never overflows."""
    if not len(left) or not left.any():
        return right
    numbers: Ints = np.unique(left * (int(right.max()) + 1) + right, return_inverse=True)[1].astype(np.int64)
    return numbers


def _present_masks(events: pa.Table, attnums: Sequence[int]) -> dict[int, Bools]:
    """For each attnum, a mask of the events that lack its value. Leaves out attnums of which no value is missing."""
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
    """The text of one column in a column of ``_pgcdc_raw`` maps; NULL if the map lacks it."""
    return whole(pc.map_lookup(raw, pa.scalar(name), "first"))


def _raw_taken(events: pa.Table, columns: Sequence[FeedColumn], net: KeyOutcomes) -> pa.Array:
    """The ``_pgcdc_raw`` of each remaining row. A column's text is from the same event as the column's value."""
    raw = events[RAW]
    sources = {column.source: net.sources[column.attnum] for column in columns if column.attnum in net.sources}
    if raw.null_count == len(raw) or not sources:
        return raw.take(pa.array(net.last))
    names = pc.unique(map_keys(raw)).to_pylist()
    texts = {name: raw_texts(raw, name).take(pa.array(sources.get(name, net.last))) for name in names}
    return raw_maps(texts, len(net.last), raw.type)


def map_keys(raw: pa.ChunkedArray) -> pa.Array:
    """All names in a column of ``_pgcdc_raw`` maps."""
    # A NULL map may have hidden entries; dropping the NULLs also drops these entries.
    return pa.concat_arrays([chunk.drop_null().keys for chunk in raw.chunks] or [pa.array([], pa.string())])


def raw_maps(texts: Mapping[str, pa.Array], rows: int, kind: pa.DataType) -> pa.Array:
    """Builds a column of maps from column name to text. ``texts`` has one sparse array per name, and at least one name.
    A row without any text gets NULL instead of a map."""
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
    """For each event, the key of the row that supplies its masked values. NULL if that key is the event's own key."""
    at = pa.array(np.maximum(origin, 0))
    names = [*(column.name for column in columns if column.key), RAW]
    if not events.num_rows:
        values = [events[name].combine_chunks() for name in names]
    else:
        values = [events[name].take(at).combine_chunks() for name in names]
    return pa.StructArray.from_arrays(values, names=names, mask=pa.array(origin < 0))
