"""Computes the net effect of events (rows of a change feed) on each key: which event decides whether the key's row
exists, and which events hold the row's values. Works on arrays.

Events of one table are ordered by ``(commit_lsn, ordinal)``. An update that changes the key is two events: the old half
removes the row from its old key (ordinal 2n), and the new half adds the row under its new key (2n + 1). A row's events
form a chain, which a change of the key continues under the new key, and which a delete ends.

An unchanged TOAST value is not sent with an update: it is *masked*. It is taken from the nearest earlier event of the
same chain that has it. If no event has it, the chain began with an update. The value is then in the target (the
mirror), in the row with the key where the chain began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.feed.schema import DELETE, INSERT, OPS, PREIMAGE

_INSERT, _PREIMAGE, _DELETE = OPS.index(INSERT), OPS.index(PREIMAGE), OPS.index(DELETE)


@dataclass(frozen=True)
class KeyOutcomes:
    """The net effect, with one entry for each key that remains. Events are given by their row numbers.

    ``last``: the key's last event, which decides. ``live``: whether the key exists after this event. ``present``:
    whether the key existed before its first event. ``sources[attnum]``: the event that has the column's value. Where
    ``masked[attnum]`` is true, no event has the value: it is in the target, under the key of the event ``origin``. -1
    means the entry's own key."""

    last: Ints
    live: Bools
    present: Bools
    origin: Ints
    sources: dict[int, Ints] = field(default_factory=dict)
    masked: dict[int, Bools] = field(default_factory=dict)


def key_outcomes(
    key: Ints, op: NDArray[np.int8], commit_lsn: Ints, ordinal: Ints, masks: Mapping[int, Bools], *,
    keep_transient: bool = False, divided: Bools | None = None,
) -> KeyOutcomes:  # fmt: skip
    """Compute the net effect of the events per key.

    ``key``: the number of each event's key, from 0. ``op``: each event's operation, as its index in ``OPS``. The events
    must have no truncates. ``masks``: by attnum, which events lack the value. Keys that the events insert and delete
    again are left out, except with ``keep_transient``. ``divided`` is given if the events are only those of some keys,
    so that one half of a key change may be missing. It marks the events that are new halves. They must have all values.
    Raises MergeMismatch if events contradict each other: an insert of a key that exists, or an update or delete of a
    key that was deleted.
    """
    order = np.lexsort((ordinal, commit_lsn))
    by_key = order[np.argsort(key[order], kind="stable")]
    first = np.ones(len(key), dtype=bool)
    first[1:] = key[by_key[1:]] != key[by_key[:-1]]
    before = np.full(len(key), -1, dtype=np.int64)
    before[by_key[1:]] = np.where(first[1:], -1, by_key[:-1])
    alone = np.zeros(len(op), dtype=bool) if divided is None else divided
    old_half = _old_halves(op, commit_lsn, ordinal, order) if divided is None else np.full(len(op), -1, dtype=np.int64)
    live = (op != _DELETE) & (op != _PREIMAGE)
    arrives = (op == _INSERT) | alone | (old_half >= 0)
    _refuse_contradictions(before, live, arrives, commit_lsn)
    last = by_key[np.append(first, True)[1:]]
    present = ~arrives[by_key[first]]
    kept = live[last] | present | keep_transient
    last, present = last[kept], present[kept]
    net = KeyOutcomes(last, live[last], present, np.full(len(last), -1, dtype=np.int64))
    return _with_masks(net, key, before, old_half, (op == _INSERT) | alone, masks) if masks else net


def _old_halves(op: NDArray[np.int8], commit_lsn: Ints, ordinal: Ints, order: Ints) -> Ints:
    """For each event that is the new half of a key change, the row number of the old half, which comes directly before
    it in ``order``. For all other events, -1."""
    old_half = np.full(len(op), -1, dtype=np.int64)
    places = np.flatnonzero(op[order] == _PREIMAGE)
    if not len(places):
        return old_half
    olds = order[places]
    news = order[np.minimum(places + 1, len(order) - 1)]
    paired = (commit_lsn[news] == commit_lsn[olds]) & (ordinal[news] == ordinal[olds] + 1)
    if not paired.all():
        raise MergeMismatch(
            "the feed has the old row of an update, but not the new row", lsn=Lsn(int(commit_lsn[olds[~paired][0]]))
        )
    old_half[news] = olds
    return old_half


def _refuse_contradictions(before: Ints, live: Bools, arrives: Bools, commit_lsn: Ints) -> None:
    """Raise MergeMismatch if an event inserts a key that exists at that time, or changes a key that does not.
    ``before``: for each event, the previous event of the same key, or -1."""
    bad = np.flatnonzero((before >= 0) & (live[before] == arrives))
    if len(bad):
        at = bad[np.argmin(commit_lsn[bad])]
        what = "an insert of a key that exists" if arrives[at] else "a change of a row that was deleted"
        raise MergeMismatch(f"the changes in the feed contradict each other: {what}", lsn=Lsn(int(commit_lsn[at])))


def _with_masks(
    net: KeyOutcomes, key: Ints, before: Ints, old_half: Ints, begins: Bools, masks: Mapping[int, Bools]
) -> KeyOutcomes:
    """For each masked value (see the module's docstring), find the earlier event of the same row that has it, by
    pointer doubling along each row's chain of events. The events for which ``begins`` is true start a chain, and have
    all values."""
    previous = np.where(old_half >= 0, before[old_half], before)
    previous = np.where(begins, -1, previous)
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
    return KeyOutcomes(net.last, net.live, net.present, np.where(elsewhere, origin, -1), sources, masked)


def connected(key: Ints, op: NDArray[np.int8], commit_lsn: Ints, ordinal: Ints, touched: Bools) -> Bools:
    """For each key, whether it is the key of a ``touched`` event, or a key to which a row moved from such a key, maybe
    in several steps."""
    order = np.lexsort((ordinal, commit_lsn))
    old_half = _old_halves(op, commit_lsn, ordinal, order)
    news = np.flatnonzero(old_half >= 0)
    found = np.zeros(int(key.max(initial=-1)) + 1, dtype=bool)
    found[key[touched]] = True
    while True:
        reached = found.copy()
        reached[key[news[found[key[old_half[news]]]]]] = True
        if np.array_equal(reached, found):
            return found
        found = reached


def moved(key: Ints, op: NDArray[np.int8], commit_lsn: Ints, ordinal: Ints) -> Bools:
    """For each key, whether a row moved to it: whether an update changed a row's key to this key."""
    old_half = _old_halves(op, commit_lsn, ordinal, np.lexsort((ordinal, commit_lsn)))
    found = np.zeros(int(key.max(initial=-1)) + 1, dtype=bool)
    found[key[old_half >= 0]] = True
    return found


def _ends(jump: Ints) -> Ints:
    """For each element, the end of its chain: ``jump`` is followed until an element points to itself. There are no
    cycles."""
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            return jump
        jump = further
