"""Health rules: facts in, problems in words out. Pure: the facts are read by :mod:`pgcdc_assets.checks.status`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Literal

from pgcdc_assets.checks.facts import Facts, PublicationFacts, SourceFacts, TableFacts, span
from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.mirror.delta.mirrorschema import way_back
from pgcdc_assets.source.connect.connection import APPLICATION
from pgcdc_assets.source.connect.failures import COPY_ANEW, NEW_LAKE
from pgcdc_assets.source.setup.eventtriggers import Noting
from pgcdc_assets.source.setup.findings import matches_standby_names
from pgcdc_assets.source.slot.slotstatus import PLUGIN, SlotStatus

Severity = Literal["error", "warning"]

MIB, GIB = 1 << 20, 1 << 30
SAFE_WAL_BYTES = 256 * MIB
"""WAL that may still be written before the slot may be invalidated; less is reported. Sixteen WAL segments are minutes
on a busy source."""
IDLE_WAL_BYTES = 64 * MIB
"""WAL held for a slot that nobody reads; more is a problem. It is four segments, so that a pause between two runs is no
problem."""
HELD_WAL_BYTES = GIB
"""WAL held without any bound, or by a long transaction; more is reported, before a disk of usual size is full."""
LAG_BYTES = GIB
LONGEST_PAUSE = timedelta(days=1)
"""A source may be left alone for a night; its slot should outlive that."""
_NEARLY = 0.75
"""The share of the idle timeout after which a slot is reported: with a day's timeout, six hours are left then."""
CATALOG_XMIN_AGE = 200_000_000
"""autovacuum_freeze_max_age's default: beyond it the source starts vacuums against id wraparound, in vain."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, with which thing, and what to do. An ``error`` means that the lake does not follow the source,
    or that the source is at risk."""

    severity: Severity
    thing: str
    what: str
    do: str


def problems(facts: Facts) -> list[Problem]:
    """Every rule's findings, errors first."""
    rules = (_setup, _slot, _slot_use, _wal_held, _positions, _source, _publications, _unpublished, _left,
             _untaken, _identities, _noting, _tables, _messages)  # fmt: skip
    found = list(chain.from_iterable(rule(facts) for rule in rules))
    return sorted(found, key=lambda problem: problem.severity != "error")


def _setup(facts: Facts) -> Iterator[Problem]:
    if facts.catalog is None:
        yield _error("project", "is not set up", "run `pgcdc setup`")
    elif facts.source and facts.slot is None:
        thing = f"slot {facts.slot_name}"
        if facts.log is None:
            yield _error(thing, "does not exist", "run `pgcdc setup`")
        else:
            after = facts.log.transform_lsn
            yield _error(thing, f"does not exist: changes after {after} are not kept for us", COPY_ANEW)


def _slot(facts: Facts) -> Iterator[Problem]:
    """Whether the slot itself is usable."""
    slot = facts.slot
    if slot is None:
        return
    thing = slot.thing
    if slot.lost:
        yield _error(thing, f"was invalidated ({slot.lost}): the WAL it needs is gone", COPY_ANEW)
    elif slot.wal_status == "unreserved":
        yield _error(
            thing, "is nearly lost: the WAL it needs may go at the source's next checkpoint",
            "run `pgcdc sync` now, or raise max_slot_wal_keep_size on the source",
        )  # fmt: skip
    elif slot.safe_wal_size is not None and slot.safe_wal_size < SAFE_WAL_BYTES:
        yield _warning(
            thing, f"will be invalidated after {_size(max(0, slot.safe_wal_size))} more of WAL",
            "run `pgcdc sync`, or raise max_slot_wal_keep_size on the source",
        )  # fmt: skip
    if (slot.plugin, slot.database) != (PLUGIN, slot.connected_to):
        yield _error(
            thing, f"is of plugin {slot.plugin}, database {slot.database}; ours would be of {PLUGIN}, "
            f"{slot.connected_to}", "choose another name in the setting `slot`",
        )  # fmt: skip
    if bool(slot.two_phase) != facts.two_phase:
        made = "with" if slot.two_phase else "without"
        yield _error(
            thing, f"was made {made} two_phase, and the setting `two_phase` is {str(facts.two_phase).lower()}",
            f"set it to {str(bool(slot.two_phase)).lower()}, or choose another name in the setting `slot`",
        )  # fmt: skip
    if slot.synced:
        yield _error(
            thing, "is a copy of a primary's slot, and cannot be read before this standby is promoted",
            "set `source` to the primary",
        )  # fmt: skip


