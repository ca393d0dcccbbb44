"""LSN ranges as dynamic partitions, and the one register that writes them."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.ranges import LsnRange, merged

LSN_RANGES = dg.DynamicPartitionsDefinition(name="lsn_ranges")
SNAPSHOT_RANGES = dg.DynamicPartitionsDefinition(name="snapshot_ranges")


def selected_span(keys: Sequence[str]) -> LsnRange:
    """The one range that a run's partition keys make up.

    Dagster checks neither: a selection against the keys' order gives an empty list and would succeed.
    BadRange for an empty list, RangeGap for one with holes.
    """
    return merged(LsnRange.from_key(key) for key in keys)


class RangeRegister:
    """The keys of ``lsn_ranges``: in LSN order and without gaps. Only the holder of the lake's lock writes."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def known(self) -> list[LsnRange]:
        return [LsnRange.from_key(key) for key in self._instance.get_dynamic_partitions(str(LSN_RANGES.name))]

    def add(self, span: LsnRange) -> LsnRange:
        """Register a closed range; returns the range whose key stands for it.

        Where the last key ends below its start (ranges were closed on another instance), the hole becomes
        a range of its own, not yet materialised; where it ends above, only the rest is new.
        """
        known = self.known()
        if not known:
            return self._write([span])
        end = known[-1].end
        if span.start > end:
            return self._write([LsnRange(end, span.start), span])
        if span.end > end:
            return self._write([LsnRange(end, span.end)])
        return next(old for old in reversed(known) if old.start < span.end or old == span)

    def prune(self, log_start: Lsn, log_end: Lsn) -> list[LsnRange]:
        """Drop the keys that the log does not hold: gone by retention, or of another lake's life."""
        gone = [span for span in self.known() if span.start < log_start or span.end > log_end]
        for span in gone:
            self._instance.delete_dynamic_partition(str(LSN_RANGES.name), span.key)
        return gone

    def _write(self, spans: Sequence[LsnRange]) -> LsnRange:
        passed(FaultPoint.RANGE_REGISTERING)
        self._instance.add_dynamic_partitions(str(LSN_RANGES.name), [span.key for span in spans])
        passed(FaultPoint.RANGE_REGISTERED)
        return spans[-1]


def register_snapshot(instance: dg.DagsterInstance, consistent_point: Lsn) -> str:
    """The key of a copy: everything up to its consistent point."""
    key = LsnRange(ZERO, consistent_point).key
    instance.add_dynamic_partitions(str(SNAPSHOT_RANGES.name), [key])
    return key
