"""The net effect of a table's changes, per key: what is left for one MERGE.

Pure Arrow and numpy. Events of one table are ordered by ``(commit_lsn, ordinal)``; the last event of a
key decides its row. A change of key is two events: the old half leaves its key (ordinal 2n), the new
half arrives on another (2n + 1) and continues the old key's chain. A value that was not sent
(unchanged TOAST) is taken from the nearest earlier image of the *same row*: along the chain, never
across a delete; where the chain begins with an update, from the target row of the key it began on.

What a target must hold is known exactly: a key whose first event is an update, a delete or an old half
must be there, a key whose first event is an insert or a new half must not. ``PRESENT`` carries it into
the MERGE, which fails before it commits where the mirror disagrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.lake.feed import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETE,
    INSERT,
    LEAF,
    OP,
    OPS,
    ORDINAL,
    PREIMAGE,
    RAW,
    TRUNCATE,
    UNCHANGED,
    FeedColumn,
)

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

UPSERT, REMOVE = "U", "D"
"""What a row of the merge source asks for (column ``_pgcdc_op``)."""
PRESENT = "_pgcdc_present"
"""Whether the target must hold the key: true, false, or NULL where it cannot be known."""
ORIGIN = "_pgcdc_origin"
"""Struct of the key (and ``_pgcdc_raw``) whose target row supplies the masked values; NULL: the row's own."""
MASK = "_pgcdc_masked_"
"""Prefix, followed by the attnum: the value is to be kept from the target row."""

_INSERT, _PREIMAGE, _DELETE = OPS.index(INSERT), OPS.index(PREIMAGE), OPS.index(DELETE)


@dataclass(frozen=True)
class Net:
    """The net effect as row numbers into the events, one entry per key that is left.

    ``last`` is the deciding event, ``live`` whether the key exists after it, ``present`` whether it
    existed before the first. ``sources[attnum]`` names for each entry the event that carries the value;
    where ``masked[attnum]``, that value stands in the target row of the key of event ``origin``.
    """

    last: Ints
    live: Bools
    present: Bools
    origin: Ints
    sources: dict[int, Ints] = field(default_factory=dict)
    masked: dict[int, Bools] = field(default_factory=dict)


def net_effect(
    key: Ints, op: NDArray[np.int8], commit_lsn: Ints, ordinal: Ints, masks: Mapping[int, Bools] | None = None
) -> Net:
    """Work out what the events amount to, by key.

    ``key`` numbers the distinct keys from 0; ``op`` holds positions in ``OPS``; truncates must be gone
    (:func:`after_truncates`). Raises MergeMismatch where events contradict each other: an insert of a
    key that exists, an update or delete of one that was deleted.
    """
    order = np.lexsort((ordinal, commit_lsn))
    by_key = order[np.argsort(key[order], kind="stable")]
    first = np.ones(len(key), dtype=bool)
    first[1:] = key[by_key[1:]] != key[by_key[:-1]]
    before = np.full(len(key), -1, dtype=np.int64)
    before[by_key[1:]] = np.where(first[1:], -1, by_key[:-1])
    old_half = _old_halves(op, commit_lsn, ordinal, order)
    live = (op != _DELETE) & (op != _PREIMAGE)
    arrives = (op == _INSERT) | (old_half >= 0)
    _refuse_contradictions(before, live, arrives, commit_lsn)
    last = by_key[np.append(first, True)[1:]]
    present = ~arrives[by_key[first]]
    kept = live[last] | present
    last, present = last[kept], present[kept]
    if not masks:
        return Net(last, live[last], present, np.full(len(last), -1, dtype=np.int64))
    return _with_masks(Net(last, live[last], present, last), key, before, old_half, op, masks)


def _old_halves(op: NDArray[np.int8], commit_lsn: Ints, ordinal: Ints, order: Ints) -> Ints:
    """For each new half of a key change its old half, else -1. The halves are neighbours in the order."""
    old_half = np.full(len(op), -1, dtype=np.int64)
    places = np.flatnonzero(op[order] == _PREIMAGE)
    if not len(places):
        return old_half
    olds = order[places]
    news = order[np.minimum(places + 1, len(order) - 1)]
    paired = (commit_lsn[news] == commit_lsn[olds]) & (ordinal[news] == ordinal[olds] + 1)
    if not paired.all():
        raise MergeMismatch("half of a key change is missing in the feed", lsn=Lsn(int(commit_lsn[olds[~paired][0]])))
    old_half[news] = olds
    return old_half


