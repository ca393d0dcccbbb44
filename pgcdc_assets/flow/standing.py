"""Reads from the lake where a table stands: from its stored state, and from what its mirror itself says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.failures import of_one_table
from pgcdc_assets.mirror.target import Generation, Target
from pgcdc_assets.points.states import StateRow, TableStates


@dataclass(frozen=True)
class TableProgress:
    table: Table
    """The table as it was at its copy, plus the columns that appeared since."""
    state: TableState
    replay_lsn: Lsn = ZERO
    """The effective position: what lies below it is applied, or known to hold nothing for this table."""
    version: int = -1
    reason: str | None = None
    """What is wrong with it: why it was set aside or waits, or that another writer changed rows of its mirror."""
    refused: bool = False
    """Set aside because it cannot be mirrored at all: no copy brings it back."""
    reshaping: bool = False
    """Its mirror's structure, or place, is being changed: nothing is applied to it, and no copy begins, before that has
    ended."""
    widening: tuple[Lsn, str] | None = None
    """Set once the catalog has shown columns that came without a value, and no row has brought them so far: from where
    on they were certainly there, and the marks of all columns then (:attr:`Table.column_rows`)."""
    former: TableName | None = None
    """The name under which the mirror stands that is to go on as this table's, in place of a copy: in ``version``, at
    ``replay_lsn``."""

    def changes_after(self, lsn: Lsn) -> bool:
        """Whether the mirror's structure is, or is to be, one that the table may have got only above ``lsn``."""
        lineage = self.table.lineage
        if self.reshaping or self.widening is not None:
            # Its columns may be others, too.
            return True
        return lineage is not None and lsn < lineage.since


class Standings:
    """A mirror can no longer be followed if it was copied before the log began, or stands below the position at which
    retention has cut off the log."""

    def __init__(self, target: Target, states: TableStates, log_began: Lsn, log_start: Lsn) -> None:
        self._target = target
        self._states = states
        self._log_began = log_began
        self.log_start = log_start
        self.unlisted = set[TableName]()
        """Tables whose mirrors went on from other names, or in other structures, in a run that ended before a point
        listed them: nothing stored says since when the source has them so."""

    @property
    def log_begins(self) -> Lsn:
        return max(self._log_began, self.log_start)

    def in_log(self, held: Generation) -> bool:
        """Whether the log holds what came after the mirror's position."""
        return held.snapshot_lsn >= self._log_began and held.replay_lsn >= self.log_start

    def load(self, table: Table, rows: Mapping[TableName, StateRow]) -> TableProgress:
        """Where a table stands; set aside if its mirror cannot be read. ``rows``: the last of every table."""
        row = rows.get(table.name)
        try:
            found = self._found(table, row)
            astray = found.state is TableState.WAITING and found.former is None
            return self._of_former(found, rows) if astray else found
        except Exception as error:
            if (failure := of_one_table(error)) is None:
                raise
        if row is None or row.state is not TableState.SET_ASIDE or row.table is None:
            self._states.set(table, TableState.SET_ASIDE, ZERO if row is None else row.lsn, failure)
        return TableProgress(table, TableState.SET_ASIDE, reason=failure)

    def _found(self, table: Table, row: StateRow | None) -> TableProgress:
        if (reason := self._target.refusal(table)) is not None:
            return TableProgress(table, TableState.SET_ASIDE, reason=reason, refused=True)
        held = self._target.standing(table.name)
        if row is None or row.table is None or row.table.oid != table.oid:
            return TableProgress(table, TableState.WAITING)
        if held is None or held.oid not in (None, table.oid):
            # There is no mirror under this name, or it has another table's rows.
            aside = TableProgress(row.table, row.state, reason=row.reason)
            return aside if row.state is TableState.SET_ASIDE else TableProgress(table, TableState.WAITING)
        if row.state is TableState.MOVED or (row.state is TableState.COPYING and held.snapshot_lsn < row.lsn):
            return TableProgress(table, TableState.WAITING)
        shape = self._as_followed(row, row.table, held)
        if row.state is TableState.SET_ASIDE:
            return TableProgress(shape, row.state, held.replay_lsn, held.version, row.reason)
        if not self.in_log(held):
            # The table was copied under an earlier log, which this one need not continue, or was away while the log
            # was cut.
            return TableProgress(table, TableState.WAITING)
        if held.unlisted:
            self.unlisted.add(table.name)
        return TableProgress(shape, TableState.CATCHING_UP, held.replay_lsn, held.version, row.reason)

    def _as_followed(self, row: StateRow, noted: Table, held: Generation) -> Table:
        """The table as the mirror's rows have it: a run may have died right after changing the structure."""
        if held.followed is None or not _newer(held.followed, noted):
            return noted
        followed = replace(held.followed, comments=noted.comments)
        self._states.set(followed, row.state, row.lsn, row.reason)
        return followed

    def _of_former(self, waiting: TableProgress, rows: Mapping[TableName, StateRow]) -> TableProgress:
        """A table without a copy of its own, with the mirror that it has under a former name, if it was followed.

        A mirror moves only to a name that is free. Where another table's mirror stands, as if two tables swapped their
        names, the table is copied.
        """
        name, oid = waiting.table.name, waiting.table.oid
        if name in rows and rows[name].state is TableState.COPYING and _oid(rows[name]) == oid:
            # Its copy was asked for, or begun.
            return waiting
        own = [row for row in rows.values() if _oid(row) == oid]
        there = [row for row in own if row.name != name]
        found = [self._found(replace(waiting.table, name=row.name), row) for row in there]
        free = name not in rows or _oid(rows[name]) == oid or rows[name].state is TableState.MOVED
        going_on = [entry for entry in found if entry.state.readable and free]
        if not going_on:
            return self._aside(waiting, max(own, key=lambda row: row.at)) if there else waiting
        held = max(going_on, key=lambda entry: entry.replay_lsn)
        return replace(
            held, table=replace(held.table, name=name), state=TableState.WAITING, former=held.table.name
        )  # fmt: skip

    def _aside(self, waiting: TableProgress, last: StateRow) -> TableProgress:
        """A table that was set aside under its last name stays so: another name is no word that it be copied."""
        if last.state is not TableState.SET_ASIDE or last.table is None:
            return waiting
        noted = replace(last.table, name=waiting.table.name)
        if last.name != noted.name:
            self._states.set(last.table, TableState.MOVED, last.lsn, f"goes on as {noted.name}")
            self._states.set(noted, TableState.SET_ASIDE, last.lsn, last.reason)
        return TableProgress(noted, TableState.SET_ASIDE, reason=last.reason)


def _oid(row: StateRow) -> int | None:
    return None if row.table is None else row.table.oid


def _newer(table: Table, than: Table) -> bool:
    """Whether this is a later structure of the same copy."""
    return (table.lineage.number if table.lineage else 0) > (than.lineage.number if than.lineage else 0)
