"""Health rules of publications, tables and their mirrors, the feed of messages, and the last operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC
from itertools import chain

from pgcdc_assets.checks.health import (
    GIB,
    Facts,
    Problem,
    PublicationFacts,
    Severity,
    TableFacts,
    error,
    size,
    warning,
)  # fmt: skip
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.outcomes import Failure, OperationKind
from pgcdc_assets.mirror.delta.mirrorschema import way_back
from pgcdc_assets.source.connect.failures import COPY_ANEW
from pgcdc_assets.source.setup.findings import identity_full
from pgcdc_assets.structure.record import TableState

LAG_BYTES = GIB
FEED_OF_MESSAGES = "feed of logical messages"


def _publications(facts: Facts) -> Iterator[Problem]:
    source, catalog = facts.source, facts.catalog
    if source is None or catalog is None:
        return
    present = [publication for publication in source.publications.values() if publication]
    for name, publication in source.publications.items():
        if publication is None:
            do = COPY_ANEW if facts.slot or facts.log else "run `pgcdc setup`"
            yield error(
                ProblemCode.PUBLICATION_MISSING, f"publication {name}", "does not exist: changes are being lost", do
            )
    if len(present) < len(source.publications):
        # The missing publication already explains the problems of all tables.
        return
    published = frozenset(chain.from_iterable(publication.tables for publication in present))
    if present and not published and catalog.tables:
        names = ", ".join(publication.name for publication in present)
        do = "run `pgcdc setup`" if source.ours else "add the tables to the publication again, then run `pgcdc sync`"
        yield error(ProblemCode.PUBLICATION_EMPTY, f"publication {names}", "lists no table: changes are being lost", do)
    elif present:
        # `told`: tables that the settings select, but that are not published at all. _unpublished reports them.
        told = source.meant - source.mirrored
        tables = [table for table in catalog.tables if table.name not in told]
        renamed = [table for table in tables if source.called.get(table.oid, table.name) != table.name]
        for table in renamed:
            called = source.called[table.oid]
            if marked(str(called)):
                yield error(
                    ProblemCode.TABLE_NAME_NOT_TEXT,
                    f"table {table.name}", f"was renamed to {called}, which is not text in the source's "
                    "encoding: no mirror can have that name", "rename the table on the source",
                )  # fmt: skip
                continue
            yield warning(
                ProblemCode.TABLE_RENAMED,
                f"table {table.name}", f"was renamed to {called}: its mirror will be renamed too",
                "let `pgcdc sync` run",
            )  # fmt: skip
        refused = source.without_identity
        yield from _missing([table for table in tables if table not in renamed], published, present, refused)


def _unpublished(facts: Facts) -> Iterator[Problem]:
    """Problems for existing tables that the settings select, but that no publication lists."""
    source = facts.source
    if source is None or facts.catalog is None or not source.mirrored or None in source.publications.values():
        return
    stand = {table.name: table.replay_lsn for table in facts.tables if table.replay_lsn is not None}
    stand |= {name: left.lsn for name, left in facts.left.items()}
    add = "run `pgcdc setup`, then `pgcdc sync`, which copies the table again"
    if not source.ours:
        add = "add the table to the publication, or exclude it in the setting `tables`; then run `pgcdc sync`"
    for name in sorted(source.meant - source.mirrored):
        if name in stand or facts.catalog.table(name) is not None:
            where = f", and its mirror stays at {stand[name]}" if name in stand else ""
            yield error(
                ProblemCode.TABLE_UNPUBLISHED,
                f"table {name}", "is no longer published, or was replaced by a new table of this name: its changes are "
                f"being lost{where}", add,
            )  # fmt: skip
        elif source.ours:
            yield warning(
                ProblemCode.TABLE_NOT_PUBLISHED_YET,
                f"table {name}", "is selected by the setting `tables`, but is not published",
                "run `pgcdc setup`, or exclude it in the setting `tables`",
            )  # fmt: skip


def _left(facts: Facts) -> Iterator[Problem]:
    """Problems for mirrors whose tables are no longer followed. A reader cannot see this in the mirror itself."""
    source = facts.source
    if source is None:
        return
    refused = {table.name for table in facts.tables if table.refused}
    for name, left in sorted(facts.left.items()):
        if left.waits_for in refused:
            continue  # The table cannot be mirrored under its new name. _tables reports that.
        if left.waits_for is not None:
            yield warning(
                ProblemCode.MIRROR_WAITS_FOR_NAME,
                f"mirror {name}", f"stays at {left.lsn} until a sync renames it: its table is now {left.waits_for}",
                "let `pgcdc sync` run; if apply is paused, run `pgcdc resume apply`",
            )  # fmt: skip
        elif name not in source.meant | source.mirrored:
            why = left.moved or "its table was dropped or renamed, or is not selected by the setting `tables`"
            yield warning(
                ProblemCode.MIRROR_NOT_FOLLOWED,
                f"mirror {name}", f"stays at {left.lsn} and is no longer updated: {why}",
                f"if it is not needed, delete it with `pgcdc forget {name.shell}`",
            )  # fmt: skip


def _untaken(facts: Facts) -> Iterator[Problem]:
    """Problems for rows that were published but are in no mirror."""
    states = {table.name: table.state for table in facts.tables}
    for lost in facts.untaken:
        rows = lost.rows
        what = (
            f"has {rows.rows} rows in the change log, between LSNs {rows.start} and {rows.end}, that are in no mirror"
        )
        if lost.table is None:
            yield warning(
                ProblemCode.ROWS_IN_NO_MIRROR,
                f"table {rows.name}", f"{what}: it was neither a followed table nor a part of one",
                "if the table was dropped, do nothing; to mirror it, run `pgcdc setup`, then `pgcdc sync`; otherwise "
                "remove it from the publication. This warning ends when retention removes the rows from the change log",
            )  # fmt: skip
        elif not lost.held and states.get(lost.table) is not None and states[lost.table].readable:
            yield error(
                ProblemCode.ROWS_IN_NO_MIRROR, f"table {lost.table}",
                f"{what}, and the table's copy does not contain them",
                f"run `pgcdc snapshot {lost.table.shell}`",
            )  # fmt: skip


def _missing(
    tables: Sequence[Table], published: frozenset[TableName], present: Sequence[PublicationFacts],
    refused: frozenset[TableName],
) -> Iterator[Problem]:  # fmt: skip
    """``refused``: relations whose updates or deletes PostgreSQL refuses. If a publication has only one of the two
    kinds, PostgreSQL executes the other kind, and the mirror does not get it."""
    for table in tables:
        storage = {leaf.name for leaf in table.leaves} if table.partitioned else {table.name}
        if table.name not in published and storage - published:
            lacking = ", ".join(str(name) for name in sorted(storage - published))
            yield error(
                ProblemCode.TABLE_UNPUBLISHED,
                f"table {table.name}", f"is no longer published (no publication lists {lacking}): its "
                "changes are being lost",
                "run `pgcdc setup`, then `pgcdc sync`, which copies the table again",
            )  # fmt: skip
            continue
        carriers = _carriers(table, present)
        if not carriers:
            continue  # A partitioned table without partitions has no leaf that could be published.
        updates = table.updates_seen or not refused.isdisjoint({table.name, *storage})
        yield from _operations(f"table {table.name}", carriers, updates=updates)


def _operations(thing: str, carriers: Sequence[PublicationFacts], *, updates: bool) -> Iterator[Problem]:
    wanted = ["insert", "update", "delete"] if updates else ["insert"]
    lacking = [kind for kind in wanted if not any(getattr(publication, kind) for publication in carriers)]
    names = ", ".join(publication.name for publication in carriers)
    if lacking:
        kinds = " and ".join(lacking)
        yield error(
            ProblemCode.PUBLICATION_LACKS_CHANGES,
            thing,
            f"is published without {kinds}",
            f"let publication {names} publish them, then copy the table again with `pgcdc snapshot`",
        )
    elif not any(publication.truncate for publication in carriers):
        yield warning(
            ProblemCode.PUBLICATION_LACKS_TRUNCATE,
            thing, "is published without truncate: it is copied again after TRUNCATE, VACUUM FULL or CLUSTER",
            f"let publication {names} publish truncate too",
        )  # fmt: skip


def _outside(facts: Facts) -> Iterator[Problem]:
    """Problems for partitions whose rows logical decoding does not send, so that no mirror can have them."""
    for table in facts.catalog.tables if facts.catalog is not None else ():
        for leaf in table.outside:
            if leaf.oid != table.oid:
                yield warning(ProblemCode.PARTITION_OUTSIDE, f"table {table.name}",
                              f"is not mirrored completely, because {leaf}", leaf.do)  # fmt: skip


def _left_out(facts: Facts) -> dict[TableName, str]:
    """For each table, the kinds of changes that the publication leaves out; empty for a publication that setup made."""
    if facts.source is None or facts.catalog is None or facts.source.ours:
        return {}
    present = [publication for publication in facts.source.publications.values() if publication]
    found: dict[TableName, str] = {}
    for table in facts.catalog.tables:
        carriers = _carriers(table, present)
        lacking = [kind for kind in ("update", "delete") if not any(getattr(one, kind) for one in carriers)]
        if carriers and lacking:
            found[table.name] = " and ".join(lacking)
    return found


def _carriers(table: Table, present: Sequence[PublicationFacts]) -> list[PublicationFacts]:
    """The publications that list the table, under its own name or a leaf's name."""
    names = {table.name, *(leaf.name for leaf in table.leaves), *(leaf.name for leaf in table.outside)}
    return [publication for publication in present if publication.tables & names]