def _slot_use(facts: Facts) -> Iterator[Problem]:
    """Who reads the slot, and whether anybody does."""
    slot, source = facts.slot, facts.source
    if slot is None or source is None:
        return
    thing = f"slot {facts.slot_name}"
    if slot.active and source.holder and not source.holder.application_name.startswith(APPLICATION):
        pid, name = source.holder.pid, source.holder.application_name
        yield _error(
            thing, f"is held by another process: pid {pid}, application {name!r}",
            f"stop that process, or SELECT pg_terminate_backend({pid}) on the source",
        )  # fmt: skip
    behind = source.flush_lsn - (slot.confirmed_flush_lsn or source.flush_lsn)
    if not slot.active and behind > IDLE_WAL_BYTES:
        since = f" since {slot.inactive_since:%Y-%m-%d %H:%M} UTC" if slot.inactive_since else ""
        yield _warning(
            thing, f"is read by nobody{since}, and the source holds {_size(behind)} of WAL for it",
            "run `pgcdc sync`, `pgcdc follow` or `pgcdc up`",
        )  # fmt: skip
    yield from _idle_timeout(facts.now, slot, source)


def _idle_timeout(now: datetime, slot: SlotStatus, source: SourceFacts) -> Iterator[Problem]:
    """PostgreSQL 18 invalidates a slot that nobody reads."""
    limit = source.idle_slot_timeout
    if not limit:
        return
    raised = "set idle_replication_slot_timeout on the source above the longest pause between two runs, or to 0"
    idle = now - slot.inactive_since if slot.inactive_since and not slot.active else timedelta(0)
    if idle > limit * _NEARLY:
        yield _error(
            slot.thing, f"is nearly lost: nobody has read it for {span(idle)}, and after {span(limit)} it is given up",
            f"run `pgcdc sync` now, then {raised}",
        )  # fmt: skip
    elif limit < LONGEST_PAUSE:
        yield _warning(slot.thing, f"is given up when nobody reads it for {span(limit)}", raised)


def _wal_held(facts: Facts) -> Iterator[Problem]:
    """WAL and dead rows that the slot keeps on the source."""
    slot, source = facts.slot, facts.source
    if slot is None or source is None or slot.restart_lsn is None:
        return
    thing = f"slot {facts.slot_name}"
    held = source.flush_lsn - slot.restart_lsn
    if held > HELD_WAL_BYTES and source.max_slot_wal_keep_bytes is None:
        yield _warning(
            thing, f"holds {_size(held)} of WAL, and only the source's disk bounds it (max_slot_wal_keep_size = -1)",
            "let `pgcdc sync` catch up, or set max_slot_wal_keep_size on the source",
        )  # fmt: skip
    confirmed = slot.confirmed_flush_lsn or slot.restart_lsn
    if confirmed - slot.restart_lsn > HELD_WAL_BYTES:
        who = str(source.oldest) if source.oldest else "a long transaction on the source"
        yield _warning(
            thing, f"cannot let go of {_size(confirmed - slot.restart_lsn)} of WAL that we have read: {who} needs it",
            "end that transaction on the source",
        )  # fmt: skip
    if slot.catalog_xmin_age is not None and slot.catalog_xmin_age > CATALOG_XMIN_AGE:
        yield _warning(
            thing, f"keeps dead catalog rows of {slot.catalog_xmin_age} transactions on the source",
            "let `pgcdc sync` catch up, and end long transactions on the source",
        )  # fmt: skip


