"""One table's part of an apply: what must be done to the table's mirror, and the commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa
from deltalake import Schema as DeltaSchema
from pyroaring import BitMap64

from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, Mode, commit_change, commit_files, unfit
from pgcdc_assets.delta.datafile import FileReport, odd_columns, read_footer
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.delta.mapping import stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.schema import FeedFile, FeedPart
from pgcdc_assets.mirror.delta.applytask import Collapsing, PendingChanges
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors, structured
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns, needs_column_mapping, refusal
from pgcdc_assets.mirror.delta.rowlookup import Effect
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.store import storage
from pgcdc_assets.structure.rowshapes import added


class Counts(NamedTuple):
    """How many rows of the mirror an apply changes."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    @property
    def metrics(self) -> dict[str, int]:
        """The counts, under the names that the Delta table's history uses."""
        return {
            "numTargetRowsInserted": self.inserted,
            "numTargetRowsUpdated": self.updated,
            "numTargetRowsDeleted": self.deleted,
        }


@dataclass(frozen=True)
class TablePlan:
    """One table's part of an apply. ``pending``: the changes that the mirror has not applied yet. ``refused``: why they
    cannot be written to the mirror; None if they can. ``new``: the columns that the changes add to the table."""

    pending: PendingChanges
    mirror: Mirror
    refused: str | None
    new: tuple[Column, ...] = ()

    @classmethod
    def of(
        cls, mirrors: Mirrors, part: FeedPart, upto: Lsn, known: Mapping[TableName, Table] | None = None
    ) -> TablePlan | None:
        """The plan for a part. None if the mirror has already applied the whole part, or if the part has no changes."""
        mirror = mirrors.open(part.table.name)
        stands = mirror.replay_lsn
        if stands is None:
            raise LakeError(
                "contains no copy of the table, so changes cannot be applied", thing=f"mirror {part.table.name}"
            )
        start = max(part.span.start, stands)
        pending = PendingChanges.of(mirrors.layout, part, LsnRange(start, max(start, min(part.span.end, upto))))
        before = (known or {}).get(part.table.name)
        if pending is None:
            return None
        new = added(before or part.table, part.table)
        return cls(pending, mirror, _unmirrorable(part.table, before, mirror.existing), new)

    @property
    def table(self) -> Table:
        return self.pending.table

    def begin(self) -> Applied | tuple[TablePlan, list[Collapsing]]:
        """Do the part that needs no Spark job. Sets the table aside if it is ``refused``. Otherwise adds new columns to
        the mirror, and links the feed's files into the mirror if they can become files of it. If not, returns the plan,
        and the units for the Spark job."""
        if self.refused is not None:
            return self.set_aside(self.refused)
        work = self.widened()
        return work.link() if work.linkable else (work, work.units())

    @property
    def linkable(self) -> bool:
        """Whether the feed's files can become files of the mirror: they have only inserts, no row outside the pending
        span, and exactly the mirror's columns under the same names. Names differ if the mirror uses column mapping,
        which stays on after the column that required it was dropped. Columns differ if another writer has added some to
        the mirror."""
        if not (self.pending.part.insert_only and self.pending.whole) or self.mirror.mapped:
            return False
        files = (read_footer(path).schema.to_arrow_schema() for path in self.pending.paths)
        return not any(odd_columns(file, self.mirror.existing.schema) for file in files)

    @property
    def _position(self) -> dict[str, int]:
        app_id = self.mirror.generation_app_id
        assert app_id is not None
        return {app_id: self.pending.span.end}

    def widened(self) -> TablePlan:
        """If the changes have new columns, add them to the mirror, in a separate commit. This commit also records their
        attnums, so that a run after a crash knows which columns of the source they are. Returns the plan with the new
        version of the mirror."""
        delta = self.mirror.existing
        names = {field.name: field.name for field in delta.schema.fields}
        missing = pa.schema([field for field in mirror_columns(self.table) if field.name not in names])
        if not missing.names and self._recorded:
            return self
        held = {name.lower(): name for name in names}
        if taken := [name for name in missing.names if name.lower() in held]:
            other = held[taken[0].lower()]
            raise LakeError(f"has a column {other!r} that another writer added, so {taken[0]!r} cannot be added",
                            thing=f"mirror {self.mirror.name}")  # fmt: skip
        wanted = pa.schema([*delta.columns, *missing])
        mapped = self.mirror.mapped or needs_column_mapping(missing.names)
        columns = stated(delta.metadata).followed_by(wanted, names, mapped=mapped)
        commit_columns(delta, columns, structured(self.table, self.mirror.snapshot_lsn, self.pending.span.end))
        passed(FaultPoint.MIRROR_WIDENED)
        return replace(self, mirror=self.mirror.again())

    @property
    def _recorded(self) -> bool:
        """Whether the mirror records the attnums of the new columns. It does if an earlier turn added the columns and
        failed. It does not if another writer added columns with these names."""
        if not self.new:
            return True
        told = self.mirror.followed
        held = {column.attnum for column in told.columns} if told is not None else set()
        return held >= {column.attnum for column in self.new} and self.mirror.rows_at <= self.pending.span.end

    def link(self) -> Applied:
        started = time.monotonic()
        held = zip(self.pending.paths, self.pending.files, strict=True)
        reports = [_linked(path, self.mirror.path, file) for path, file in held]
        passed(FaultPoint.LINK_COMMITTING)
        version = commit_files(self.mirror.existing, reports, "append", self._position)
        passed(FaultPoint.LINK_COMMITTED)
        counts = Counts(sum(report.rows for report in reports))
        return self._applied(version, counts, time.monotonic() - started)

    def units(self) -> list[Collapsing]:
        if self.pending.part.insert_only:
            return self.pending.inserts(self.mirror.target(self.table))
        return self.pending.units(
            self.mirror.target(self.table, () if self.pending.emptied else self.mirror.existing.files)
        )

    @property
    def _alone(self) -> bool:
        """Whether the units need no files of the mirror, because the whole table was truncated, or there are only
        inserts."""
        return self.pending.emptied or self.pending.part.insert_only

    def commit(self, effects: Sequence[Effect], seconds: float) -> Applied:
        """Commit the effects of the units. ``seconds``: how long their work took."""
        started = time.monotonic()
        for effect in effects:
            if effect.mismatch is not None:
                lsn = effect.mismatch.lsn
                return self.set_aside(effect.mismatch.what, lsn if isinstance(lsn, Lsn) else None)
        counts = total(effects)
        version = self._overwritten(effects) if self._alone else self._merged(effects, counts)
        return self._applied(version, counts, seconds + time.monotonic() - started)

    def _overwritten(self, effects: Sequence[Effect]) -> int:
        reports = [effect.added for effect in effects if effect.added is not None]
        mode: Mode = "overwrite" if self.pending.emptied else "append"
        passed(FaultPoint.OVERWRITE_COMMITTING)
        version = commit_files(self.mirror.existing, reports, mode, self._position)
        passed(FaultPoint.OVERWRITE_COMMITTED)
        return version

    def _merged(self, effects: Sequence[Effect], counts: Counts) -> int:
        if counts == Counts():
            return self.mirror.version
        passed(FaultPoint.MERGE_COMMITTING)
        version = merged(self.mirror.existing, effects, self._position)
        passed(FaultPoint.MERGE_COMMITTED)
        return version

    def _applied(self, version: int, counts: Counts, seconds: float) -> Applied:
        return Applied(self.table, version, self.pending.span.end, *counts, seconds)

    def set_aside(self, reason: str, lsn: Lsn | None = None) -> Applied:
        start = self.pending.span.start
        return Applied(self.table, self.mirror.version, start, set_aside=(start if lsn is None else lsn, reason))


