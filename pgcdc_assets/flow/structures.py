"""Changes of structure whose LSN is known, because event triggers of ours put them into the stream.

A table goes up to the transaction of the next change, gets the structure that it had behind it, and goes on: points up
to there list it with the structure of before, those behind it with the new one.

The catalog stays the judge. What it shows is explained by the messages as a whole, or followed as if there were none
(:mod:`pgcdc_assets.flow.drift`). Messages that the log has not got yet are waited for, if it soon has them.
"""

from __future__ import annotations

from collections.abc import Callable

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.standing import TableProgress
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.structurenotes import structure_notes
from pgcdc_assets.source.catalog.drift import table_changes
from pgcdc_assets.source.catalog.noted import (
    StructureChange,
    StructureNote,
    as_published,
    names_suffice,
    structure_changes,
)


class Structures:
    """Those of one run. Every method runs in the run's own thread."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._notes: list[StructureNote] = []
        self._began: Lsn | None = None
        """Messages are known from here on."""
        self._complete = self._read = ZERO
        self._ahead: dict[TableName, list[StructureChange]] = {}
        """By table: changes above its position, in order."""
        self._rested: dict[TableName, Lsn] = {}
        """By table: messages up to here, by which its mirror does not go: they changed nothing that it has to follow,
        or did not suffice."""
        self.may_wait: Callable[[], bool] = lambda: False
        """Whether what no message explains is left to the next look, because the message may be on its way."""
        self.explained: dict[TableName, Lsn] = {}
        """Tables whose structure the messages tell, as the last look shows it, and where the log stood before that."""
        self.unexplained: set[TableName] = set()
        """Tables that were left to the next look."""

    def take(self, progress: TablesProgress, complete: Lsn) -> bool:
        """Take in the messages that have come into the log, which is complete to there; returns whether there were
        any."""
        if self._began is not None and complete <= self._complete:
            return False
        lowest = progress.replay_lsn
        if self._began is None:
            self._began = self._read = lowest
        batches = self._log.batches(self._read)
        self._complete, self._read = complete, batches[-1].end if batches else self._read
        found = structure_notes(self._log, batches)
        # Those that every table has passed explain nothing any more.
        self._notes = [note for note in self._notes if note.end_lsn > lowest] + found
        return bool(found)

    def explain(self, entry: TableProgress, now: Table) -> bool:
        """Whether messages tell how the table came to the structure that the catalog shows ``now``. Then it is taken
        there change by change."""
        name, before = entry.table.name, entry.table
        self._ahead.pop(name, None)
        self.explained.pop(name, None)
        if self._began is None or entry.replay_lsn < self._began:
            return False
        since = max(Lsn(before.lineage.since) if before.lineage is not None else ZERO, self._rested.get(name, ZERO))
        above = [note for note in self._notes if note.commit_lsn >= entry.replay_lsn and note.end_lsn > since]
        changes = structure_changes(before, now, above) if above else None
        if changes is None:
            return False
        self._ahead[name] = changes
        if not changes:
            self._rested[name] = above[-1].end_lsn
        self.explained[name] = self._complete
        return True

    def unread(self, name: TableName, upto: Lsn) -> None:
        """Note that rows of the table below ``upto`` cannot be read. Where messages tell all its structures, they do
        not suffice: it goes on by the catalog alone, until it is changed again."""
        if self.explained.get(name, ZERO) >= upto:
            self._rested[name] = self._complete

    def known(self, entry: TableProgress, upto: Lsn) -> bool:
        """Whether each row that the table gets on the way to ``upto``, and that names its columns, has its structure.
        Others may have that of before, in the transaction that changed it."""
        explained = self.explained.get(entry.table.name, ZERO) >= upto
        return explained and names_suffice(entry.table, entry.replay_lsn, self._notes)

    def on_the_way(self, name: TableName) -> bool:
        """Whether to leave to the next look what no message explains."""
        if name not in self.unexplained and not self.may_wait():
            return False
        self.unexplained.add(name)
        return True

    def ahead(self, entry: TableProgress) -> Lsn | None:
        """Where the table gets another structure: no turn takes it further. None if nothing is known of that."""
        changes = self._ahead.get(entry.table.name)
        return changes[0].commit_lsn if changes else None

    def due(self, entry: TableProgress) -> tuple[StructureChange, str] | None:
        """The change that the table stands at, which is forgotten here, and in words."""
        changes = self._ahead.get(entry.table.name, [])
        while changes and changes[0].commit_lsn <= entry.replay_lsn:
            change = changes.pop(0)
            # A copy that landed meanwhile holds what lies below it.
            if change.commit_lsn == entry.replay_lsn:
                return change, _in_words(entry.table, change.table)
        return None


def _in_words(before: Table, after: Table) -> str:
    found = table_changes(as_published(before, after), after)
    return next((change.what for change in found), "its structure changed")