def _positions(facts: Facts) -> Iterator[Problem]:
    """The log against the slot, the source's WAL and the tables (design, LSN rules)."""
    log = facts.log
    if log is None:
        return
    slot, source = facts.slot, facts.source
    confirmed = slot.confirmed_flush_lsn if slot else None
    if confirmed is not None and confirmed > log.transform_lsn:
        yield _error(
            "change log", f"ends at {log.transform_lsn}, but the slot was confirmed up to {confirmed}: "
            "changes between the two are gone", COPY_ANEW,
        )  # fmt: skip
    if source and source.identity != log.identity:
        yield _error(
            "change log", f"belongs to {_stream(log.identity)}, but the source is {_stream(source.identity)}",
            "set `source`, `slot` or `lake` back, or use a lake of its own",
        )  # fmt: skip
    elif source and log.transform_lsn > source.flush_lsn:
        yield _error(
            "change log", f"stands at {log.transform_lsn}, ahead of the source's WAL at {source.flush_lsn}: "
            "the source was restored to an earlier time", NEW_LAKE,
        )  # fmt: skip
    if log.published is not None and log.published > log.transform_lsn:
        yield _error(
            "newest consistent point", f"stands at {log.published}, above the change log at {log.transform_lsn}: "
            "a restored source would not be told from its own",
            "run `pgcdc sync`: it checks the source, and records the log up to there",
        )  # fmt: skip
    for table in facts.tables:
        if table.state.readable and table.replay_lsn is not None and table.replay_lsn < log.start:
            yield _error(
                f"table {table.name}", f"stands at {table.replay_lsn}, but the log begins at {log.start}: "
                "changes between the two are gone", f"run `pgcdc snapshot {table.name.shell}`",
            )  # fmt: skip


def _source(facts: Facts) -> Iterator[Problem]:
    source = facts.source
    if source is None:
        return
    if source.wal_level != "logical":
        yield _error("source", f"has wal_level = {source.wal_level}", "set wal_level = logical and restart it")
    if matches_standby_names(source.synchronous_standby_names, APPLICATION):
        yield _error(
            "source", "waits for us at every commit: synchronous_standby_names = "
            f"{source.synchronous_standby_names!r} matches our application_name {APPLICATION!r}",
            "name the standbys one by one there",
        )  # fmt: skip


def _publications(facts: Facts) -> Iterator[Problem]:
    source, catalog = facts.source, facts.catalog
    if source is None or catalog is None:
        return
    present = [publication for publication in source.publications.values() if publication]
    for name, publication in source.publications.items():
        if publication is None:
            yield _error(f"publication {name}", "does not exist: changes are lost meanwhile", "run `pgcdc setup`")
    published = frozenset(chain.from_iterable(publication.tables for publication in present))
    if present and not published and catalog.tables:
        names = ", ".join(publication.name for publication in present)
        yield _error(f"publication {names}", "lists no table: changes are lost meanwhile", "run `pgcdc setup`")
    elif present:
        # _unpublished reports tables that are not published at all, if the settings mean them.
        told = source.meant - source.mirrored
        yield from _missing([table for table in catalog.tables if table.name not in told], published, present)


def _unpublished(facts: Facts) -> Iterator[Problem]:
    """Tables that the settings mean and that exist, by what the source publishes now, whatever was saved before."""
    source = facts.source
    if source is None or facts.catalog is None or not source.mirrored:
        return
    stand = {table.name: table.replay_lsn for table in facts.tables if table.replay_lsn is not None}
    stand |= {name: left.lsn for name, left in facts.left.items()}
    add = "run `pgcdc setup`, then `pgcdc sync`: it copies the table anew"
    if not source.ours:
        add = "add it to the publication, or take it out of the setting `tables`; then run `pgcdc sync`"
    for name in sorted(source.meant - source.mirrored):
        if name in stand or facts.catalog.table(name) is not None:
            where = f", and its mirror stands at {stand[name]}" if name in stand else ""
            yield _error(
                f"table {name}", "is not published any more, or is another one under the same name: its changes are "
                f"lost meanwhile{where}", add,
            )  # fmt: skip
        elif source.ours:
            yield _warning(
                f"table {name}", "is meant by the setting `tables`, but is not published",
                "run `pgcdc setup`, or exclude it there",
            )  # fmt: skip


