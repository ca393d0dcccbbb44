"""The progress of every table: its state, its effective ``replay_lsn``, and its mirror's version. A run reads the
progress from the lake once, at its start, and then updates it in memory after every copy and turn. So a turn need not
read tables without changes."""

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
from pgcdc_assets.errors import LakeError, NotRepairable, UnknownTable, UsageError
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.plan import Router
from pgcdc_assets.flow.standing import ListedTables, Standings
from pgcdc_assets.mirror.target import Target
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.structure.record import TableRecord, TableState, UnreadRows


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
        """The former names of incomplete files that a power failure left in the mirrors' Delta logs, by the mirror's
        folder. The files are already renamed, so that readers ignore them."""
        self._tables = {table.name: self._standings.load(table, rows) for table in catalog.tables}
        self.listed = ListedTables(self.points, self._tables)
        self._note_away()
        self._note_changed()

    def _note_away(self) -> None:
        """Find the followed tables that a point has listed since their last copy, but that the newest point does not
        list. At the newest point's LSN, such a table had another name, or its mirror lacked rows. So points list it
        again only at or above the LSN of the next catalog check.

        The same is done with a partitioned table whose mirror has changed since the newest point or, if this point does
        not list the table, since its copy. The run that changed the mirror may have ended before it left the table out
        of a point (:meth:`unlist`)."""
        newest = self.points.newest()
        for record in self.followed():
            name = record.table.name
            listed_at = newest.replay_lsn if newest is not None and name in newest.tables else ZERO
            changed = record.table.partitioned and record.replay_lsn > listed_at
            if listed_at > ZERO and not changed:
                continue
            listing, held = self.points.listing(name), self._target.standing(name)
            if held is None:
                continue
            since_copy = listing is not None and listing.replay_lsn >= held.snapshot_lsn
            if since_copy or (changed and record.replay_lsn > held.snapshot_lsn):
                self._tables[name] = replace(record, listed_from=None)

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
        """The renamed tables whose mirrors still have the former names."""
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
        """The highest LSN in the lake: the newest point's, or that of a table above it."""
        newest = self.points.newest()
        return max([newest.replay_lsn if newest else ZERO, *(entry.replay_lsn for entry in self._tables.values())])

    def request_copy(self, tables: Sequence[TableName]) -> None:
        """Make these tables wait for a copy."""
        asked = [self[name] for name in tables]
        for entry in asked:
            waiting = replace(entry, state=TableState.WAITING, reason=None, refused=False, former=None)
            self._tables[entry.table.name] = waiting

    def heal(self, tables: Sequence[TableName]) -> None:
        """Follow tables again that were set aside, starting at their mirrors' positions. If the reason for which a
        table was set aside still exists, a later turn or catalog check sets it aside again. If another writer has
        changed rows of the mirror, the table is in :attr:`changed` again. UsageError for a table that is not set aside
        or cannot be mirrored. NotRepairable if the log no longer has all changes that the mirror lacks."""
        healed = {name: self._healed(self[name]) for name in tables}
        for name, entry in healed.items():
            self.states.set(entry.table, TableState.CATCHING_UP, entry.replay_lsn, entry.reason)
            self._tables[name] = replace(entry, listed_from=None)

    def _healed(self, entry: TableRecord) -> TableRecord:
        name = entry.table.name
        if entry.state is not TableState.SET_ASIDE or entry.refused:
            why = (
                f"cannot be mirrored: {entry.reason}"
                if entry.refused
                else "is not set aside, so `pgcdc heal` has nothing to do"
            )
            raise UsageError(why, thing=str(name))
        held, copied_anew = self._target.standing(name), f"copy it again: `pgcdc snapshot {name.shell}`"
        if held is None or held.oid not in (None, entry.table.oid):
            raise NotRepairable("contains no copy of the table", thing=f"mirror {name}", do=copied_anew)
        if not self._standings.in_log(held):
            begin = self._standings.log_begins
            what = f"is at {held.replay_lsn}, but the log begins at {begin}: the changes between these LSNs are lost"
            raise NotRepairable(what, thing=f"mirror {name}", lsn=held.replay_lsn, do=copied_anew)
        return replace(entry, state=TableState.CATCHING_UP, replay_lsn=held.replay_lsn, version=held.version,
                       unchanged_from=held.recorded, reason=self._target.changed.get(name))  # fmt: skip

    def must_copy(self, name: TableName, lsn: Lsn, reason: str) -> None:
        """Make the table wait for a new copy, because its mirror is wrong at ``lsn``, and maybe at lower LSNs."""
        entry = self[name]
        # The stored LSN is above the present copy's snapshot_lsn. So a later run sees that the new copy is missing.
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
        """Record why a copy could not read the table. The table waits for the next copy. Returns whether the reason
        differs from the last recorded reason."""
        entry = self._tables.get(name)
        if entry is None or entry.state not in (TableState.COPYING, TableState.WAITING) or entry.reason == reason:
            return False
        lsn = entry.replay_lsn
        if entry.state is TableState.WAITING:
            # The copy did not begin, so no LSN is stored for it. The stored LSN must be above the present copy's
            # snapshot_lsn (see :meth:`must_copy`).
            row = self.states.all().get(name)
            lsn = Lsn(max(lsn, row.lsn if row else ZERO) + 1)
        self.states.set(entry.table, TableState.COPYING, lsn, reason)
        self._tables[name] = replace(entry, state=TableState.WAITING, reason=reason, refused=False)
        return True

    def copied(self, table: Table, consistent_point: Lsn, version: int) -> None:
        """Record a committed copy. The copy is made durable before its state is stored. Otherwise, after a power cut,
        the state could claim a copy that is lost, and the older mirror would be used."""
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
        """Record that the catalog shows new columns that are NULL in all older rows. No point lists the table until its
        mirror has these columns. Returns the LSN at which a catalog check first showed the columns; at the first time,
        this is ``position()``. Row messages below that LSN may already contain the columns. ``columns``: the
        :data:`Marks` of all columns."""
        entry = self[name]
        seen = entry.since_columns
        if seen is None or seen[1] != columns:
            seen = position(), columns
            self._tables[name] = replace(entry, since_columns=seen)
        return seen[0]

    def hold(self, name: TableName, unread: UnreadRows) -> None:
        """Apply nothing to the table until the next catalog check, because the log has rows that do not fit its
        mirror."""
        self._tables[name] = replace(self[name], unread=unread)

    def checked(self, name: TableName, reported: str, *, decided: bool) -> None:
        """Note what a catalog check reported about the table. ``decided``: the check has also decided about
        :attr:`TableRecord.unread` rows, so they are forgotten."""
        entry = replace(self[name], reported=reported)
        self._tables[name] = replace(entry, unread=None) if decided else entry

    def note_columns(self, live: Iterable[Table], altered: Container[TableName]) -> None:
        """Record attnum and xmin of all columns in a catalog check. Points list the ``altered`` tables again only from
        the LSN that the next :meth:`listed_from` sets."""
        with self._noting:
            for table in live:
                entry = replace(self[table.name], columns=table.marks.columns)
                self._tables[table.name] = replace(entry, listed_from=None) if table.name in altered else entry

    def unlist(self, names: Iterable[TableName]) -> None:
        """Leave these tables out of points below the LSN that the next :meth:`listed_from` sets."""
        with self._noting:
            for name in names:
                self._tables[name] = replace(self[name], listed_from=None)

    def listed_from(self, position: Lsn) -> None:
        """Let points at or above ``position`` list the tables that had to wait for a catalog check. The check, which
        showed their present names, was made below this LSN."""
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
        """Record that a mirror has the new structure of ``table``; returns whether the table is still followed. The
        mirror is made durable before the structure is stored, because later rows are read with the stored structure."""
        entry = replace(self[table.name], reshaping=False, since_columns=None)
        self._tables[table.name] = entry
        table = replace(table, marks=table.marks.with_types(entry.table.marks))
        if not entry.state.readable:
            return False
        self._target.settle({table.name: version})
        self.states.set(table, TableState.CATCHING_UP, entry.replay_lsn, entry.reason)
        self._tables[table.name] = replace(entry, table=table, version=version)
        passed(FaultPoint.RESHAPE_RECORDED)
        return True

    def renamed(self, name: TableName, former: TableName, version: int) -> bool:
        """Record that the mirror of ``former`` is continued under the table's new name. Returns whether the table is
        followed. If not, it waits for a copy, because the log lacks changes above the mirror's position, or because a
        copy was requested."""
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
            # After a crash before this line, both names have a mirror. The next run uses the mirror at the higher
            # position.
            self.states.set(
                replace(entry.table, name=former), TableState.MOVED, held.replay_lsn, f"its table was renamed to {name}"
            )
        passed(FaultPoint.RENAME_RECORDED)
        self._tables[name] = replace(entry, state=TableState.CATCHING_UP, replay_lsn=held.replay_lsn, version=version,
                                     unchanged_from=held.recorded, reshaping=False, former=None)  # fmt: skip
        return True

    def types_seen(self, live: Iterable[Table]) -> None:
        """Record the types of columns of followed tables that a catalog check sees for the first time, so that later
        checks see a change of them. One type may be used in many tables, so their states are stored together."""
        seen: list[TableRecord] = []
        for now in live:
            entry = self[now.name]
            table = replace(entry.table, marks=entry.table.marks.with_types(now.marks))
            if entry.followed and table != entry.table:
                seen.append(replace(entry, table=table))
        self.states.set_records(seen)
        self._tables.update((record.table.name, record) for record in seen)

    def unchanged(self, name: TableName, now: Table) -> None:
        """Record that a followed table still has the structure of its mirror. The table's present relfilenodes, and the
        :data:`Marks` of its columns, are recorded too, because later checks compare them."""
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
        """Store that these comments were written to a followed mirror. ``version``: the mirror's version with the
        comments; None if the mirror could not store them, which is then not tried again."""
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
        """Set the table aside because no mirror can contain it. This is not stored: each catalog check finds the reason
        again."""
        entry = self[table.name]
        self._tables[table.name] = replace(entry, state=TableState.SET_ASIDE, reason=reason, refused=True)

    def gone(self, published: Container[TableName]) -> list[TableName]:
        """Stop following the tables that are no longer ``published``; returns their names. Their stored states stay. If
        such a table is published again, the catalog rows recorded in its state (:class:`TableMarks`) show that it was
        not published in between, so that changes are missing."""
        lost = [
            name for name, entry in self._tables.items()
            if name not in published and entry.state is not TableState.COPYING
        ]  # fmt: skip
        for name in lost:
            del self._tables[name]
        return lost

    def renamed_among(self, published: Iterable[Table]) -> None:
        """If a known table now has the name that another table had, remove the other table's record of this name.
        :meth:`found` then adds the renamed table under its new name."""
        oids = {entry.table.oid for entry in self}
        for table in published:
            entry = self._tables.get(table.name)
            if entry is None or entry.reshaping or entry.state is TableState.COPYING:
                continue
            if entry.table.oid != table.oid and table.oid in oids:
                del self._tables[table.name]

    def found(self, published: Iterable[Table]) -> list[TableName]:
        """Add the published tables that have no record; returns their names. A table that was followed before continues
        from its mirror's position."""
        new = [table for table in published if table.name not in self._tables]
        rows = self.states.all() if new else {}
        for table in new:
            self._tables[table.name] = replace(self._standings.load(table, rows), listed_from=None)
        return [table.name for table in new]

    def publish(self, lsn: Lsn, transform_lsn: Lsn, messages: Lsn | None = None) -> bool:
        """Publish a consistent point of all tables that are exactly at ``lsn``; returns whether the point lists every
        followed table. A table whose copy took long is below the other tables, and a newly copied table is above them.
        A point lists such a table only once it is at the same LSN. No point is made below the newest point.
        ``messages``: the position of the feed of messages, if the feed is complete to ``lsn``.

        LakeError, before anything is written, if ``lsn`` is above ``transform_lsn``, the log's recorded position. After
        a restore of the source, pgcdc can compare only transactions in the log with those that the source sends again.
        A point above the log could have an LSN that the restored source never had.
        """
        if lsn > transform_lsn:
            raise LakeError(
                f"would be at {lsn}, above the end of the change log, {transform_lsn}",
                thing="consistent point", do="no point was made: run `pgcdc sync`, and report this bug of pgcdc",
            )  # fmt: skip
        versions = self.listed.versions_at(lsn)
        newest = self.points.newest()
        if not versions or (newest is not None and lsn < newest.replay_lsn):
            return False
        self._target.settle(versions)
        # Making versions durable also finds changes by other writers. They are noted before a point lists the versions.
        self._note_changed()
        self._target.publish(lsn, versions, self.changed, messages, self.listed.kept_at(lsn))
        self.published = lsn
        for name in versions:
            self._tables[name] = replace(self._tables[name], state=TableState.STREAMING)
        return len(versions) == len(self.followed())

    def republish(self, versions: Mapping[TableName, int]) -> None:
        """Publish the newest point again, with these versions of mirrors, whose rows are those of the point's LSN.
        Entries for other tables do not change, nor do entries for mirrors with rows that another writer changed: the
        point may list a version from before that change. Does nothing if the point has all other versions already."""
        newest = self.points.newest()
        if newest is not None and not versions.items() <= newest.tables.items():
            self._target.settle(versions)
            right = {name: version for name, version in versions.items() if name not in self._target.changed}
            self._republish(newest, right)

    def _republish(self, newest: Point, versions: Mapping[TableName, int]) -> None:
        """Publish the newest point again, with these versions, also of mirrors that another writer changed."""
        if versions.items() <= newest.tables.items():
            return
        self._target.settle(versions)
        self._note_changed()
        self._target.publish(newest.replay_lsn, versions, self.changed, newest.messages, beside=newest)

    def publish_repaired(self, name: TableName) -> None:
        """Publish the newest point again with the repaired mirror, if the point lists the table and the mirror is at
        the point's LSN. Otherwise readers would see the repaired rows only after the next change of any table."""
        newest = self.points.newest()
        if newest is not None and name in newest.tables:
            now = self.listed.versions_at(newest.replay_lsn)
            self._republish(newest, {name: now[name]} if name in now else {})

    @property
    def needed_listings(self) -> list[TableName]:
        """The tables for which maintenance keeps the newest point that lists the table. These are the followed tables,
        and the tables set aside whose mirrors have rows that another writer changed. The state of such a table does not
        contain this change, so :meth:`heal` needs the point, as long as the log has the changes above the mirror's
        position."""
        changed = [entry for entry in self.set_aside() if entry.table.name in self._target.changed]
        # The position is ZERO if the mirror could not be read.
        healable = [one for one in changed if not ZERO < one.replay_lsn < self._standings.log_start]
        return [entry.table.name for entry in [*self.followed(), *healable]]

    @property
    def changed(self) -> dict[TableName, str]:
        """The followed tables with rows that another writer changed in the mirror, with a description of the change. A
        table stays here until it is copied again."""
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
