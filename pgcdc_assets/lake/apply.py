"""The apply: what the feeds hold of a turn, into the mirrors, one atomic commit per table.

Inserts alone are appended: the feed's own files become files of the mirror, in a commit of milliseconds.
After a truncate of the whole table what is left is complete by itself and overwrites the mirror. All
else is collapsed in Spark's tasks and merged by Spark. Each commit carries the position with the data.

A MERGE fails before its commit where the mirror lacks a row that changed or holds one that was
inserted, and a collapse where the changes contradict each other. Then the mirror stays as it was, and
the table is to be set aside: going on would hide that it differs from the source. Counts that differ
after a commit can no longer be undone; the table is set aside as well, and a new copy brings it back.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LakeError, MergeMismatch
from pgcdc_assets.lake import files
from pgcdc_assets.lake.collapse import collapse
from pgcdc_assets.lake.collapsing import Collapsing, Effect, collapse_units
from pgcdc_assets.lake.feed import FeedFile, FeedPart, feed_columns, feed_schema, verbatim
from pgcdc_assets.lake.merge import ADDED, REMOVED, SOURCE, KeyedMerge, MergeCounts, MultisetMerge, execute
from pgcdc_assets.lake.mirrors import Mirror, MirrorSchema, needs_column_mapping, refusal, sql_name, sql_path, sql_type
from pgcdc_assets.lake.multiset import net_rows
from pgcdc_assets.lake.pending import Pending
from pgcdc_assets.lake.session import table_session
from pgcdc_assets.lake.tasks import run_tasks

MERGE_THREADS = 2
"""More gain nothing: a MERGE is bound by CPU, and its jobs already use every core."""


@dataclass(frozen=True)
class Applied:
    """What an apply did to one table; counts are rows of the mirror."""

    table: Table
    """As in the feed's part: with the columns that appeared."""
    version: int
    replay_lsn: Lsn
    """Where the mirror stands now: the end of what was applied, or where it stood if set aside."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    seconds: float = 0.0
    set_aside: tuple[Lsn, str] | None = None
    """The mirror and the changes disagree: from which LSN on, and how."""


def apply_tables(
    spark: SparkSession, layout: Layout, identity: Identity, parts: Sequence[FeedPart], upto: Lsn
) -> list[Applied]:
    """Bring the mirrors of ``parts`` to ``upto`` (a transaction boundary), each from where it stands.

    Tables without changes are left out of the result. A table that fails for itself comes back with
    ``set_aside``; any other error ends the apply, and what was committed stands and is skipped next time.
    """
    works = [work for part in parts if (work := _Work.of(layout, identity, part, upto)) is not None]
    done = [work.set_aside(work.refused) for work in works if work.refused is not None]
    ready = [work for work in works if work.refused is None]
    for work in ready:
        work.widen(spark)
    done += [work.link() for work in ready if work.linkable]
    rest = [work for work in ready if not work.linkable]
    if rest:
        with scratch(layout) as folder, ThreadPoolExecutor(MERGE_THREADS, thread_name_prefix="apply") as pool:
            effects = collapsed(spark, [work.units(folder) for work in rest])
            done += pool.map(lambda work, found: work.commit(spark, folder, found), rest, effects)
    return done


@contextmanager
def scratch(layout: Layout) -> Iterator[Path]:
    """A folder for merge sources, gone afterwards; so are those that a killed run left behind."""
    folder = layout.merge / uuid.uuid4().hex
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(layout.merge, ignore_errors=True)


@dataclass(frozen=True)
class _Work:
    """One table's part of an apply."""

    pending: Pending
    mirror: Mirror
    refused: str | None

    @classmethod
    def of(cls, layout: Layout, identity: Identity, part: FeedPart, upto: Lsn) -> _Work | None:
        """None where the mirror has passed all of the part already, or the part holds nothing."""
        mirror = Mirror(layout, identity, part.table.name)
        stands = mirror.replay_lsn
        if stands is None:
            raise LakeError("has no copy that changes could be applied to", thing=f"mirror {part.table.name}")
        start = max(part.span.start, stands)
        pending = Pending.of(layout, part, LsnRange(start, max(start, min(part.span.end, upto))))
        return cls(pending, mirror, _unmirrorable(part.table, mirror)) if pending else None

    @property
    def table(self) -> Table:
        return self.pending.table

    @property
    def linkable(self) -> bool:
        """Whether the feed's files can be the mirror's: inserts alone, all of them wanted, names alike."""
        alike = verbatim(feed_columns(self.table)) and not MirrorSchema.of(self.table).mapped
        return alike and self.pending.part.insert_only and self.pending.whole

    @property
    def _position(self) -> dict[str, int]:
        app_id = self.mirror.generation_app_id
        assert app_id is not None
        return {app_id: self.pending.span.end}

    def widen(self, spark: SparkSession) -> None:
        """Give the mirror the columns that appeared. Done before the data: alone it changes no row."""
        columns = [f"{sql_name(name)} {sql_type(kind)}" for name, kind in _missing(self.table, self.mirror)]
        if not columns:
            return
        alter = f"ALTER TABLE {sql_path(self.mirror.path)}"
        if any("TIMESTAMP_NTZ" in column for column in columns):
            # A new table gets this feature with its columns; one that is altered has to be told.
            spark.sql(f"{alter} SET TBLPROPERTIES ('delta.feature.timestampNtz' = 'supported')").collect()
        spark.sql(f"{alter} ADD COLUMNS ({', '.join(columns)})").collect()
        passed(FaultPoint.MIRROR_WIDENED)
        del self.mirror.delta

    def link(self) -> Applied:
        started = time.monotonic()
        held = zip(self.pending.paths, self.pending.files, strict=True)
        reports = [_linked(path, self.mirror.path, file) for path, file in held]
        passed(FaultPoint.LINK_COMMITTING)
        version = files.commit(self.mirror.path, reports, "append", self._position)
        passed(FaultPoint.LINK_COMMITTED)
        counts = MergeCounts(sum(report.rows for report in reports), 0, 0)
        return self._applied(version, counts, time.monotonic() - started)

    def units(self, folder: Path) -> list[Collapsing]:
        direct = self.pending.emptied or self.pending.part.insert_only
        return self.pending.units(folder, self.mirror if direct else None)

    def commit(self, spark: SparkSession, folder: Path, effects: Sequence[Effect]) -> Applied:
        """Commit the net effect. Runs beside other tables' commits."""
        started = time.monotonic()
        try:
            for effect in effects:
                if effect.mismatch is not None:
                    raise effect.mismatch
            version, counts = self._committed(spark, folder, effects)
        except MergeMismatch as error:
            return self.set_aside(error.what, error.lsn if isinstance(error.lsn, Lsn) else None)
        return self._applied(version, counts, time.monotonic() - started)

    def _committed(self, spark: SparkSession, folder: Path, effects: Sequence[Effect]) -> tuple[int, MergeCounts]:
        total, pending = _total(effects), self.pending
        if pending.emptied or pending.part.insert_only:
            reports = [effect.upserts for effect in effects if effect.upserts is not None]
            mode: files.Mode = "overwrite" if pending.emptied else "append"
            passed(FaultPoint.OVERWRITE_COMMITTING)
            version = files.commit(self.mirror.path, reports, mode, self._position)
            passed(FaultPoint.OVERWRITE_COMMITTED)
            return version, MergeCounts(sum(report.rows for report in reports), 0, 0)
        if total == MergeCounts(0, 0, 0) and not pending.leaves:
            return self.mirror.version, total
        ((app_id, position),) = self._position.items()
        session = table_session(spark, app_id, position)
        passed(FaultPoint.MERGE_COMMITTING)
        counts = merge(session, pending.part, self.mirror, folder, effects, pending.leaves)
        passed(FaultPoint.MERGE_COMMITTED)
        if counts is None:
            raise LakeError("was moved by another writer", thing=f"mirror {self.table.name}", lsn=pending.span.start)
        if not pending.leaves and counts != total:
            raise MergeMismatch(f"a commit changed {counts} where {total} was to change", lsn=pending.span.end)
        return Mirror(pending.layout, self.mirror.identity, self.table.name).version, counts

    def _applied(self, version: int, counts: MergeCounts, seconds: float) -> Applied:
        numbers = (counts.inserted, counts.updated, counts.deleted)
        return Applied(self.table, version, self.pending.span.end, *numbers, seconds)

    def set_aside(self, reason: str, lsn: Lsn | None = None) -> Applied:
        start = self.pending.span.start
        return Applied(self.table, self.mirror.version, start, set_aside=(start if lsn is None else lsn, reason))


