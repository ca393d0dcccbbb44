"""LSN ranges as dynamic partitions: the register of partition keys, the keys that a run selects, and the record of
which project owns the keys."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import dagster as dg

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange, merged
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.errors import BadRange, RangeGap, WrongInstance

DELETE: Final = 'delete this partition in the UI, with "Delete partitions" of the asset `change_log`'


class RangeRegister:
    """The keys of the partition set ``<source>_lsn_ranges``. pgcdc keeps them in LSN order and without gaps. Of pgcdc's
    processes, only the holder of the lake's lock writes these keys.

    Users can add and delete keys in the UI. A key that is not a range, or whose range overlaps the range of a key that
    was added earlier, is ignored and reported.
    """

    def __init__(self, instance: dg.DagsterInstance, names: Names) -> None:
        self._instance = instance
        self.name = str(names.lsn_ranges.name)

    def known(self) -> list[LsnRange]:
        """The ranges in LSN order. If a user deleted keys, ranges are missing until :meth:`mend` is called."""
        return sorted(self._read()[0])

    def odd(self) -> list[str]:
        """The keys that are ignored, because they are not ranges or overlap a key that was added earlier."""
        return self._read()[1]

    def add(self, span: LsnRange) -> LsnRange:
        """Register a range that has ended, so that it gets no more changes. Returns the registered range that contains
        its end, and whose key therefore represents it.

        If the last key ends below the start of ``span``, because runs of another Dagster instance recorded ranges, the
        hole is also registered as a range, without a materialisation. If the last key ends above the start of ``span``,
        only the part of ``span`` above the last key is registered.
        """
        known = self.known()
        if span in known:
            return span
        # ``span`` is the newest range. So if there are keys above it, a user added them by hand during the run.
        ahead = [old for old in known if old.start >= span.end]
        self._delete(ahead)
        known = known[: len(known) - len(ahead)]
        if not known:
            return self._write([span])
        end = known[-1].end
        if span.start > end:
            return self._write([LsnRange(end, span.start), span])
        if span.end > end:
            return self._write([LsnRange(end, span.end)])
        return next((old for old in reversed(known) if old.start < span.end), known[0])

    def prune(self, log_start: Lsn, log_end: Lsn) -> list[LsnRange]:
        """Delete the keys of ranges that are not in the log, because retention deleted these ranges or because they
        belong to an earlier lake. Returns the ranges of the deleted keys."""
        all_ = (_range(key) for key in self._instance.get_dynamic_partitions(self.name))
        gone = [span for span in all_ if span is not None and (span.start < log_start or span.end > log_end)]
        self._delete(gone)
        return gone

    def mend(self) -> list[LsnRange]:
        """Register one key for each hole between ranges. A hole arises when a user deletes keys. Returns the holes.

        Dagster lists keys in the order in which they were added. So the keys above a hole are deleted and added again.
        The events that were recorded for these keys stay.
        """
        registered, _ = self._read()
        ordered = sorted(registered)
        holes = [LsnRange(left.end, right.start) for left, right in pairwise(ordered) if left.end < right.start]
        wanted = sorted([*ordered, *holes])
        same = next((n for n, (is_, be) in enumerate(zip(registered, wanted, strict=False)) if is_ != be), len(wanted))
        if same < len(wanted):
            self._delete(registered[same:])
            self._write(wanted[same:])
        return holes

    def _read(self) -> tuple[list[LsnRange], list[str]]:
        """The ranges in the order in which they were added, and the ignored keys (see :attr:`odd`)."""
        ranges: list[LsnRange] = []
        ordered: list[LsnRange] = []
        odd = []
        for key in self._instance.get_dynamic_partitions(self.name):
            span = _range(key)
            place = 0 if span is None else bisect(ordered, span)
            if span is None or any(other.start < span.end and span.start < other.end
                                   for other in ordered[max(0, place - 1) : place + 1]):  # fmt: skip
                odd.append(key)
            else:
                ordered.insert(place, span)
                ranges.append(span)
        return ranges, odd

    def _delete(self, spans: Sequence[LsnRange]) -> None:
        for span in spans:
            self._instance.delete_dynamic_partition(self.name, span.key)

    def _write(self, spans: Sequence[LsnRange]) -> LsnRange:
        passed(FaultPoint.RANGE_REGISTERING)
        self._instance.add_dynamic_partitions(self.name, [span.key for span in spans])
        passed(FaultPoint.RANGE_REGISTERED)
        return spans[-1]


class Selection:
    """The partition keys of a run, as one range.

    Raises BadRange for an empty list, or if no key is a range of the log. Raises RangeGap if a registered range between
    the keys is left out, or if a key is not registered. Dagster does not check this. If a user gives the first and the
    last key in the wrong order, Dagster makes an empty list, and the run would succeed without doing anything.
    """

    def __init__(self, keys: Sequence[str], register: RangeRegister) -> None:
        odd, known, self._of = set(register.odd()), register.known(), register.name
        self.odd = [key for key in keys if key in odd]
        """Selected keys that are ignored. A user added them, and "all partitions" in the UI selects them too."""
        self.ranges = sorted(LsnRange.from_key(key) for key in keys if key not in odd)
        if keys and not self.ranges:
            raise BadRange(f"partition {keys[0]!r} of {register.name} is not a range of the change log", do=DELETE)
        for span in self.ranges:
            if span not in known:
                raise RangeGap(
                    f"{register.name} has no partition {span.key}", do="choose a partition that the UI lists"
                )
        gaps = [LsnRange(left.end, right.start) for left, right in pairwise(self.ranges) if left.end < right.start]
        self.holes = [gap for gap in gaps if not any(gap.start <= old.start < gap.end for old in known)]
        """Holes between the selected ranges. They are processed too, although they have no keys to select."""
        self.span = merged([*self.ranges, *self.holes])

    @property
    def told(self) -> list[str]:
        """Warnings about the selection, as text."""
        return [
            *(
                f"partition {key!r} of {self._of} is not a range of the change log, so pgcdc ignores it; {DELETE}"
                for key in self.odd
            ),
            *(
                f"Dagster no longer has the partitions of the LSN range {hole}, which lies between the selected "
                "ranges: the run processes this range too"
                for hole in self.holes
            ),
        ]


def _range(key: str) -> LsnRange | None:
    """The range that a key stands for. None if the key is not written exactly as pgcdc writes keys."""
    try:
        span = LsnRange.from_key(key)
    except BadRange:
        return None
    return span if span.key == key and span.start < span.end else None


def register_snapshot(instance: dg.DagsterInstance, names: Names, consistent_point: Lsn) -> str:
    """Register and return the partition key of a snapshot copy: the range from 0/0 to the copy's consistent point."""
    key = LsnRange(ZERO, consistent_point).key
    instance.add_dynamic_partitions(str(names.snapshot_ranges.name), [key])
    return key


