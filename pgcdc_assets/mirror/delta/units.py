"""The changes of one span of a table, and how the work of collapsing them is divided into units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.feed.schema import COMMIT_LSN, LEAF, OP, TRUNCATE, FeedFile, FeedPart
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.mirror.delta.task import Collapsing, read_events


@dataclass(frozen=True)
class PendingChanges:
    """The files of a feed that hold changes in ``span``."""

    layout: Layout
    part: FeedPart
    """The feed's part, reduced to these files."""
    span: LsnRange

    @classmethod
    def of(cls, layout: Layout, part: FeedPart, span: LsnRange) -> PendingChanges | None:
        """None if nothing of the part lies in the span."""
        held = tuple(f for f in part.files if f.facts.commit_min < span.end and f.facts.commit_max >= span.start)
        return cls(layout, replace(part, files=held), span) if held and span.start < span.end else None

    @property
    def table(self) -> Table:
        return self.part.table

    @property
    def files(self) -> tuple[FeedFile, ...]:
        return self.part.files

    @property
    def paths(self) -> tuple[Location, ...]:
        return tuple(self.layout.changes(self.table.name) / file.name for file in self.files)

    @property
    def whole(self) -> bool:
        """Whether the files hold nothing outside the span."""
        bounds = [bound for file in self.files for bound in (file.facts.commit_min, file.facts.commit_max)]
        return all(self.span.holds_commit(bound) for bound in bounds)

    @cached_property
    def _truncated(self) -> tuple[str | None, ...]:
        """The leaves that are truncated in the span; None stands for the whole table."""
        if not self.part.truncates:
            return ()
        names = [OP, COMMIT_LSN, *([LEAF] if self.table.partitioned else [])]
        events = read_events(self.table, self.paths, self.span, names)
        events = events.filter(pc.equal(events[OP], TRUNCATE))
        if not self.table.partitioned:
            return (None,) if events.num_rows else ()
        leaves: list[str | None] = pc.unique(events[LEAF]).to_pylist()
        return tuple(leaves)

    @property
    def emptied(self) -> bool:
        """Whether the whole table was truncated. The remaining changes are then the complete table."""
        return None in self._truncated

    @property
    def leaves(self) -> tuple[str, ...]:
        """The truncated leaves, if the whole table was not truncated."""
        return () if self.emptied else tuple(leaf for leaf in self._truncated if leaf is not None)

    def units(self, target: MergeTarget, *, together: bool = False) -> list[Collapsing]:
        """Divide the work by bucket of keys, unless a bucket needs to know what happened to a row under another key.

        ``together``: rows are followed from key to key, so one unit needs both halves of every key change.
        """
        size = sum(file.size for file in self.files)
        unit = Collapsing(
            self.table, self.paths, self.span, target, masked=self.part.masked, leaves=self.leaves, bytes=size
        )
        if self.leaves:
            return [unit]
        buckets = {file.facts.buckets for file in self.files if file.facts.bucket is not None}
        if len(buckets) != 1 or any(_of_any_key(file) for file in self.files):
            return [unit]
        if self.part.key_changes and (together or not self._halves_stand_alone):
            return [unit]
        found = (self._bucket(unit, number) for number in range(buckets.pop()))
        return [unit for unit in found if unit.files or unit.arrivals]

    @property
    def _halves_stand_alone(self) -> bool:
        """Whether the new halves of key changes are in separate files, and lack no value that only the row of the old
        key has."""
        arrivals = [file.facts for file in self.files if file.facts.arrivals]
        return sum(facts.rows for facts in arrivals) == self.part.key_changes and not any(f.masked for f in arrivals)

    def _bucket(self, unit: Collapsing, number: int) -> Collapsing:
        chosen = [(file, path) for file, path in zip(self.files, self.paths, strict=True)
                  if file.facts.bucket in (None, number)]  # fmt: skip
        size = sum(file.size for file, _ in chosen)
        if not self.part.key_changes:
            return replace(unit, files=tuple(path for _, path in chosen), bytes=size)
        plain = tuple(path for file, path in chosen if not file.facts.arrivals)
        arrivals = tuple(path for file, path in chosen if file.facts.arrivals)
        return replace(unit, files=plain, arrivals=arrivals, divided=True, bytes=size)


def _of_any_key(file: FeedFile) -> bool:
    """Whether the file has rows of any key. Truncates do not count, because they concern all keys and every bucket
    reads them."""
    return file.facts.bucket is None and bool(file.facts.counts.keys() - {TRUNCATE})