def _left(facts: Facts) -> Iterator[Problem]:
    """Mirrors that are no longer followed, which a reader cannot see from the mirrors."""
    source = facts.source
    if source is None:
        return
    for name, left in sorted(facts.left.items()):
        if name not in source.meant | source.mirrored:
            why = left.moved or "its table was dropped or renamed, or is not meant by the setting `tables`"
            yield _warning(
                f"mirror {name}", f"stands at {left.lsn} and is not kept any more: {why}",
                f"`pgcdc forget {name.shell}` deletes it, if nobody reads it",
            )  # fmt: skip


def _untaken(facts: Facts) -> Iterator[Problem]:
    """Rows that were published to us and are in no mirror."""
    states = {table.name: table.state for table in facts.tables}
    for lost in facts.untaken:
        rows = lost.rows
        what = f"{rows.rows} rows of it, between {rows.start} and {rows.end}, went into no mirror"
        if lost.table is None:
            yield _warning(
                f"table {rows.name}", f"{what}: it belonged to no table that was followed",
                "run `pgcdc setup`, then `pgcdc sync`, if it is to be mirrored, else take it out of the publication; "
                "this is told as long as the change log holds them",
            )  # fmt: skip
        elif not lost.held and states.get(lost.table) is not None and states[lost.table].readable:
            yield _error(
                f"table {lost.table}", f"{what}, and its copy is older than they are",
                f"run `pgcdc snapshot {lost.table.shell}`",
            )  # fmt: skip


def _missing(
    tables: Sequence[Table], published: frozenset[TableName], present: Sequence[PublicationFacts]
) -> Iterator[Problem]:
    for table in tables:
        carried = {table.name, *(leaf.name for leaf in table.leaves)} if table.partitioned else {table.name}
        storage = {leaf.name for leaf in table.leaves} if table.partitioned else {table.name}
        if table.name not in published and storage - published:
            lacking = ", ".join(str(name) for name in sorted(storage - published))
            yield _error(
                f"table {table.name}", f"is not published any more ({lacking}): its changes are lost meanwhile",
                "run `pgcdc setup`, then `pgcdc sync`: it copies the table anew",
            )  # fmt: skip
            continue
        carriers = [publication for publication in present if publication.tables & carried]
        yield from _operations(f"table {table.name}", carriers, updates=table.updates_seen)


def _operations(thing: str, carriers: Sequence[PublicationFacts], *, updates: bool) -> Iterator[Problem]:
    wanted = ["insert", "update", "delete"] if updates else ["insert"]
    lacking = [kind for kind in wanted if not any(getattr(publication, kind) for publication in carriers)]
    names = ", ".join(publication.name for publication in carriers)
    if lacking:
        kinds = " and ".join(lacking)
        yield _error(thing, f"is published without {kinds}", f"let publication {names} publish them, then copy anew")
    elif not any(publication.truncate for publication in carriers):
        yield _warning(
            thing, "is published without truncate: a TRUNCATE would not be seen",
            f"let publication {names} publish truncate too",
        )  # fmt: skip


