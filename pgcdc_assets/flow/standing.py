"""Reads a table's state and position from the lake: from the stored states, and from the table's mirror. Also compares
the tables with the newest consistent point, and finds which tables the next point may list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.failures import contained
from pgcdc_assets.mirror.target import Generation, Target
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import StateRow, TableStates
from pgcdc_assets.structure.record import TableRecord, TableState
from pgcdc_assets.structure.rowshapes import together


class Standings:
    """Reads the records of tables. ``log_began``: the LSN at which the change log was created. ``log_start``: the
    lowest LSN that the log still contains; it rises when old batches are deleted. The log lacks changes that a mirror
    needs if the mirror's copy is below ``log_began``, or its position below ``log_start``. Such a table must be copied
    again."""

    def __init__(self, target: Target, states: TableStates, log_began: Lsn, log_start: Lsn) -> None:
        self._target = target
        self._states = states
        self._log_began = log_began
        self.log_start = log_start

    @property
    def log_begins(self) -> Lsn:
        return max(self._log_began, self.log_start)

    def in_log(self, held: Generation) -> bool:
        """Whether the log contains all changes above the mirror's position."""
        return held.snapshot_lsn >= self._log_began and held.replay_lsn >= self.log_start

    def load(self, table: Table, rows: Mapping[TableName, StateRow]) -> TableRecord:
        """The table's record. If the mirror cannot be read, the table is set aside. ``rows``: the stored state of every
        table."""
        row = rows.get(table.name)
        with contained() as failed:
            found = self._found(table, row)
            without_mirror = found.state is TableState.WAITING and found.former is None
            return self._of_former(found, rows) if without_mirror else found
        if row is None or row.state is not TableState.SET_ASIDE or row.table is None:
            self._states.set(table, TableState.SET_ASIDE, ZERO if row is None else row.lsn, failed.told)
        return TableRecord(table, TableState.SET_ASIDE, reason=failed.told)

    def _found(self, table: Table, row: StateRow | None) -> TableRecord:
        if (reason := self._target.refusal(table)) is not None:
            return TableRecord(table, TableState.SET_ASIDE, reason=reason, refused=True)
        held = self._target.standing(table.name)
        if row is None or row.table is None or row.table.oid != table.oid:
            return TableRecord(table, TableState.WAITING)
        if held is None or held.oid not in (None, table.oid):
            # There is no mirror of this name, or it contains another table's rows.
            aside = TableRecord(row.table, row.state, reason=row.reason)
            return aside if row.state is TableState.SET_ASIDE else TableRecord(table, TableState.WAITING)
        if row.state is TableState.MOVED or (row.state is TableState.COPYING and held.snapshot_lsn < row.lsn):
            return TableRecord(table, TableState.WAITING)
        shape = self._as_followed(row, row.table, held)
        if row.state is TableState.SET_ASIDE:
            return TableRecord(shape, row.state, held.replay_lsn, held.version, held.recorded, row.reason)
        if not self.in_log(held):
            # The copy is from the time of an earlier log, or batches that the mirror needs were deleted from the log
            # while the table was not followed.
            return TableRecord(table, TableState.WAITING)
        # If `held.unlisted`, a run has changed the mirror's name or structure, and ended before it made a point. The
        # LSN of the change is not stored, so points list the table only above the LSN of the next catalog check.
        listed_from = None if held.unlisted else ZERO
        return TableRecord(shape, TableState.CATCHING_UP, held.replay_lsn, held.version, held.recorded, row.reason,
                           listed_from=listed_from)  # fmt: skip

    def _as_followed(self, row: StateRow, noted: Table, held: Generation) -> Table:
        """The table with the structure of its mirror. If a run died during a change of structure, or a turn added
        columns to the mirror and failed, the stored state ``noted`` may still have the earlier structure. The state is
        then stored again."""
        told = held.followed
        if told is None or told.descent.number < noted.descent.number:
            return noted
        if told.descent.number > noted.descent.number:
            followed = replace(told, comments=noted.comments)
        else:
            # Between two changes of structure, only new columns of rows are added.
            followed = together([noted, told])
        if followed != noted:
            self._states.set(followed, row.state, row.lsn, row.reason)
        return followed

    def _of_former(self, waiting: TableRecord, rows: Mapping[TableName, StateRow]) -> TableRecord:
        """The record of a table that has no mirror under its present name. If the table was followed under a former
        name, the record contains this name, so that the run renames the mirror. But if another table's mirror has the
        present name, for example because two tables swapped their names, the table must be copied."""
        name, oid = waiting.table.name, waiting.table.oid
        if name in rows and rows[name].state is TableState.COPYING and _oid(rows[name]) == oid:
            # The table's copy was requested or begun.
            return waiting
        own = [row for row in rows.values() if _oid(row) == oid]
        there = [row for row in own if row.name != name]
        found = [self._found(replace(waiting.table, name=row.name), row) for row in there]
        free = name not in rows or _oid(rows[name]) == oid or rows[name].state is TableState.MOVED
        usable = [entry for entry in found if entry.state.readable and free]
        if not usable:
            return self._aside(waiting, max(own, key=lambda row: row.at)) if there else waiting
        held = max(usable, key=lambda entry: entry.replay_lsn)
        return replace(
            held, table=replace(held.table, name=name), state=TableState.WAITING, former=held.table.name,
            listed_from=None,
        )  # fmt: skip

    def _aside(self, waiting: TableRecord, last: StateRow) -> TableRecord:
        """The record of a renamed table that has no usable mirror. ``last``: its newest stored state, under its present
        or a former name. If the table was set aside, it stays set aside, because a rename is no request for a copy."""
        if last.state is not TableState.SET_ASIDE or last.table is None:
            return waiting
        noted = replace(last.table, name=waiting.table.name)
        if last.name != noted.name:
            self._states.set(last.table, TableState.MOVED, last.lsn, f"its table was renamed to {noted.name}")
            self._states.set(noted, TableState.SET_ASIDE, last.lsn, last.reason)
        return TableRecord(noted, TableState.SET_ASIDE, reason=last.reason)