def _identities(facts: Facts) -> Iterator[Problem]:
    left_out = _left_out(facts)
    tables = facts.catalog.tables if facts.catalog is not None else ()
    partitioned = {table.name for table in tables if table.partitioned}
    leafless = {table.name for table in tables if table.partitioned and not table.leaves}
    if facts.source is not None:
        # If setup did not make the publication, the owner may have published tables without a replica identity on
        # purpose. For a table that is already known as inserts-only, this is therefore a warning.
        known = frozenset() if facts.source.ours else frozenset(t.name for t in facts.tables if not t.updates_seen)
        for name in sorted(facts.source.without_identity):
            yield Problem(
                "warning" if name in known else "error",
                f"table {name}", "has no usable replica identity, so UPDATE and DELETE fail on the source",
                "give it a primary key or REPLICA IDENTITY FULL, or take it out of the publication",
                ProblemCode.TABLE_WITHOUT_IDENTITY,
            )  # fmt: skip
    for table in facts.tables:
        if facts.source is not None and table.name in facts.source.without_identity:
            continue
        if not table.updates_seen and facts.source is not None and table.name in facts.source.followable:
            yield warning(
                ProblemCode.TABLE_INSERTS_ONLY,
                f"table {table.name}", "has a usable replica identity now, but is published for inserts only: updates "
                "and deletes are not replicated",
                "run `pgcdc setup`, then `pgcdc sync`, which copies the table again",
            )  # fmt: skip
        elif table.name in leafless:
            # A partitioned table without partitions has no rows. Its first partition will decide whether updates are
            # published.
            continue
        elif not table.updates_seen and table.name in left_out:
            yield warning(
                ProblemCode.TABLE_INSERTS_ONLY,
                f"table {table.name}", f"is published without {left_out[table.name]}: updates and deletes of this "
                "table are not applied", f"let its publication publish {left_out[table.name]} too; the table is then "
                "copied again",
            )  # fmt: skip
        elif not table.updates_seen:
            whole = identity_full(str(table.name), partitioned=table.name in partitioned)
            yield warning(
                ProblemCode.TABLE_INSERTS_ONLY,
                f"table {table.name}", "has no usable replica identity: updates and deletes are not replicated",
                f"give it a primary key, or {whole}; then run `pgcdc setup`",
            )  # fmt: skip