def _identities(facts: Facts) -> Iterator[Problem]:
    if facts.source is not None:
        # Somebody else's publication may have been like that at setup: that is known, and must not be an alarm for
        # ever.
        known = frozenset() if facts.source.ours else frozenset(t.name for t in facts.tables if not t.updates_seen)
        for name in sorted(facts.source.without_identity):
            say = _warning if name in known else _error
            yield say(
                f"table {name}", "has no usable replica identity, so UPDATE and DELETE fail on the source",
                "give it a primary key or REPLICA IDENTITY FULL, or take it out of the publication",
            )  # fmt: skip
    for table in facts.tables:
        if facts.source is not None and table.name in facts.source.without_identity:
            continue
        if not table.updates_seen and facts.source is not None and table.name in facts.source.followable:
            yield _warning(
                f"table {table.name}", "has a usable replica identity now, but is published for inserts only: updates "
                "and deletes are not seen", "run `pgcdc setup`, then `pgcdc sync`: it copies the table anew",
            )  # fmt: skip
        elif not table.updates_seen:
            yield _warning(
                f"table {table.name}", "has no usable replica identity: updates and deletes are not seen",
                f"give it a primary key, or ALTER TABLE {table.name} REPLICA IDENTITY FULL; then run `pgcdc setup`",
            )  # fmt: skip


def _tables(facts: Facts) -> Iterator[Problem]:
    for table in facts.tables:
        if table.state is TableState.SET_ASIDE:
            where = f" at {table.lsn}" if table.lsn is not None else ""
            yield _error(
                f"table {table.name}", f"was set aside{where}: {table.reason or 'no reason given'}",
                _back(table),
            )  # fmt: skip
        elif table.state.readable and table.reason:
            yield _error(
                f"table {table.name}", f"is not what the source has: in its mirror, {table.reason}",
                f"`pgcdc verify {table.name.shell}` names the rows, `pgcdc snapshot {table.name.shell}` copies it anew",
            )  # fmt: skip
        elif table.state is TableState.WAITING and table.reason:
            yield _warning(f"table {table.name}", f"waits for a copy: {table.reason}", "`pgcdc sync` copies it")
    if facts.source is None:
        return
    for table in facts.tables:
        if table.state.readable and table.replay_lsn is not None:
            lag = facts.source.flush_lsn - table.replay_lsn
            if lag > LAG_BYTES:
                yield _warning(
                    f"table {table.name}", f"is {_size(lag)} of WAL behind the source", "let `pgcdc sync` catch up"
                )


def _back(table: TableFacts) -> str:
    do = way_back(table.name, refused=table.refused)
    if table.kept_until is None:
        return do
    until = table.kept_until.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"{do}, or `pgcdc heal {table.name.shell}` once the reason has gone: its changes stay in the log until {until}"
    )


def _noting(facts: Facts) -> Iterator[Problem]:
    """Event triggers that were made, and do not serve."""
    found, thing = facts.source.noting if facts.source else Noting.ABSENT, "event triggers"
    if found is Noting.DISABLED:
        yield _warning(thing, "are disabled, or one is gone: when a structure changed is known by looks at the catalog "
                       "alone", "run `pgcdc setup --ddl`, or `pgcdc setup --ddl --sql` for a superuser")  # fmt: skip
    elif found is Noting.OUTDATED:
        yield _warning(thing, "are of another version, or for other publications",
                       "run `pgcdc setup --ddl`, or `pgcdc setup --ddl --sql` for a superuser")  # fmt: skip


def _messages(facts: Facts) -> Iterator[Problem]:
    """The feed of messages stands with the newest point, or is behind what readers of the tables see."""
    found, thing = facts.messages, "feed of messages"
    if found is None or facts.log is None:
        return
    published = facts.log.published
    if found.failure is not None:
        yield _error(thing, f"does not go on: {found.failure}", "see that its folder is there and whole")
    elif found.complete_to is not None and published is not None and found.complete_to < published:
        yield _error(thing, f"stands at {found.complete_to}, below the newest consistent point {published}",
                     "the log keeps its messages: run `pgcdc sync`, and see what it says")  # fmt: skip


def _error(thing: str, what: str, do: str) -> Problem:
    return Problem("error", thing, what, do)


def _warning(thing: str, what: str, do: str) -> Problem:
    return Problem("warning", thing, what, do)


def _stream(identity: Identity) -> str:
    return f"system {identity.system_identifier}, database {identity.database}, slot {identity.slot}"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
