"""The progress of every table: its state, its effective ``replay_lsn``, and its mirror's version. A run reads the
progress from the lake and the target once, at its start, and updates it in memory with every copy and turn. So tables
without changes cost nothing in a turn."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import LakeError, NotRepairable, UnknownTable, UsageError
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.flow.standing import ListedTables, Standings
from pgcdc_assets.mirror.target import Target
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.structure.record import TableRecord, UnreadRows


class TablesProgress:
    """The records of all tables of the catalog. ``log_began``, ``log_start``: see :class:`Standings`."""

    def __init__(self, layout: Layout, catalog: Catalog, target: Target, log_began: Lsn, log_start: Lsn) -> None:
        self._target = target
        self._noting = Lock()
        """Held while records are replaced, because :meth:`copying` replaces records in the copies' thread."""
        self.states = TableStates(layout)
        self._standings = Standings(target, self.states, log_began, log_start)
        self.points = ConsistentPoints(layout)
        self.published = ZERO
        """The LSN of the last point that this run has published."""
        rows = self.states.all()
        self.recovered = target.recover(rows)
        """By mirror: incomplete log files, left by a power failure. They were renamed, so that no reader uses them."""
        self._tables = {table.name: self._standings.load(table, rows) for table in catalog.tables}
        self.listed = ListedTables(self.points, self._tables)
        self._note_away()
        self._note_changed()

    def _note_away(self) -> None:
        """Find the tables that were listed by a point since their last copy, but are not in the newest point: each had
        another name at that point's LSN. Points list such a table again only from the next catalog check's LSN on."""
        newest = self.points.newest()
        if newest is None:
            return
        for record in self.followed():
            name = record.table.name
            if name not in newest.tables and self._was_listed(name):
                self._tables[name] = replace(record, listed_from=None)

    def _was_listed(self, name: TableName) -> bool:
        listing, held = self.points.listing(name), self._target.standing(name)
        return listing is not None and held is not None and listing.replay_lsn >= held.snapshot_lsn

    def __contains__(self, name: TableName) -> bool:
        return name in self._tables

    def __getitem__(self, name: TableName) -> TableRecord:
        try:
            return self._tables[name]
        except KeyError:
            raise UnknownTable("is not among the published tables", thing=str(name)) from None

    def __iter__(self) -> Iterator[TableRecord]:
        return iter(list(self._tables.values()))

    def waiting(self) -> list[Table]:
        """The tables that wait for a copy, in the catalog's order."""
        return [entry.table for entry in self._tables.values()
                if entry.state is TableState.WAITING and not entry.reshaping and entry.former is None]  # fmt: skip

    def renamed_tables(self) -> list[TableRecord]:
        """The tables whose mirrors still have the former names."""
        return [entry for entry in self._tables.values() if entry.former is not None]

    def followed(self) -> list[TableRecord]:
        return [entry for entry in self._tables.values() if entry.state.readable]

    @property
    def router(self) -> Router:
        """Finds the followed table to which a relation's rows belong."""
        return Router.of(entry.table for entry in self.followed())

    def set_aside(self) -> list[TableRecord]:
        return [entry for entry in self._tables.values() if entry.state is TableState.SET_ASIDE]

    @property
    def replay_lsn(self) -> Lsn:
        """The lowest position of the followed tables; ZERO if there are none."""
        return min((entry.replay_lsn for entry in self.followed()), default=ZERO)

    @property
    def highest(self) -> Lsn:
        """The highest position that the newest point or any table has in the lake."""
        newest = self.points.newest()
        return max([newest.replay_lsn if newest else ZERO, *(entry.replay_lsn for entry in self._tables.values())])

    def request_copy(self, tables: Sequence[TableName]) -> None:
        """Have the next copy include these tables."""
        asked = [self[name] for name in tables]
        for entry in asked:
            waiting = replace(entry, state=TableState.WAITING, reason=None, refused=False, former=None)
            self._tables[entry.table.name] = waiting

    def heal(self, tables: Sequence[TableName]) -> None:
        """Resume tables that were set aside, from their mirrors' positions. A table whose cause still exists is set
        aside again. UsageError for a table that is not set aside or cannot be mirrored. NotRepairable if the log lacks
        changes."""
        healed = {name: self._healed(self[name]) for name in tables}
        for name, entry in healed.items():
            self.states.set(entry.table, TableState.CATCHING_UP, entry.replay_lsn)
            self._tables[name] = replace(entry, listed_from=None)

    def _healed(self, entry: TableRecord) -> TableRecord:
        name = entry.table.name
        if entry.state is not TableState.SET_ASIDE or entry.refused:
            why = (
                f"cannot be mirrored: {entry.reason}"
                if entry.refused
                else "is not set aside, so there is nothing to heal"
            )
            raise UsageError(why, thing=str(name))
        held, copied_anew = self._target.standing(name), f"copy it again: `pgcdc snapshot {name.shell}`"
        if held is None or held.oid not in (None, entry.table.oid):
            raise NotRepairable("contains no copy of the table", thing=f"mirror {name}", do=copied_anew)
        if not self._standings.in_log(held):
            what = f"is at {held.replay_lsn}, but the log begins at {self._standings.log_begins}"
            raise NotRepairable(what, thing=f"mirror {name}", lsn=held.replay_lsn, do=copied_anew)
        return replace(entry, state=TableState.CATCHING_UP, replay_lsn=held.replay_lsn, version=held.version,
                       unchanged_from=held.recorded, reason=None)  # fmt: skip

    def must_copy(self, name: TableName, lsn: Lsn, reason: str) -> None:
        """Have this or a later run copy the table again. Its mirror is wrong at ``lsn``, and maybe at lower LSNs."""
        entry = self[name]
        # The stored LSN is above the mirror's snapshot_lsn, so a later run sees that the new copy is not committed yet.
        self.states.set(entry.table, TableState.COPYING, Lsn(max(entry.replay_lsn, lsn) + 1), reason)
        self._tables[name] = replace(entry, state=TableState.WAITING, reason=reason, refused=False, former=None)

    def copying(self, tables: Iterable[Table], consistent_point: Lsn) -> None:
        copied = list(tables)
        self.states.set_all(copied, TableState.COPYING, consistent_point)
        with self._noting:
            for table in copied:
                columns = self._tables[table.name].columns if table.name in self._tables else None
                self._tables[table.name] = TableRecord(table, TableState.COPYING, consistent_point, columns=columns)

    def not_copied(self, name: TableName, reason: str) -> bool:
        """Record why a copy could not read the table, which waits for the next copy. Returns whether the reason is
        new."""
        entry = self._tables.get(name)
        if entry is None or entry.state not in (TableState.COPYING, TableState.WAITING) or entry.reason == reason:
            return False
        lsn = entry.replay_lsn
        if entry.state is TableState.WAITING:
            # The copy was not begun. An older mirror must not be mistaken for the copy (see :meth:`must_copy`).
            row = self.states.all().get(name)
            lsn = Lsn(max(lsn, row.lsn if row else ZERO) + 1)
        self.states.set(entry.table, TableState.COPYING, lsn, reason)
        self._tables[name] = replace(entry, state=TableState.WAITING, reason=reason, refused=False)
        return True

    def copied(self, table: Table, consistent_point: Lsn, version: int) -> None:
        """Record a committed copy. The copy becomes durable before its state is stored, so that no older mirror is
        mistaken for the copy."""
        self._target.settle({table.name: version})
        self.states.set(table, TableState.CATCHING_UP, consistent_point)
        # Points may list the table at once: the snapshot showed it under its present name.
        self._tables[table.name] = TableRecord(table, TableState.CATCHING_UP, consistent_point, version)

    def moved(self, name: TableName, replay_lsn: Lsn, version: int | None = None, table: Table | None = None) -> None:
        """Set a table's position after a turn. The position never becomes lower."""
        entry = self[name]
        if table is not None and table != entry.table:
            self.states.set(table, TableState.CATCHING_UP, replay_lsn, entry.reason)
        self._tables[name] = replace(
            entry,
            table=table or entry.table,
            replay_lsn=max(entry.replay_lsn, replay_lsn),
            version=entry.version if version is None else version,
            unchanged_from=(entry.unchanged_from or entry.replay_lsn) if version is None else None,
        )

    def columns_came(self, name: TableName, columns: Marks, position: Callable[[], Lsn]) -> Lsn:
        """Record that the catalog shows new columns that are NULL in all older rows. Returns the LSN at which these
        columns were first seen, which is ``position()`` if this is the first time. Row messages below that LSN may
        already contain the columns. No point lists the table until its mirror has the columns. ``columns``: the
        :data:`Marks` of all columns."""
        entry = self[name]
        seen = entry.since_columns
        if seen is None or seen[1] != columns:
            seen = position(), columns
            self._tables[name] = replace(entry, since_columns=seen)
        return seen[0]

    def hold(self, name: TableName, unread: UnreadRows) -> None:
        """Keep the table at its position until the next catalog check."""
        self._tables[name] = replace(self[name], unread=unread)

    def checked(self, name: TableName, reported: str, *, decided: bool) -> None:
        """Note what a catalog check reported. ``decided``: the table no longer waits for the check."""
        entry = replace(self[name], reported=reported)
        self._tables[name] = replace(entry, unread=None) if decided else entry

    def note_columns(self, live: Iterable[Table], altered: Container[TableName]) -> None:
        """Record attnum and xmin of all columns in a catalog check. Points list the ``altered`` tables again only from
        the LSN that the next :meth:`listed_from` sets."""
        with self._noting:
            for table in live:
                entry = replace(self[table.name], columns=table.marks.columns)
                self._tables[table.name] = replace(entry, listed_from=None) if table.name in altered else entry

    def listed_from(self, position: Lsn) -> None:
        """Let points list all tables from ``position`` on: the catalog showed their present names before this LSN."""
        with self._noting:
            for name, entry in self._tables.items():
                if entry.listed_from is None:
                    self._tables[name] = replace(entry, listed_from=position)

    @property
    def needs_catalog_check(self) -> bool:
        return any(entry.needs_catalog_check for entry in self)

    def reshaping(self, name: TableName) -> None:
        """Note that the structure or name of a table's mirror is being changed."""
        self._tables[name] = replace(self[name], reshaping=True)

    def reshaped(self, table: Table, version: int) -> bool:
        """Record that a mirror has another structure; returns whether its table is still followed. The mirror becomes
        durable before its state is stored, because the structure decides how later rows are read."""
        entry = replace(self[table.name], reshaping=False, since_columns=None)
        self._tables[table.name] = entry
        if not entry.state.readable:
            return False
        self._target.settle({table.name: version})
        self.states.set(table, TableState.CATCHING_UP, entry.replay_lsn, entry.reason)
        self._tables[table.name] = replace(entry, table=table, version=version)
        passed(FaultPoint.RESHAPE_RECORDED)
        return True

    def renamed(self, name: TableName, former: TableName, version: int) -> bool:
        """Record that the mirror of ``former`` now has the table's new name; returns whether the table is followed. The
        table waits for a copy if the log lacks changes above the mirror's position, or if a copy was requested."""
        entry, held = self[name], self._target.standing(name)
        self._tables[name] = replace(entry, reshaping=False)
        if entry.former != former or entry.state is not TableState.WAITING:
            return False
        if held is None or not self._standings.in_log(held):
            self.request_copy([name])
            return False
        self._target.settle({name: version})
        self.states.set(entry.table, TableState.CATCHING_UP, held.replay_lsn, entry.reason)
        if former not in self._tables:
            # A crash before this line leaves mirrors under both names. The mirror at the higher position is then used.
            self.states.set(
                replace(entry.table, name=former), TableState.MOVED, held.replay_lsn, f"its table was renamed to {name}"
            )
        passed(FaultPoint.RENAME_RECORDED)
        self._tables[name] = replace(entry, state=TableState.CATCHING_UP, replay_lsn=held.replay_lsn, version=version,
                                     unchanged_from=held.recorded, reshaping=False, former=None)  # fmt: skip
        return True

    def unchanged(self, name: TableName, now: Table) -> None:
        """Record that a followed table still has the structure of its mirror. The table's present relfilenodes and
        column marks are recorded too, because later checks compare them."""
        entry = self[name]
        self._tables[name] = entry = replace(entry, since_columns=None)
        stores = {leaf.oid: leaf for leaf in now.leaves}
        leaves = tuple(replace(leaf, files=stores[leaf.oid].files) for leaf in entry.table.leaves)
        marks = replace(entry.table.marks, files=now.marks.files, columns=now.marks.columns)
        table = replace(entry.table, leaves=leaves, marks=marks)
        if table != entry.table:
            self.states.set(table, TableState.CATCHING_UP, entry.replay_lsn, entry.reason)
            self._tables[name] = replace(entry, table=table)

    def commented(self, name: TableName, comments: tuple[tuple[int, str], ...], version: int | None) -> None:
        """Record, durably, that these comments were written to a followed mirror. ``version``: the mirror's version
        with the comments; None if the mirror could not store the comments."""
        entry = self[name]
        table = replace(entry.table, comments=comments)
        if version is not None:
            self._target.settle({name: version})
        self.states.set(table, TableState.CATCHING_UP, entry.replay_lsn, entry.reason)
        self._tables[name] = replace(entry, table=table, version=entry.version if version is None else version)

    def put_aside(self, name: TableName, lsn: Lsn, reason: str) -> None:
        entry = self[name]
        self.states.set(entry.table, TableState.SET_ASIDE, lsn, reason)
        self._tables[name] = replace(entry, state=TableState.SET_ASIDE, reason=reason, reshaping=False, former=None)

    def refuse(self, table: Table, reason: str) -> None:
        """Set the table aside because no mirror can contain it. Not stored, because each catalog check finds the
        reason."""
        entry = self[table.name]
        self._tables[table.name] = replace(entry, state=TableState.SET_ASIDE, reason=reason, refused=True)

    def gone(self, published: Container[TableName]) -> list[TableName]:
        """Stop following the tables that are no longer ``published``; returns their names. Their stored states stay. If
        such a table is published again, the marks in its state show that it was not published for some time."""
        lost = [
            name for name, entry in self._tables.items()
            if name not in published and entry.state is not TableState.COPYING
        ]  # fmt: skip
        for name in lost:
            del self._tables[name]
        return lost

    def renamed_among(self, published: Iterable[Table]) -> None:
        """Remove the entries whose names belong to other known tables now. :meth:`found` adds those tables."""
        oids = {entry.table.oid for entry in self}
        for table in published:
            entry = self._tables.get(table.name)
            if entry is None or entry.reshaping or entry.state is TableState.COPYING:
                continue
            if entry.table.oid != table.oid and table.oid in oids:
                del self._tables[table.name]

    def found(self, published: Iterable[Table]) -> list[TableName]:
        """Add new published tables; returns their names. A table followed before resumes at its mirror's position."""
        new = [table for table in published if table.name not in self._tables]
        rows = self.states.all() if new else {}
        for table in new:
            self._tables[table.name] = replace(self._standings.load(table, rows), listed_from=None)
        return [table.name for table in new]

    def publish(self, lsn: Lsn, transform_lsn: Lsn, messages: Lsn | None = None) -> bool:
        """Publish a consistent point of all tables that are exactly at ``lsn``; returns whether the point lists every
        followed table. ``messages``: the position of the feed of messages, if the feed is complete to ``lsn``.

        LakeError, before anything is written, if ``lsn`` is above ``transform_lsn``, the log's recorded position. A
        restored or promoted source is compared with the log only, so a point above the log could have an LSN that this
        source never had. No point is made below the newest point. A table whose copy took long is behind the other
        tables, and a newly copied table is ahead of them: a point lists such a table once it is at the same LSN.
        """
        if lsn > transform_lsn:
            raise LakeError(
                f"would be at {lsn}, above the end of the change log, {transform_lsn}",
                thing="consistent point", do="nothing was published: run `pgcdc sync`, and report this",
            )  # fmt: skip
        versions = self.listed.versions_at(lsn)
        newest = self.points.newest()
        if not versions or (newest is not None and lsn < newest.replay_lsn):
            return False
        self._target.settle(versions)
        # Changes by other writers are noted before a point lists these versions.
        self._note_changed()
        self._target.publish(lsn, versions, self.changed, messages, self.listed.kept_at(lsn))
        self.published = lsn
        for name in versions:
            self._tables[name] = replace(self._tables[name], state=TableState.STREAMING)
        return len(versions) == len(self.followed())

    def republish(self, versions: Mapping[TableName, int]) -> None:
        """Publish the newest point again with these versions of mirrors, which are at the point's LSN. The point's
        entries for other tables stay unchanged. Does nothing if the point has these versions already."""
        newest = self.points.newest()
        if newest is None or versions.items() <= newest.tables.items():
            return
        self._target.settle(versions)
        self._note_changed()
        self._target.publish(newest.replay_lsn, versions, self.changed, newest.messages, beside=newest)

    def publish_repaired(self, name: TableName) -> None:
        """Publish the newest point again with the repaired mirror, if the point lists the table and the mirror is at
        the point's LSN. Without this, readers would wait for the next change, which may be days away."""
        newest = self.points.newest()
        if newest is not None and name in newest.tables:
            now = self.listed.versions_at(newest.replay_lsn)
            self.republish({name: now[name]} if name in now else {})

    @property
    def changed(self) -> dict[TableName, str]:
        """The followed tables whose mirrors have rows that another writer changed, with a description of the change. A
        new copy removes the table's entry."""
        return {entry.table.name: entry.reason for entry in self.followed() if entry.reason is not None}

    def _note_changed(self) -> None:
        for name, what in self._target.changed.items():
            entry = self._tables.get(name)
            if entry is not None and entry.state.readable and entry.reason is None:
                self.states.set(entry.table, TableState.CATCHING_UP, entry.replay_lsn, what)
                self._tables[name] = replace(entry, reason=what)

    def reread_versions(self) -> None:
        """Read the versions of the mirrors again, so that ``verify`` sees the changes of other writers."""
        for entry in self.followed():
            with contained() as failed:
                version = self._target.version(entry.table.name)
            if failed.reason is not None:
                self.put_aside(entry.table.name, entry.replay_lsn, failed.reason)
                continue
            self._tables[entry.table.name] = replace(entry, version=version)
