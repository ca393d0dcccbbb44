"""Takes a turn: brings what the log holds up to a boundary into every followed mirror. The run then publishes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.feed.plan import Followed
from pgcdc_assets.feed.routing import known_leaves
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.flow.reports import TableTurn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.structure.record import TableRecord


@dataclass(frozen=True)
class Turn:
    upto: Lsn
    tables: list[TableTurn]
    """Tables whose mirror changed."""
    seconds: dict[str, float]
    outdated: list[TableName] = field(default_factory=list)
    """Tables that wait for a copy instead, because a partition came, and perhaps went again."""


def take_turn(work: Work, upto: Lsn, tables: Sequence[TableRecord] | None = None) -> Turn:
    """Bring those of the tables (default: all followed ones) that stand below ``upto`` to it.

    ``upto`` must be a boundary up to which the log is complete. Tables without changes move without a commit. A table
    that cannot be followed is set aside; the others go on. A table stays below ``upto`` until the next turn if another
    writer's commits to its mirror came first each time, and until a look at the catalog if a row came under a
    structure, or of a partition, that its mirror does not have.
    """
    entries = work.progress.followed() if tables is None else tables
    behind = [entry for entry in entries if entry.replay_lsn < upto and not entry.reshaping
              and entry.unread is None]  # fmt: skip
    outdated = _note_strays(work, behind)
    behind = [entry for entry in behind if _goes_on(work, entry.table.name)]
    names = _changed(work, behind, upto) if behind else set()
    changed = [entry for entry in behind if entry.table.name in names]
    done, outrun, seconds = _derive_and_apply(work, changed, upto) if changed else ([], set(), {})
    for entry in behind:
        if entry.table.name not in outrun and _goes_on(work, entry.table.name):
            work.progress.moved(entry.table.name, upto)
    return Turn(upto, done, seconds, outdated)


def _goes_on(work: Work, name: TableName) -> bool:
    """Whether the table is followed, and waits for no look."""
    record = work.progress[name]
    return record.followed and record.stray is None and record.unread is None


def _note_strays(work: Work, tables: Sequence[TableRecord]) -> list[TableName]:
    """Note the tables of which the log has rows of an unknown leaf, for a look at the catalog, and ask for new copies
    of those whose rows came as another table's; returns the names of these.

    Rows of a partition that are published via the root look like all other rows of the root. If the partition was
    dropped or detached since, the catalog shows nothing of it.
    """
    batches = work.log.batches(min((entry.replay_lsn for entry in tables), default=work.log.position()))
    outdated: list[TableName] = []
    for entry in tables:
        name, told = entry.table.name, [batch.partitions for batch in batches if batch.end > entry.replay_lsn]
        if any(entry.table.oid in of_root for leaves in told for of_root in leaves.values()):
            what = "it was a partition for a while, and its rows came as those of the table that it was attached to"
            work.observer.progress("watch", f"table {name}: {what}")
            work.progress.must_copy(name, work.log.position(), what)
            outdated.append(name)
        elif any(set(leaves.get(entry.table.oid, ())) - known_leaves(entry.table) for leaves in told):
            what = "a partition came, and rows with it, which may have gone as it was dropped or detached"
            work.progress.wait_for_look(name, stray=what)
    return outdated


def _derive_and_apply(
    work: Work, changed: Sequence[TableRecord], upto: Lsn
) -> tuple[list[TableTurn], set[TableName], dict[str, float]]:
    span = LsnRange(min(entry.replay_lsn for entry in changed), upto)
    started = time.monotonic()
    followed = [Followed(entry.table, entry.replay_lsn) for entry in changed]
    parts = transform(work.session(), work.log, span, followed, router=work.progress.router)
    derived = time.monotonic()
    known = {entry.table.name: entry.table for entry in changed}
    applied = work.target.apply(list(parts.values()), upto, known)
    seconds = {"transform": derived - started, "apply": time.monotonic() - derived}
    outrun = {result.table.name for result in applied if result.outrun}
    applied = [result for result in applied if not result.outrun]
    done = [record(work, result, parts[result.table.name].counts, seconds["transform"]) for result in applied]
    # A structure that the mirror does not have yet is looked up in the catalog.
    waits = work.settings.schema_changes != "set_aside"
    unread = {name: part.set_aside for name, part in parts.items() if part.set_aside is not None and part.restructured}
    for name, (lsn, reason) in unread.items() if waits else ():
        work.progress.wait_for_look(name, unread=reason)
        work.observer.progress("apply", f"{name} waits for a look at the catalog: {reason}", lsn=str(lsn))
    reasons = {name: part.set_aside for name, part in parts.items()
               if part.set_aside is not None and not (waits and name in unread)}  # fmt: skip
    reasons |= {result.table.name: result.set_aside for result in applied if result.set_aside is not None}
    for name, (lsn, reason) in reasons.items():
        work.progress.put_aside(name, lsn, reason)
        work.observer.progress("apply", f"{name} is set aside: {reason}", lsn=str(lsn))
    return done, outrun, seconds


def _changed(work: Work, behind: Sequence[TableRecord], upto: Lsn) -> set[TableName]:
    """The tables for which the batches between the lowest position and ``upto`` have messages."""
    span = LsnRange(min(entry.replay_lsn for entry in behind), upto)
    # A boundary that verify asked for may cut through a batch: that batch counts too.
    batches = [batch for batch in work.log.batches(span.start) if batch.start < upto]
    relations = {relation for batch in batches for relation in batch.counts}
    if not relations:
        return set()
    router = work.progress.router
    shapes = [shape for shape in work.log.shapes(span).values() if shape.relation_id in relations]
    return {name for shape in shapes for name in router.place(shape).concerned}


def record(work: Work, result: Applied, changes: Mapping[str, int], seconds: float = 0.0) -> TableTurn:
    """Note where a table stands now; returns what was done to it. ``changes`` of its feed were derived in
    ``seconds``."""
    version = result.version if result.version >= 0 else None
    work.progress.moved(result.table.name, result.replay_lsn, version, result.table)
    return TableTurn(
        table=result.table.name,
        replay_lsn=result.replay_lsn,
        version=result.version,
        inserted=result.inserted,
        updated=result.updated,
        deleted=result.deleted,
        changes=dict(changes),
        seconds_transform=seconds,
        seconds_apply=result.seconds,
    )