def claim(instance: dg.DagsterInstance, names: Names, identity: Identity) -> None:
    """Record in Dagster that the source's names belong to this project. Raises WrongInstance if they belong to another
    project.

    If another project has the names but no keys of ranges or copies, this project gets the names, because there is
    nothing that it could damage.
    """
    own, owner = _named(identity), _owner(instance, names)
    guarded = (str(names.lsn_ranges.name), str(names.snapshot_ranges.name))
    if owner not in (None, own) and not any(map(instance.get_dynamic_partitions, guarded)):
        instance.delete_dynamic_partition(names.owner, owner)
        owner = None
    if owner is None:
        instance.add_dynamic_partitions(names.owner, [own])
        # Another project may have added its key at the same time. The key that was added first decides.
        owner = _owner(instance, names)
    if owner != own:
        instance.delete_dynamic_partition(names.owner, own)
        raise WrongInstance(
            f"uses the name {names.source} for another project, which reads {owner}; this project reads {own}",
            thing=f"Dagster instance {instance.root_directory}",
        )


def release(instance: dg.DagsterInstance, names: Names, identity: Identity) -> None:
    """Delete the record of :func:`claim`, because the project was torn down. Another project's record stays."""
    instance.delete_dynamic_partition(names.owner, _named(identity))


def _owner(instance: dg.DagsterInstance, names: Names) -> str | None:
    return next(iter(instance.get_dynamic_partitions(names.owner)), None)


def _named(identity: Identity) -> str:
    """The text that identifies a project: slot and system identifier. A slot's name is unique in a system. So the text
    stays the same if the project's database is renamed, or its log is created again."""
    return f"slot {identity.slot} of system {identity.system_identifier}"