def merge(
    session: SparkSession, part: FeedPart, mirror: Mirror, folder: Path, effects: Sequence[Effect],
    leaves: tuple[str, ...] = (),
) -> MergeCounts | None:  # fmt: skip
    """Merge collapsed files of a part into its mirror; None where Delta skipped it as done."""
    table, columns = part.table, feed_columns(part.table)
    upserts = [str(folder / effect.upserts.path) for effect in effects if effect.upserts is not None]
    nothing = feed_schema(table).empty_table()
    if table.multiset:
        removed = [str(folder / effect.removed.path) for effect in effects if effect.removed is not None]
        empty = net_rows(nothing, columns)
        _view(session, ADDED, upserts, empty.added.schema)
        _view(session, REMOVED, removed, empty.removed.schema)
        copies = MultisetMerge(str(mirror.path), columns, mirror.version, table.partitioned, leaves)
        return execute(session, copies.sql())
    _view(session, SOURCE, upserts, collapse(nothing, columns, part.masked).rows.schema)
    statement = KeyedMerge(
        str(mirror.path),
        columns,
        has_leaf=table.partitioned,
        masked=part.masked,
        lookup_version=mirror.version if any(effect.lookups for effect in effects) else None,
        odd_keys=part.odd_keys,
        leaves=leaves,
    )
    return execute(session, statement.sql())