def _refuse_contradictions(before: Ints, live: Bools, arrives: Bools, commit_lsn: Ints) -> None:
    """An event that arrives on a key must find it dead, every other one must find it alive."""
    bad = np.flatnonzero((before >= 0) & (live[before] == arrives))
    if len(bad):
        at = bad[np.argmin(commit_lsn[bad])]
        what = "an insert of a key that exists" if arrives[at] else "a change of a row that was deleted"
        raise MergeMismatch(f"the changes contradict each other: {what}", lsn=Lsn(int(commit_lsn[at])))


def _with_masks(
    net: Net, key: Ints, before: Ints, old_half: Ints, op: NDArray[np.int8], masks: Mapping[int, Bools]
) -> Net:
    """Find the event that carries each masked value, by pointer doubling along the rows' chains."""
    previous = np.where(old_half >= 0, before[old_half], before)
    previous = np.where(op == _INSERT, -1, previous)
    here = np.arange(len(key), dtype=np.int64)
    root = _ends(np.where(previous >= 0, previous, here))[net.last]
    origin = np.where(old_half[root] >= 0, old_half[root], root)
    sources: dict[int, Ints] = {}
    masked: dict[int, Bools] = {}
    for attnum, mask in masks.items():
        end = _ends(np.where(mask & (previous >= 0), previous, here))[net.last]
        sources[attnum] = end
        masked[attnum] = mask[end] & net.live
    needed = np.logical_or.reduce(list(masked.values()))
    elsewhere = needed & (key[origin] != key[net.last])
    return Net(net.last, net.live, net.present, np.where(elsewhere, origin, -1), sources, masked)


def _ends(jump: Ints) -> Ints:
    """Where each chain of jumps ends; chains are acyclic, and end on themselves."""
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            return jump
        jump = further


@dataclass(frozen=True)
class Remaining:
    """Events with the truncates and all that they removed taken out."""

    events: pa.Table
    truncated: bool
    """The whole table was emptied: what is left is complete by itself."""
    leaves: tuple[str, ...]
    """Leaves that were emptied, by the value of ``_pgcdc_leaf``."""


def after_truncates(events: pa.Table) -> Remaining:
    """Drop every truncate and the events it makes void: those before it, of its leaf where it names one."""
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


@dataclass(frozen=True)
class Collapsed:
    """A merge source: one row per key, with what its MERGE will count.

    Columns: ``_pgcdc_op`` (``U``, ``D``), ``_pgcdc_present``, ``_pgcdc_commit_lsn``,
    ``_pgcdc_commit_ts``, ``_pgcdc_raw``, ``_pgcdc_leaf`` where the feed has it, the value columns under
    their feed names, ``_pgcdc_masked_<attnum>`` for each attnum asked for, and ``_pgcdc_origin``.
    """

    rows: pa.Table
    inserted: int
    updated: int
    deleted: int
    lookups: int
    """Rows whose masked values stand in the target under another key."""


def collapse(events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int] = ()) -> Collapsed:
    """Collapse the events of one table to a merge source.

    ``masked`` names the attnums that may be masked anywhere in the turn, so that the sources of
    several buckets have one schema.
    """
    events = events.combine_chunks()
    by_attnum = {column.attnum: column for column in columns}
    net = _net(events, columns, masked)
    taken = {by_attnum[attnum].name: source for attnum, source in net.sources.items()}
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
    return Collapsed(
        pa.table(data),
        inserted=int((net.live & ~net.present).sum()),
        updated=int((net.live & net.present).sum()),
        deleted=int((~net.live).sum()),
        lookups=int((net.origin >= 0).sum()),
    )


