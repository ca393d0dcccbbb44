"""Applies the changes of a turn, which are in the change feeds, to the mirrors: one atomic Delta commit per table. Each
commit contains both the data and the new position.

If a table has only inserts, the feed's own files become files of the mirror, by a commit that takes milliseconds. If
the mirror cannot use these files, for example because of column mapping, their rows are copied to new files. In both
cases, the rows are not compared with each other or with the mirror. After a truncate of the whole table, the later
changes are the complete table, and overwrite the mirror. All other changes are collapsed (the changes of each key
become one change) and merged in Spark's tasks: deletion vectors remove the changed and deleted rows, and a new file
holds the changed and inserted rows. Spark's own MERGE has the same effect, but costs seconds of CPU time even for a
small change.

A merge fails before its commit if the mirror lacks a row that changed or holds a row that was inserted, if the changes
contradict each other, or if a file of the table cannot be read. The mirror then stays as it was, and the table is set
aside, because applying more changes would hide that the mirror differs from the source. Such a failure of one table
(:mod:`pgcdc_assets.failures`) does not prevent the commits of other tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.failures import ATTEMPTS, again_after_lost_races, contained
from pgcdc_assets.feed.plan import Followed
from pgcdc_assets.feed.schema import FeedPart
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.mirror.delta.applytask import Collapsing, PendingChanges, collapse_units
from pgcdc_assets.mirror.delta.compaction import COMPACTION, Compaction, compact_applied
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.delta.rowlookup import LACKS, Effect
from pgcdc_assets.mirror.delta.tableplan import Counts, TablePlan, merged, total
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.spark.tasks import cores, run_tasks

_COMMITS: Final = 8
"""The number of commits that one turn makes at the same time."""

Result = TypeVar("Result")


def apply_tables(
    spark: SparkSession, mirrors: Mirrors, parts: Sequence[FeedPart], upto: Lsn,
    known: Mapping[TableName, Table] | None = None, compaction: Compaction = COMPACTION,
) -> list[Applied]:  # fmt: skip
    """Apply the changes of ``parts`` to their mirrors up to ``upto``: see
    :meth:`pgcdc_assets.mirror.target.Target.apply`.

    A failure of one table alone is returned as ``set_aside``. Any other error ends the apply; the next apply skips the
    tables that were committed before the error. If another writer's commit to a mirror came first, this table alone is
    tried again. After the last attempt, its result is ``outrun``, and the next turn applies its changes.
    """
    done: list[Applied] = []
    left = list(parts)
    for attempt in range(1, ATTEMPTS + 1):
        results = _attempted(spark, mirrors, left, upto, known or {})
        outrun = {result.table.name for result in results if result.outrun and attempt < ATTEMPTS}
        done += [result for result in results if result.table.name not in outrun]
        left = [part for part in left if part.table.name in outrun]
        if not left:
            break
    return compact_applied(spark, mirrors, compaction, done)


def _attempted(
    spark: SparkSession, mirrors: Mirrors, parts: Sequence[FeedPart], upto: Lsn, known: Mapping[TableName, Table]
) -> list[Applied]:
    """Read each mirror, and try once to commit to it. Several tables are processed at the same time, because a commit
    mostly waits for the disk."""
    done: list[Applied] = []
    rest: list[tuple[TablePlan, list[Collapsing]]] = []
    with ThreadPoolExecutor(_COMMITS, thread_name_prefix="commit") as pool:
        for begun in pool.map(partial(_begun, mirrors, upto, known), parts):
            if isinstance(begun, Applied):
                done.append(begun)
            elif begun is not None:
                rest.append(begun)
        started = time.monotonic()
        effects = collapsed(spark, [units for _, units in rest])
        share = (time.monotonic() - started) / max(1, len(rest))
        done += pool.map(partial(_committed, share), zip(rest, effects, strict=True))
    return done


def _begun(
    mirrors: Mirrors, upto: Lsn, known: Mapping[TableName, Table], part: FeedPart
) -> Applied | tuple[TablePlan, list[Collapsing]] | None:
    """Applies one table's changes, if this needs no Spark job. Otherwise returns the table's plan, and the parts of
    its changes that Spark must reduce to one change per key. Returns None if there is nothing left to apply."""
    work = _own(part.table, part.span.start, partial(TablePlan.of, mirrors, part, upto, known))
    if not isinstance(work, TablePlan):
        return work
    return _own(work.table, work.pending.span.start, work.begin)


def _committed(seconds: float, found: tuple[tuple[TablePlan, list[Collapsing]], Sequence[Effect]]) -> Applied:
    (work, _), effects = found
    return _own(work.table, work.pending.span.start, partial(work.commit, effects, seconds))


def _own(table: Table, start: Lsn, step: Callable[[], Result]) -> Result | Applied:
    """Do a step of one table's apply. If it fails for this table alone, the result says that the table must be set
    aside, at its position ``start``."""
    with contained() as failed:
        return step()
    set_aside = None if failed.outrun else (start, failed.told)
    return Applied(table, -1, start, outrun=failed.outrun, set_aside=set_aside)


def collapsed(spark: SparkSession, works: Sequence[Sequence[Collapsing]]) -> list[list[Effect]]:
    """Collapse the units of several tables in one Spark job, many small units per task. Returns the effects in the
    order of ``works`` and their units."""
    units = [(place, unit) for place, work in enumerate(works) for unit in work]
    workers = cores(spark)
    groups: list[list[tuple[int, Collapsing]]] = [[] for _ in range(min(2 * workers, len(units)))]
    sizes = [0] * len(groups)
    for place, unit in sorted(units, key=lambda item: -item[1].bytes):
        lightest = sizes.index(min(sizes))
        groups[lightest].append((place, unit))
        sizes[lightest] += unit.bytes + 1
    results = run_tasks(spark, collapse_units, [[unit for _, unit in group] for group in groups])
    effects: list[list[Effect]] = [[] for _ in works]
    for group, found in zip(groups, results, strict=True):
        for (place, _), effect in zip(group, found, strict=True):
            effects[place].append(effect)
    return effects


def repair_table(
    spark: SparkSession, log: ChangeLog, mirrors: Mirrors, table: Table, span: LsnRange, replay_lsn: Lsn
) -> Applied:
    """Compute again, from the log, the rows whose keys changed in ``span``, and merge them into the mirror. The mirror
    has already applied this range, and stays at ``replay_lsn``. So the rows are computed as of ``replay_lsn``, with all
    later changes of their keys. Does nothing for a range below the table's copy. Raises NotRepairable if the log lacks
    a value that a row needs; then only a new copy helps."""
    started = time.monotonic()
    mirror = mirrors.open(table.name)
    if mirror.snapshot_lsn is None:
        raise NotRepairable("contains no copy of the table", thing=f"mirror {table.name}", do=_again(table))
    start = max(span.start, mirror.snapshot_lsn)
    nothing = Applied(table, mirror.version, replay_lsn)
    if start >= span.end:
        return nothing
    whole, feeds = LsnRange(start, replay_lsn), Feeds(mirrors.layout, mirrors.identity)
    part = transform(spark, LogSpan(log, whole), feeds, [Followed(table, replay_lsn)], again=True)[table.name]
    if part.ended is not None:
        raise NotRepairable(part.ended.reason, thing=str(table.name), lsn=part.ended.lsn, do=_again(table))
    pending = PendingChanges.of(mirrors.layout, part, whole)
    if pending is None:
        return nothing
    touched = LsnRange(start, span.end)
    counts = again_after_lost_races(lambda: _repaired(spark, pending, mirror.again(), touched))
    return Applied(table, mirror.again().version, replay_lsn, *counts, time.monotonic() - started)


def _repaired(spark: SparkSession, pending: PendingChanges, mirror: Mirror, touched: LsnRange) -> Counts:
    table = pending.table
    if not table.key and not pending.emptied:
        what = "the table has no key, so its rows cannot be told apart" if table.multiset else "the table has no key"
        raise NotRepairable(what, thing=str(table.name), lsn=touched.start, do=_again(table))
    # If leaf partitions were truncated, this may have deleted the row of any key. So all keys that have changes in the
    # log are computed again, not only the keys that changed in `touched`.
    wanted = None if pending.leaves else touched
    delta = mirror.existing
    target = mirror.target(table, () if pending.emptied else delta.files)
    units = pending.units(target, together=not pending.emptied)
    if not pending.emptied:
        units = [replace(unit, repair=True, touched=wanted) for unit in units]
    effects = _effects(spark, units, table, touched)
    counts = total(effects)
    # The commit has no Delta app transaction, because a repair changes no position. So the same repair can run again.
    passed(FaultPoint.REPAIR_COMMITTING)
    if pending.emptied:
        reports = [effect.added for effect in effects if effect.added is not None]
        commit_files(delta, reports, "overwrite", {})
    elif counts != Counts():
        merged(delta, effects, {})
    passed(FaultPoint.REPAIR_COMMITTED)
    return counts


def _effects(spark: SparkSession, units: Sequence[Collapsing], table: Table, touched: LsnRange) -> list[Effect]:
    (effects,) = collapsed(spark, [units])
    for effect in effects:
        if effect.mismatch is None:
            continue
        what = effect.mismatch.what
        if what == LACKS:
            what = "the mirror lacks a row, and the change log does not have all values of this row"
        lsn = effect.mismatch.lsn or touched.start
        raise NotRepairable(what, thing=str(table.name), lsn=lsn, do=_again(table))
    return effects


def _again(table: Table) -> str:
    return f"copy it again: `pgcdc snapshot {table.name.shell}`"