def _view(session: SparkSession, name: str, paths: Sequence[str], schema: pa.Schema) -> None:
    """A temporary view over Parquet files, whose schema is told: to infer it would cost a job."""
    told = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    frame = session.read.schema(told).parquet(*paths) if paths else session.createDataFrame([], told)
    frame.createOrReplaceTempView(name)


def collapsed(spark: SparkSession, works: Sequence[Sequence[Collapsing]]) -> list[list[Effect]]:
    """Collapse the units of several tables in one job, many small ones to a task; effects in the same order."""
    units = [(place, unit) for place, work in enumerate(works) for unit in work]
    workers = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    groups: list[list[tuple[int, Collapsing]]] = [[] for _ in range(min(2 * workers, len(units)))]
    sizes = [0] * len(groups)
    for place, unit in sorted(units, key=lambda item: -_size(item[1])):
        lightest = sizes.index(min(sizes))
        groups[lightest].append((place, unit))
        sizes[lightest] += _size(unit)
    results = run_tasks(spark, collapse_units, [[unit for _, unit in group] for group in groups])
    effects: list[list[Effect]] = [[] for _ in works]
    for group, found in zip(groups, results, strict=True):
        for (place, _), effect in zip(group, found, strict=True):
            effects[place].append(effect)
    return effects


def _size(unit: Collapsing) -> int:
    return sum(path.stat().st_size for path in unit.files) + 1


def _total(effects: Sequence[Effect]) -> MergeCounts:
    return MergeCounts(
        sum(effect.inserted for effect in effects),
        sum(effect.updated for effect in effects),
        sum(effect.deleted for effect in effects),
    )


def _linked(path: Path, folder: Path, file: FeedFile) -> files.FileReport:
    """The feed's file under a name in the mirror's folder: the same bytes, where the file system can."""
    target = folder / f"part-{uuid.uuid4().hex}.parquet"
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
    return replace(file.report, path=target.name)


def _missing(table: Table, mirror: Mirror) -> list[tuple[str, object]]:
    """Columns that the mirror has to get, with their types."""
    if mirror.delta is None:
        return []
    have = {field.name for field in mirror.delta.schema().fields}
    return [(field.name, field.type) for field in MirrorSchema.of(table).arrow if field.name not in have]


def _unmirrorable(table: Table, mirror: Mirror) -> str | None:
    """Why the mirror cannot get the columns that appeared."""
    reason = refusal(table)
    if reason is not None or mirror.delta is None:
        return reason
    names = [name for name, _ in _missing(table, mirror)]
    mapped = mirror.delta.metadata().configuration.get("delta.columnMapping.mode") == "name"
    if names and needs_column_mapping(names) and not mapped:
        return f"column {names[0]!r} appeared, whose name the mirror can hold only after a new copy"
    return None