def _net(events: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int]) -> Net:
    if not any(column.key for column in columns):
        # Followed by its inserts alone: every row is one of its own.
        every = np.arange(events.num_rows, dtype=np.int64)
        return Net(every, every >= 0, every < 0, np.full(len(every), -1, dtype=np.int64))
    masks = {attnum: mask for attnum, mask in _masks(events, masked).items() if mask.any()}
    op = pc.index_in(events[OP], pa.array(OPS)).to_numpy().astype(np.int8)
    lsn, ordinal = (events[name].to_numpy() for name in (COMMIT_LSN, ORDINAL))
    return net_effect(key_numbers(events, columns), op, lsn, ordinal, masks)


def key_numbers(events: pa.Table, columns: Sequence[FeedColumn]) -> Ints:
    """Number the distinct keys from 0. A key value that does not fit its type is told apart by its text."""
    number = np.zeros(events.num_rows, dtype=np.int64)
    raw = events[RAW] if events[RAW].null_count < events.num_rows else None
    for column in columns:
        if not column.key:
            continue
        number = _combined(number, _codes(events[column.name]))
        if raw is not None and events[column.name].null_count:
            number = _combined(number, _codes(_raw_texts(raw, column.source)))
    return number


def _codes(values: pa.ChunkedArray) -> Ints:
    if pa.types.is_floating(values.type):
        values = pc.add(values, 0.0)  # -0 and 0 are one key to Spark
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    codes: Ints = values.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    return codes


def _combined(left: Ints, right: Ints) -> Ints:
    """Number the distinct pairs; renumbered densely, so that products never overflow."""
    if not len(left) or not left.any():
        return right
    numbers: Ints = np.unique(left * (int(right.max()) + 1) + right, return_inverse=True)[1].astype(np.int64)
    return numbers


def _masks(events: pa.Table, attnums: Sequence[int]) -> dict[int, Bools]:
    """Per attnum, which events lack its value."""
    lists = events[UNCHANGED]
    masks = {attnum: np.zeros(events.num_rows, dtype=bool) for attnum in attnums}
    if lists.null_count == events.num_rows:
        return masks
    rows = pc.list_parent_indices(lists).to_numpy()
    numbers = pc.list_flatten(lists).to_numpy()
    for attnum, mask in masks.items():
        mask[rows[numbers == attnum]] = True
    return masks


def _raw_texts(raw: pa.ChunkedArray, name: str) -> pa.Array:
    """The text of one column in a column of ``_pgcdc_raw`` maps; NULL where the map lacks it."""
    texts = pc.map_lookup(raw, pa.scalar(name), "first")
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _raw_taken(events: pa.Table, columns: Sequence[FeedColumn], net: Net) -> pa.Array:
    """The ``_pgcdc_raw`` of each row that is left: every entry comes from the event that its value comes from."""
    raw = events[RAW]
    sources = {column.source: net.sources[column.attnum] for column in columns if column.attnum in net.sources}
    if raw.null_count == len(raw) or not sources:
        return raw.take(pa.array(net.last))
    names = pc.unique(_map_keys(raw)).to_pylist()
    texts = {name: _raw_texts(raw, name).take(pa.array(sources.get(name, net.last))) for name in names}
    return raw_maps(texts, len(net.last), raw.type)


def _map_keys(raw: pa.ChunkedArray) -> pa.Array:
    # A NULL map may hide entries below it; dropping the NULLs drops those too.
    return pa.concat_arrays([chunk.drop_null().keys for chunk in raw.chunks] or [pa.array([], pa.string())])


def raw_maps(texts: Mapping[str, pa.Array], rows: int, kind: pa.DataType) -> pa.Array:
    """Maps of column name to text out of one sparse array per name; NULL where no name has a text."""
    found = [(name, np.flatnonzero(text.is_valid().to_numpy(zero_copy_only=False))) for name, text in texts.items()]
    owner = np.concatenate([at for _, at in found]) if found else np.zeros(0, dtype=np.int64)
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
    """The key of the row that masked values come from, where that is another key."""
    at = pa.array(np.maximum(origin, 0))
    names = [*(column.name for column in columns if column.key), RAW]
    if not events.num_rows:
        values = [events[name].combine_chunks() for name in names]
    else:
        values = [_one_array(events[name].take(at)) for name in names]
    return pa.StructArray.from_arrays(values, names=names, mask=pa.array(origin < 0))


def _one_array(values: pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks()
