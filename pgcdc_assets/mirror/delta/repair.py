"""Repairs a mirror: derives the effect of a range again from the log, and merges it into the mirror. The mirror has
already applied the range. The keys that changed in the range are derived up to the mirror's position. No value is
guessed: if the log lacks a value that a row needs, the repair is refused, and only a new copy helps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.feed.plan import Followed
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.mirror.delta.apply import collapsed
from pgcdc_assets.mirror.delta.applytask import Collapsing, Effect, PendingChanges
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.delta.rowlookup import LACKS
from pgcdc_assets.mirror.delta.tableplan import Counts, merged, total
from pgcdc_assets.mirror.target import Applied


def repair_table(
    spark: SparkSession, log: ChangeLog, mirrors: Mirrors, table: Table, span: LsnRange, replay_lsn: Lsn
) -> Applied:
    """Derive the changes of ``span`` again from the log, and merge their effect into the mirror. The mirror is at
    ``replay_lsn`` before and after. Does nothing for a range below the table's copy. Raises NotRepairable if the log
    lacks a value that is needed."""
    started = time.monotonic()
    mirror = mirrors.open(table.name)
    if mirror.snapshot_lsn is None:
        raise NotRepairable("has no copy", thing=f"mirror {table.name}", do=_again(table))
    start = max(span.start, mirror.snapshot_lsn)
    nothing = Applied(table, mirror.version, replay_lsn)
    if start >= span.end:
        return nothing
    whole, feeds = LsnRange(start, replay_lsn), Feeds(mirrors.layout, mirrors.identity)
    part = transform(spark, LogSpan(log, whole), feeds, [Followed(table, start)], again=True)[table.name]
    if part.ended is not None:
        raise NotRepairable(part.ended.reason, thing=str(table.name), lsn=part.ended.lsn, do=_again(table))
    pending = PendingChanges.of(mirrors.layout, part, whole)
    if pending is None:
        return nothing
    touched = LsnRange(start, span.end)
    counts = again_after_lost_races(lambda: _repaired(spark, pending, mirror.again(), touched))
    numbers = (counts.inserted, counts.updated, counts.deleted)
    return Applied(table, mirror.again().version, replay_lsn, *numbers, time.monotonic() - started)


def _repaired(spark: SparkSession, pending: PendingChanges, mirror: Mirror, touched: LsnRange) -> Counts:
    table = pending.table
    if not table.key and not pending.emptied:
        what = "rows of a table without a key cannot be told apart" if table.multiset else "the table has no key"
        raise NotRepairable(what, thing=str(table.name), lsn=touched.start, do=_again(table))
    # Any row may have moved to a truncated leaf after the truncate, so all keys are derived.
    wanted = None if pending.leaves else touched
    delta = mirror.existing
    target = mirror.target(table, () if pending.emptied else delta.files)
    units = pending.units(target, together=not pending.emptied)
    if not pending.emptied:
        units = [replace(unit, repair=True, touched=wanted) for unit in units]
    effects = _effects(spark, units, table, touched)
    counts = total(effects)
    # The commit has no application transaction, because a repair changes no position. So it may also be repeated.
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
            what = "a row is missing in the mirror, and the log does not hold all of its values"
        lsn = effect.mismatch.lsn or touched.start
        raise NotRepairable(what, thing=str(table.name), lsn=lsn, do=_again(table))
    return effects


def _again(table: Table) -> str:
    return f"copy it again: `pgcdc snapshot {table.name.shell}`"
