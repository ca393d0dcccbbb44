"""Checks the source's catalog for what the stream does not contain: structures, names and comments of tables. A run
checks the catalog when it starts, when a range of the log closes, and every ``range_seconds`` while it is idle.

This module also copies comments to the mirrors. Comments change no row, so they are written at any LSN. A mirror that
cannot store comments is still followed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.structurechanges import StructureChanges
from pgcdc_assets.flow.work import Work
from pgcdc_assets.project import save_catalog
from pgcdc_assets.source.catalog.tables import CatalogSnapshot
from pgcdc_assets.structure.differences import changes, rewritten
from pgcdc_assets.structure.verdict import Rules, reported, verdict


def carry_comments(work: Work) -> bool:
    """Write changed comments to the followed mirrors, with one Delta metadata commit per mirror; returns whether any
    mirror got comments. A failure is reported once, and is tried again only when the table's comments change again."""
    carried = False
    for table in list(_commented(work)):
        version = None
        if not table.comments_read:
            work.say("watch", unread_comments(table.name), table.name)
        with contained() as failed:
            version = work.target.comment(table)
            carried = True
        if failed.reason is not None:
            what = f"the mirror of {table.name} lacks the comments of its table: {failed.reason}"
            work.say("watch", what, table.name)
        work.progress.commented(table.name, table.comments, version)
    return carried


def unread_comments(name: TableName) -> str:
    return f"the mirror of {name} lacks a comment of its table: the comment is not text in the source's encoding"


def _commented(work: Work) -> Iterator[Table]:
    """The followed tables whose comments have changed, with their new comments."""
    shown = {table.oid: table for table in work.catalog.tables}
    for entry in work.progress.followed():
        live = shown.get(entry.table.oid)
        if live is None or entry.reshaping:
            continue
        columns = {0, *(column.attnum for column in entry.table.columns)}
        comments = tuple(one for one in live.comments if one[0] in columns)
        if comments != entry.table.comments:
            yield replace(entry.table, comments=comments)


def refuse_emptied(catalog: Catalog, live: Sequence[Table]) -> None:
    """Raise EmptyPublication if no table is published: otherwise the run would succeed although it gets no changes."""
    if not live:
        raise EmptyPublication("no longer lists any table", thing=f"publication {catalog.publication}",
                               do="add the tables back, or run `pgcdc setup`")  # fmt: skip


class CatalogWatch:
    """The catalog checks of one run. Every method runs in the run's own thread."""

    def __init__(self, work: Work, stream: LogStream, structure: StructureChanges) -> None:
        self._work = work
        self._stream = stream
        self._structure = structure
        self._seen: CatalogSnapshot | None = None
        """What the last catalog check read. None before the first check. It becomes None again if a copy or a structure
        change finds a table that differs from the check. While it is None, the catalog must be checked before the next
        point."""
        self.seen_at = ZERO
        """The source's position after the last check that found a new name or structure. Points list a renamed or
        restructured table only at or above this LSN."""
        self._checked_at = time.monotonic()
        self.paused = False
        """Whether mirrors must not change, because applying is paused."""

    @property
    def due(self) -> bool:
        """Whether at least ``range_seconds`` have passed since the last check."""
        return time.monotonic() - self._checked_at >= self._work.settings.range_seconds

    @property
    def is_current(self) -> bool:
        """Whether the source's catalog is still as the last check showed it, and no later copy or structure change has
        found a table that differs from it."""
        return self._seen is not None and self._stream.is_current(self._seen)

    def check(self) -> None:
        """Read the catalog, compare the tables recorded for all mirrors with it, and save it. CopyBlocked if a lock on
        the source prevents reading the catalog, EmptyPublication if no table is published."""
        work = self._work
        self._checked_at = time.monotonic()
        self._seen = self._stream.read_catalog(work.catalog, work.settings.tables)
        live = self._seen.tables
        before = {record.table.name: record.known_columns for record in work.progress.followed()}
        self.compare_all(live)
        self._note_rewritten_columns(before, live)
        if any(record.listed_from is None for record in work.progress):
            work.progress.listed_from(self._mark())
        if live != work.catalog.tables:
            work.catalog = replace(work.catalog, tables=live)
            save_catalog(work.catalog, work.settings.catalog_file)

    def _mark(self) -> Lsn:
        """Set :attr:`seen_at` to the source's present position, which is after the check, and return it."""
        self.seen_at = self._stream.mark_now()
        return self.seen_at

    def compare_all(self, live: Sequence[Table]) -> None:
        """Compare the table recorded for each mirror with the catalog, and begin the changes of mirrors that the
        differences require."""
        work = self._work
        refuse_emptied(work.catalog, live)
        shown = {table.name: table for table in live}
        _take_names(work, shown)
        work.progress.types_seen(shown[record.table.name] for record in work.progress.followed())
        for record in [*work.progress.followed(), *work.progress.set_aside(), *work.progress.renamed_tables()]:
            self._compare(shown[record.table.name])
        for record in () if self.paused else work.progress.renamed_tables():
            if not record.reshaping:
                self._structure.rename(record)

    def _compare(self, now: Table) -> None:
        work = self._work
        record = work.progress[now.name]
        differences = changes(record.table, now)
        line = reported(record, differences)
        if line and line != record.reported:
            work.say("watch", f"table {now.name}: {line}", now.name)
        found = verdict(
            record, now, differences, Rules(work.settings.schema_changes, work.settings.recopy_bytes),
            refusal=work.target.refusal(now), without_rows=self._stream.without_rows, paused=self.paused,
        )  # fmt: skip
        work.progress.checked(now.name, line, decided=not self.paused)
        self._structure.carry_out(found, record, now, self._mark)

    def compare(self, copied: Table) -> None:
        """Compare a table that was copied or restructured with the last catalog check. If they differ, the catalog is
        checked again before the next point."""
        altered = rewritten(copied.marks.columns, self._work.progress[copied.name].known_columns)
        if self._seen is not None and (altered or not self._seen.shows(copied)):
            self._seen = None

    def _note_rewritten_columns(self, before: Mapping[TableName, Marks], live: Sequence[Table]) -> None:
        """Find the tables whose entries in pg_attribute were written again since the last check. Each may have been a
        partition of another table for some time. So no point below the LSN of this check may list these tables.

        ATTACH and DETACH PARTITION write a table's entries in pg_attribute, and leave no other trace once both commands
        are done. Between the two commands, the table's data belonged to a partitioned table. It may be any of them,
        because the catalog no longer shows which one it was. So if one of the tables found is not itself partitioned,
        points below the LSN of this check list no partitioned table at all."""
        followed = {record.table.name: record.table for record in self._work.progress.followed()}
        altered = {table.name for table in live if table.name in followed.keys() & before.keys()
                   and rewritten(before[table.name], table.marks.columns)}  # fmt: skip
        if any(not followed[name].partitioned for name in altered):
            altered |= {name for name, table in followed.items() if table.partitioned}
        self._work.progress.note_columns(live, altered)


def _take_names(work: Work, shown: Mapping[TableName, Table]) -> None:
    """Stop following the tables that the catalog no longer shows, and add new tables. A renamed table is reported
    neither as dropped nor as new."""
    progress = work.progress
    before = {record.table.name: record.table.oid for record in progress}
    known, now = set(before.values()), {table.oid for table in shown.values()}
    progress.renamed_among(shown.values())
    for name in progress.gone(shown):
        if before[name] not in now:
            work.say("watch", f"table {name}: is no longer published, or was dropped", name)
    for name in progress.found(shown.values()):
        if shown[name].oid not in known:
            work.say("watch", f"table {name}: is published now", name)