def _tables(facts: Facts) -> Iterator[Problem]:
    for table in facts.tables:
        if table.state is TableState.SET_ASIDE:
            where = f" at {table.lsn}" if table.lsn is not None else ""
            yield error(
                ProblemCode.TABLE_SET_ASIDE,
                f"table {table.name}", f"was set aside{where}, so its mirror is no longer updated: "
                f"{table.reason or 'no reason given'}",
                _back(table),
            )  # fmt: skip
        elif table.state.readable and table.reason:
            yield error(
                ProblemCode.MIRROR_CHANGED_BY_OTHERS,
                f"table {table.name}", f"has a mirror that does not match the source: {table.reason}",
                f"`pgcdc verify {table.name.shell}` lists rows that differ, `pgcdc snapshot {table.name.shell}` copies "
                "the table again",
            )  # fmt: skip
        elif table.state is TableState.WAITING and table.reason:
            yield warning(
                ProblemCode.TABLE_WAITS,
                f"table {table.name}",
                f"waits for a copy: {table.reason}",
                "`pgcdc sync` copies it",
            )
    if facts.source is None:
        return
    for table in facts.tables:
        if table.state.readable and table.replay_lsn is not None:
            lag = facts.source.flush_lsn - table.replay_lsn
            if lag > LAG_BYTES:
                yield warning(
                    ProblemCode.TABLE_LAGS,
                    f"table {table.name}",
                    f"is {size(lag)} of WAL behind the source",
                    "let `pgcdc sync` catch up",
                )


