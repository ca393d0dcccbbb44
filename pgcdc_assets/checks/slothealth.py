"""Health rules for the slot, the positions, and the source's settings."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from pgcdc_assets.checks.health import GIB, MIB, Facts, Problem, SourceFacts, error, size, span, warning
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.source.connect.connection import APPLICATION
from pgcdc_assets.source.connect.failures import COPY_ANEW, NEW_LAKE
from pgcdc_assets.source.setup.findings import matches_standby_names
from pgcdc_assets.source.slot.slot import PLUGIN, SlotStatus

SAFE_WAL_BYTES = 256 * MIB
"""A problem is reported if the slot may be invalidated after less WAL than this. A busy source writes this much in
minutes."""
IDLE_WAL_BYTES = 64 * MIB
"""A problem is reported if a slot that no process reads keeps more WAL than this. The limit is four WAL segments, so
that a short pause between two runs of the sync is not reported."""
HELD_WAL_BYTES = GIB
"""A problem is reported if the source keeps more WAL than this for a slot without a limit, or for a long transaction.
This is little enough to warn before a disk of usual size is full."""
LONGEST_PAUSE = timedelta(days=1)
"""The longest pause between two runs of the sync that the slot should survive."""
_NEARLY = 0.75
"""A slot that is not read is reported after this share of the idle timeout. With a timeout of one day, six hours are
left then."""
_MORE_ROOM = "raise max_slot_wal_keep_size on the source"
CATALOG_XMIN_AGE = 200_000_000
"""The default of autovacuum_freeze_max_age. When the slot's catalog_xmin is older than this, the source starts vacuums
against wraparound, which cannot remove the rows that the slot keeps."""


def _setup(facts: Facts) -> Iterator[Problem]:
    if facts.catalog is None:
        yield error(ProblemCode.NOT_SET_UP, "project", "is not set up", "run `pgcdc setup`")
    elif facts.source and facts.slot is None:
        thing = f"slot {facts.slot_name}"
        if facts.log is None:
            yield error(ProblemCode.SLOT_MISSING, thing, "does not exist", "run `pgcdc setup`")
        else:
            after = facts.log.transform_lsn
            yield error(
                ProblemCode.SLOT_MISSING,
                thing,
                f"does not exist: the source does not keep the changes after {after}",
                COPY_ANEW,
            )


def _slot(facts: Facts) -> Iterator[Problem]:
    slot = facts.slot
    if slot is None:
        return
    thing = slot.thing
    do = _MORE_ROOM if facts.at_work else f"run `pgcdc sync` now, or {_MORE_ROOM}"
    if slot.lost:
        what = f"was invalidated ({slot.lost}): PostgreSQL can no longer send its changes"
        yield error(ProblemCode.SLOT_LOST, thing, what, COPY_ANEW)
    elif slot.wal_status == "unreserved":
        yield error(
            ProblemCode.SLOT_NEARLY_LOST,
            thing, "is nearly lost: the source's next checkpoint may remove the WAL that it needs", do,
        )  # fmt: skip
    elif slot.safe_wal_size is not None and slot.safe_wal_size < SAFE_WAL_BYTES:
        yield warning(
            ProblemCode.SLOT_LITTLE_WAL_LEFT,
            thing, f"will be invalidated after {size(max(0, slot.safe_wal_size))} more WAL", do,
        )  # fmt: skip
    if (slot.plugin, slot.database) != (PLUGIN, slot.connected_to):
        yield error(
            ProblemCode.SLOT_OF_ANOTHER,
            thing, f"uses plugin {slot.plugin} in database {slot.database}; this project needs {PLUGIN} in "
            f"{slot.connected_to}", "choose another name in the setting `slot`",
        )  # fmt: skip
    if bool(slot.two_phase) != facts.two_phase:
        made = "with" if slot.two_phase else "without"
        yield error(
            ProblemCode.SLOT_TWO_PHASE,
            thing, f"was created {made} two_phase, but the setting `two_phase` is {str(facts.two_phase).lower()}",
            f"set `two_phase` to {str(bool(slot.two_phase)).lower()}, or choose another name in the setting `slot`",
        )  # fmt: skip
    if slot.synced:
        yield error(
            ProblemCode.SLOT_ON_STANDBY,
            thing, "is synchronized from the primary, and cannot be read until this standby is promoted",
            "set `source` to the primary",
        )  # fmt: skip


def _slot_use(facts: Facts) -> Iterator[Problem]:
    """Problems with the reading of the slot: whether a session reads it, and which session."""
    slot, source = facts.slot, facts.source
    if slot is None or source is None:
        return
    thing = f"slot {facts.slot_name}"
    if slot.active and source.holder and not source.holder.application_name.startswith(APPLICATION):
        pid, name = source.holder.pid, source.holder.application_name
        yield error(
            ProblemCode.SLOT_HELD, thing, f"is in use by another process: pid {pid}, application {name!r}",
            f"stop that process, or SELECT pg_terminate_backend({pid}) on the source",
        )  # fmt: skip
    behind = source.flush_lsn - (slot.confirmed_flush_lsn or source.flush_lsn)
    if not slot.active and not facts.at_work and behind > IDLE_WAL_BYTES:
        since = f" (inactive since {slot.inactive_since:%Y-%m-%d %H:%M} UTC)" if slot.inactive_since else ""
        yield warning(
            ProblemCode.SLOT_UNREAD,
            thing, f"is not being read{since}, and the source keeps {size(behind)} of WAL for it",
            "run `pgcdc sync`, `pgcdc follow` or `pgcdc up`",
        )  # fmt: skip
    yield from _idle_timeout(facts.now, slot, source)


def _idle_timeout(now: datetime, slot: SlotStatus, source: SourceFacts) -> Iterator[Problem]:
    """Problems with the idle timeout of PostgreSQL 18, which invalidates a slot that no process reads."""
    limit = source.idle_slot_timeout
    if not limit:
        return
    raised = "set idle_replication_slot_timeout on the source above the longest pause between two syncs, or to 0"
    idle = now - slot.inactive_since if slot.inactive_since and not slot.active else timedelta(0)
    if idle > limit * _NEARLY:
        yield error(
            ProblemCode.SLOT_NEARLY_LOST,
            slot.thing, f"is nearly lost: it was not read for {span(idle)}, and the source invalidates it after "
            f"{span(limit)} without a reader",
            f"run `pgcdc sync` now, then {raised}",
        )  # fmt: skip
    elif limit < LONGEST_PAUSE:
        yield warning(
            ProblemCode.SLOT_IDLE_TIMEOUT, slot.thing, f"is invalidated if it is not read for {span(limit)}", raised
        )


def _wal_held(facts: Facts) -> Iterator[Problem]:
    """Problems with the amount of WAL, and of dead rows, that the slot keeps on the source."""
    slot, source = facts.slot, facts.source
    if slot is None or source is None or slot.restart_lsn is None:
        return
    thing = f"slot {facts.slot_name}"
    held = source.flush_lsn - slot.restart_lsn
    if held > HELD_WAL_BYTES and source.max_slot_wal_keep_bytes is None:
        yield warning(
            ProblemCode.SLOT_HOLDS_WAL,
            thing, f"keeps {size(held)} of WAL on the source without a limit (max_slot_wal_keep_size = -1)",
            "let `pgcdc sync` catch up, or set max_slot_wal_keep_size on the source",
        )  # fmt: skip
    confirmed = slot.confirmed_flush_lsn or slot.restart_lsn
    if confirmed - slot.restart_lsn > HELD_WAL_BYTES:
        who = f"a transaction that has not ended ({source.oldest})" if source.oldest else "a long transaction"
        yield warning(
            ProblemCode.SLOT_HELD_BACK,
            thing, f"keeps {size(confirmed - slot.restart_lsn)} of WAL that pgcdc has already read, because of {who}",
            "end that transaction on the source",
        )  # fmt: skip
    if slot.catalog_xmin_age is not None and slot.catalog_xmin_age > CATALOG_XMIN_AGE:
        yield warning(
            ProblemCode.SLOT_HOLDS_CATALOG,
            thing, f"keeps vacuum from removing dead catalog rows of the last {slot.catalog_xmin_age} transactions",
            "let `pgcdc sync` catch up, and end long transactions on the source",
        )  # fmt: skip


def _positions(facts: Facts) -> Iterator[Problem]:
    """Problems with the order of positions in the log, the slot, the source's WAL and the tables
    (docs/explanation/lsns.md)."""
    log = facts.log
    if log is None:
        return
    slot, source = facts.slot, facts.source
    confirmed = slot.confirmed_flush_lsn if slot else None
    if confirmed is not None and confirmed > log.transform_lsn:
        yield error(
            ProblemCode.LOG_GAP,
            "change log", f"ends at {log.transform_lsn}, but the slot was confirmed up to {confirmed}: the "
            "changes between these LSNs are lost", COPY_ANEW,
        )  # fmt: skip
    if source and not source.identity.is_same(log.identity):
        yield error(
            ProblemCode.LOG_OF_ANOTHER_SOURCE,
            "change log", f"belongs to {_stream(log.identity)}, but the settings name {_stream(source.identity)}",
            "set `source` and `slot` back to those of the change log, or set `lake` to a new folder, or to the lake "
            "of this source",
        )  # fmt: skip
    elif source and log.transform_lsn > source.flush_lsn:
        yield error(
            ProblemCode.LOG_AHEAD_OF_SOURCE,
            "change log", f"is at {log.transform_lsn}, ahead of the source's WAL at {source.flush_lsn}: the "
            "source was restored to an earlier time", NEW_LAKE,
        )  # fmt: skip
    for table in facts.tables:
        if table.state.readable and table.replay_lsn is not None and table.replay_lsn < log.start:
            yield error(
                ProblemCode.TABLE_LOST_CHANGES,
                f"table {table.name}", f"is at {table.replay_lsn}, but the change log begins at {log.start}: the "
                "changes between these LSNs are lost", f"run `pgcdc snapshot {table.name.shell}`",
            )  # fmt: skip


def _source(facts: Facts) -> Iterator[Problem]:
    source = facts.source
    if source is None:
        return
    if source.wal_level != "logical":
        yield error(
            ProblemCode.SOURCE_WAL_LEVEL,
            "source",
            f"has wal_level = {source.wal_level}",
            "set wal_level = logical and restart the server",
        )
    if matches_standby_names(source.synchronous_standby_names, APPLICATION):
        yield error(
            ProblemCode.SOURCE_WAITS_FOR_US, "source", "waits for pgcdc at every commit: synchronous_standby_names = "
            f"{source.synchronous_standby_names!r} matches pgcdc's application_name {APPLICATION!r}",
            "list each standby by name in synchronous_standby_names",
        )  # fmt: skip


def _stream(identity: Identity) -> str:
    return f"system {identity.system_identifier}, database {identity.database}, slot {identity.slot}"


RULES = (_setup, _slot, _slot_use, _wal_held, _positions, _source)
