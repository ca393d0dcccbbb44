"""Looks in the catalog for what no LSN shows: at the start of a run, as ranges close, and now and then while idle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Marks, rewritten
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.flow.renaming import rename
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.structurechanges import carry_out
from pgcdc_assets.flow.work import Work
from pgcdc_assets.savedcatalog import save_catalog
from pgcdc_assets.settings import CATALOG_FILE
from pgcdc_assets.source.catalog.look import CatalogLook
from pgcdc_assets.structure.record import TableRecord
from pgcdc_assets.structure.verdict import Recopy, Rules, told, verdict


def refuse_emptied(catalog: Catalog, live: Sequence[Table]) -> None:
    """Raise EmptyPublication if nothing is published: going on would look well while every change is lost."""
    if not live:
        raise EmptyPublication("lists no table any more", thing=f"publication {catalog.publication}",
                               do="add the tables back, or run `pgcdc setup`")  # fmt: skip


class CatalogWatch:
    """One run's looks at the catalog. Every method runs in the run's own thread."""

    def __init__(self, work: Work, stream: LogStream) -> None:
        self._work = work
        self._stream = stream
        self._seen: CatalogLook | None = None
        """The last look, with which all followed tables have been compared; None before the first look, and after a
        copy landed whose table the look shows differently."""
        self.named = ZERO
        """The position that the log has to reach before tables are listed again that were away, or got another
        structure."""
        self._looked = time.monotonic()
        self.paused = False
        """Mirrors are not to change for now."""

    @property
    def due(self) -> bool:
        """Whether the last look is as long ago as a range takes."""
        return time.monotonic() - self._looked >= self._work.settings.range_seconds

    @property
    def stands(self) -> bool:
        """Whether the source's catalog is still as the last look saw it, and the copies agree with that look."""
        return self._seen is not None and self._stream.stands(self._seen)

    def look(self) -> None:
        """Look at the catalog, compare all tables with it, and save it.

        Raises CopyBlocked if a lock prevents it, and EmptyPublication if no table is left.
        """
        work = self._work
        self._looked = time.monotonic()
        self._seen = self._stream.look(work.catalog, work.settings.tables)
        live = self._seen.tables
        before = {record.table.name: record.known_columns for record in work.progress.followed()}
        self.compare_all(live)
        self._note_rewritten_columns(before, live)
        if any(record.listed_from is None for record in work.progress):
            work.progress.listed_from(self._mark())
        if live != work.catalog.tables:
            work.catalog = replace(work.catalog, tables=live)
            save_catalog(work.catalog, CATALOG_FILE)

    def _mark(self) -> Lsn:
        """A position of the source that it has come to after the look."""
        self.named = self._stream.mark_now()
        return self.named

    def compare_all(self, live: Sequence[Table]) -> None:
        """Compare each table, as its mirror has it, with the catalog, and begin what the verdicts ask for."""
        work = self._work
        refuse_emptied(work.catalog, live)
        shown = {table.name: table for table in live}
        _take_names(work, shown)
        for record in [*work.progress.followed(), *work.progress.set_aside()]:
            self._compare(record, shown[record.table.name])
        for record in work.progress.renamed_tables():
            found = verdict(record, shown[record.table.name], self._rules)
            if isinstance(found, Recopy) and not found.restructured:
                work.progress.must_copy(record.table.name, work.log.position(), found.reason)
        if not self.paused:
            rename(work, [record for record in work.progress.renamed_tables() if not record.reshaping])

    def _compare(self, record: TableRecord, now: Table) -> None:
        work = self._work
        line = told(record, now)
        if line and line != record.told:
            work.observer.progress("watch", f"table {now.name}: {line}")
        found = verdict(
            record, now, self._rules, refusal=work.target.refusal(now), without_rows=self._stream.without_rows,
            paused=self.paused,
        )  # fmt: skip
        work.progress.looked(now.name, line, answered=not self.paused)
        carry_out(work, found, record, now, self._mark)

    @property
    def _rules(self) -> Rules:
        return Rules(self._work.settings.schema_changes, self._work.settings.recopy_bytes)

    def compare(self, copied: Table) -> None:
        """Compare a table whose copy landed with the last look. If it was altered between that look and its snapshot,
        or since, no point lists it before another look."""
        altered = rewritten(copied.marks.columns, self._work.progress[copied.name].known_columns)
        if self._seen is not None and (altered or not self._seen.shows(copied)):
            self._seen = None

    def _note_rewritten_columns(self, before: Mapping[TableName, Marks], live: Sequence[Table]) -> None:
        """Have no point below this look list a table whose columns' rows in the catalog were written anew.

        ATTACH and DETACH PARTITION write them, and leave no other trace once both are done: in between the table was
        none of its own, and the partitioned table that it was attached to had its rows. Which one that was nothing
        tells, so no partitioned table is listed either.
        """
        followed = {record.table.name: record.table for record in self._work.progress.followed()}
        altered = {table.name for table in live if table.name in followed.keys() & before.keys()
                   and rewritten(before[table.name], table.marks.columns)}  # fmt: skip
        if any(not followed[name].partitioned for name in altered):
            altered |= {name for name, table in followed.items() if table.partitioned}
        self._work.progress.columns_seen(live, altered)


def _take_names(work: Work, shown: Mapping[TableName, Table]) -> None:
    """Let the tables go that are not shown, and take in those that came. One that was renamed is told of as that."""
    progress = work.progress
    before = {record.table.name: record.table.oid for record in progress}
    known, now = set(before.values()), {table.oid for table in shown.values()}
    progress.renamed_among(shown.values())
    for name in progress.gone(shown):
        if before[name] not in now:
            work.observer.progress("watch", f"table {name}: is not published any more, or was dropped")
    for name in progress.found(shown.values()):
        if shown[name].oid not in known:
            work.observer.progress("watch", f"table {name}: is published now")