def _back(table: TableFacts) -> str:
    do = way_back(table.name, refused=table.refused)
    if table.kept_until is None:
        return do
    until = table.kept_until.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"{do}; or fix the cause, and run `pgcdc heal {table.name.shell}`: the change log keeps the missing changes at "
        f"least until {until}"
    )


def _messages(facts: Facts) -> Iterator[Problem]:
    """A problem if the feed of messages is not complete to the newest consistent point, at which the mirrors are
    read."""
    found, thing = facts.messages, FEED_OF_MESSAGES
    if found is None or facts.log is None:
        return
    published = facts.log.published
    if found.failure is not None:
        yield error(
            ProblemCode.MESSAGES_UNREADABLE,
            thing,
            f"cannot continue: {found.failure}",
            "check that the feed's folder in the lake exists and is complete",
        )
    elif found.complete_to is not None and published is not None and found.complete_to < published:
        yield error(
            ProblemCode.MESSAGES_BEHIND,
            thing, f"is at {found.complete_to}, below the newest consistent point {published}",
            "no message is lost: the change log has all of them. Run `pgcdc sync`; its output names the cause",
        )  # fmt: skip


def _last_runs(facts: Facts) -> Iterator[Problem]:
    """A problem for each kind of operation whose last run failed. A failed sync is an error, because the lake does not
    follow the source. Any other failed operation is a warning."""
    for kind, outcome in facts.last.items():
        if outcome.failed is not None:
            severity: Severity = "error" if kind == OperationKind.SYNC else "warning"
            code = ProblemCode.OPERATION_FAILED
            yield Problem(severity, f"last {kind}", _words(outcome.failed), outcome.failed.do, code)


def _unregistered(facts: Facts) -> Iterator[Problem]:
    """A warning for each entry that the catalog of query engines lacks. Replication is not affected."""
    for name, reason in facts.unregistered.items():
        thing = f"catalog entry of table {name}" if name else "catalog of query engines"
        do = "see docs/guides/catalogs.md; pgcdc tries again at the next consistent point"
        yield warning(ProblemCode.REGISTRY_BEHIND, thing, f"is not up to date: {reason}", do)


def _words(failed: Failure) -> str:
    what = f"{failed.thing}: {failed.what}" if failed.thing else failed.what
    where = f", at LSN {failed.lsn}" if failed.lsn else ""
    return f"(`pgcdc {failed.command}`, {failed.at:%Y-%m-%d %H:%M:%S} UTC) failed: {what}{where}"


RULES = (
    _publications, _unpublished, _left, _untaken, _outside, _identities, _tables, _messages, _last_runs, _unregistered,
)  # fmt: skip