def merged(mirror: DeltaVersion, effects: Sequence[Effect], position: Mapping[str, int]) -> int:
    """Commit effects that were computed on this version of a mirror. Returns the new version."""
    gone: dict[str, BitMap64] = {}
    for effect in effects:
        for path, positions in effect.gone.items():
            gone[path] = gone.get(path, BitMap64()) | positions
    change = FileChange([effect.added for effect in effects if effect.added is not None], gone)
    return commit_change(mirror, change, position, total(effects).metrics)


def total(effects: Sequence[Effect]) -> Counts:
    return Counts(
        sum(effect.inserted for effect in effects),
        sum(effect.updated for effect in effects),
        sum(effect.deleted for effect in effects),
    )


def _linked(path: Location, folder: Location, file: FeedFile) -> FileReport:
    """Make the feed's file a file of the mirror's folder: by a hard link if the store has links, otherwise by a
    copy."""
    target = folder / f"part-{uuid.uuid4().hex}.parquet"
    storage.copy(path, target)
    return replace(file.report, path=target.name)


def _unmirrorable(table: Table, known: Table | None, delta: DeltaVersion) -> str | None:
    """Why the changes or the new columns cannot be written to the mirror, as text; None if they can."""
    if (refused := refusal(table)) is not None:
        return refused
    reason = unfit(delta) or _altered(table, known, delta)
    return None if reason is None else f"its mirror {reason}"


def _altered(table: Table, known: Table | None, delta: DeltaVersion) -> str | None:
    """How another writer has changed columns of the mirror that pgcdc writes, as text; None if it has not."""
    have = {field.name: str(field.type) for field in delta.schema.fields}
    lacking = [] if known is None else [name for name in mirror_columns(known).names if name not in have]
    if lacking:
        return f"no longer has column {lacking[0]!r}: it was dropped or renamed in the mirror"
    ours = DeltaSchema.from_arrow(mirror_columns(table)).fields
    other = [field for field in ours if have.get(field.name, str(field.type)) != str(field.type)]
    return f"has column {other[0].name!r} with another type: it was changed in the mirror" if other else None