def _oid(row: StateRow) -> int | None:
    return None if row.table is None else row.table.oid


class ListedTables:
    """Compares the tables' records with the newest point, and decides which tables the next point may list. A point may
    list a table only if it is certain that, at the LSN of the point, the source had a table of this name with the
    structure of the mirror. ``records``: the present records of all known tables."""

    def __init__(self, points: ConsistentPoints, records: Mapping[TableName, TableRecord]) -> None:
        self._points = points
        self._records = records

    @property
    def unlisted(self) -> bool:
        """Whether the newest point lacks a followed table, or is below its ``replay_lsn``. Then an operation has
        changed mirrors, and ended before it made a point."""
        newest = self._points.newest()
        return any(
            newest is None or record.replay_lsn > newest.replay_lsn or record.table.name not in newest.tables
            for record in self._followed()
        )

    @property
    def shown_from(self) -> Lsn:
        """The lowest LSN at which a point can list all mirrors with their present structures. ZERO if the newest point
        is already at or above this LSN."""
        newest = self._points.newest()
        since = max((record.table.since for record in self._followed()), default=ZERO)
        return ZERO if newest is not None and newest.replay_lsn >= since else since

    def late(self) -> list[TableRecord]:
        """The followed tables that are below the newest point, because they were copied while changes of other tables
        were applied. Empty if all followed tables are below this point."""
        newest, followed = self._points.newest(), self._followed()
        below = [record for record in followed if newest is not None and record.replay_lsn < newest.replay_lsn]
        return below if len(below) < len(followed) else []

    def versions_at(self, lsn: Lsn) -> dict[TableName, int]:
        """The versions of the mirrors that a point at ``lsn`` would list."""
        return {record.table.name: record.version for record in self._followed()
                if record.replay_lsn == lsn and record.shown(lsn)}  # fmt: skip

    def kept_at(self, lsn: Lsn) -> Point | None:
        """The entries of the newest point that a second point at the same ``lsn`` must repeat unchanged. These are the
        tables that the second point cannot list itself: their structure or name has changed since, they are no longer
        known, or other tables have their names now. None if there are no such entries, or if the newest point is not at
        ``lsn``."""
        newest = self._points.newest()
        if newest is None or newest.replay_lsn != lsn:
            return None
        names = newest.tables.keys() - self._records.keys()
        names |= {name for name in newest.tables.keys() & self._records.keys() if self._left_out(name, lsn)}
        return replace(
            newest,
            tables={name: newest.tables[name] for name in names},
            positions={name: newest.positions[name] for name in names & newest.positions.keys()},
            changed={name: newest.changed[name] for name in names & newest.changed.keys()},
        ) if names else None  # fmt: skip

    def _followed(self) -> list[TableRecord]:
        return [record for record in self._records.values() if record.followed]

    def _left_out(self, name: TableName, lsn: Lsn) -> bool:
        """Whether no new point at ``lsn`` may list the table, because its structure or name has changed."""
        record = self._records[name]
        return record.former is not None or (record.followed and not record.shown(lsn))
