"""Looks in the catalog for what no LSN shows: at the start of a run, as ranges close, and now and then while idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.flow.renaming import rename
from pgcdc_assets.flow.restructuring import copy_by_itself, follow_partitions, restructure, widen
from pgcdc_assets.flow.standing import TableProgress
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.work import Work
from pgcdc_assets.savedcatalog import save_catalog
from pgcdc_assets.settings import CATALOG_FILE
from pgcdc_assets.source.catalog.drift import Drift, DriftKind, Remedy, altered_columns, table_changes
from pgcdc_assets.source.catalog.look import CatalogLook

_COPIED = (Remedy.COPY, Remedy.PARTITIONS)
"""For these a table that is not followed is copied, whatever else it is set aside for."""
TOLD_CHANGES = 5
"""Changes of one table that are reported by name."""


@dataclass(frozen=True)
class Look:
    """What a look at the catalog showed, and what else the source is asked about it."""

    live: Sequence[Table]
    now: Callable[[], Lsn]
    """A position of the source that it has come to after the look."""
    without_rows: Callable[[int], bool]
    """Whether a relation certainly has no row."""


def watch(work: Work, look: Look, *, paused: bool = False) -> None:
    """Compare each table, as it was at its copy, with the catalog now. Raises EmptyPublication if no table is left.

    Tables that lost or gained rows outside of the stream, and newly published ones, wait for a copy afterwards, even if
    they were set aside. Tables of another structure are followed to it, and those of another name under that. Tables
    that cannot be followed exactly are set aside. Tables that the stream no longer carries are no longer followed. Each
    of these is reported.

    ``paused``: mirrors are not to change; structures are followed at a later look.
    """
    refuse_emptied(work.catalog, look.live)
    shown = {table.name: table for table in look.live}
    _take_names(work, shown)
    for entry in [*work.progress.followed(), *work.progress.set_aside()]:
        _compare(work, entry, shown.get(entry.table.name), look, paused)
    for entry in work.progress.renamed_tables():
        if copy := _first(table_changes(entry.table, shown.get(entry.table.name)), Remedy.COPY):
            work.progress.must_copy(copy.table, work.log.position(), copy.what)
    if not paused:
        rename(work, [entry for entry in work.progress.renamed_tables() if not entry.reshaping])
        work.restructured.clear()
        work.astray.clear()


def _take_names(work: Work, shown: Mapping[TableName, Table]) -> None:
    """Let the tables go that are not shown, and take in those that came. One that was renamed is told of as that."""
    progress = work.progress
    before = {entry.table.name: entry.table.oid for entry in progress}
    known, now = set(before.values()), {table.oid for table in shown.values()}
    progress.renamed_among(shown.values())
    for name in progress.gone(shown):
        if before[name] not in now:
            work.observer.progress("watch", f"table {name}: is not published any more, or was dropped")
    for name in progress.found(shown.values()):
        if shown[name].oid not in known:
            work.observer.progress("watch", f"table {name}: is published now")


def _compare(work: Work, entry: TableProgress, live: Table | None, look: Look, paused: bool) -> None:
    name, readable = entry.table.name, entry.state.readable
    found = [change for change in table_changes(entry.table, live) if readable or change.action in _COPIED]
    _tell(work, name, _line(change for change in found if change.action in (*_COPIED, Remedy.SET_ASIDE)))
    copy, parts = _first(found, Remedy.COPY), _first(found, Remedy.PARTITIONS)
    if live is not None and (reason := work.target.refusal(live)) is not None:
        work.progress.refuse(live, reason)
    elif entry.refused:
        work.progress.request_copy([name])
    elif live is not None and copy is not None and copy.kind is DriftKind.REWRITTEN:
        copy_by_itself(work, entry, live, work.log.position(), copy.what)
    elif lost := copy or (None if readable else parts):
        work.progress.must_copy(name, work.log.position(), lost.what)
    elif live is None or _left(work, entry, found, paused=paused):
        return
    elif aside := [change for change in found if change.action is Remedy.SET_ASIDE]:
        restructure(work, entry, live, look.now(), _line(aside))
    elif parts:
        follow_partitions(work, entry, live, look.now(), look.without_rows, parts.what)
    elif readable and name in work.astray:
        work.progress.must_copy(name, work.log.position(), work.astray[name])
    elif readable and name in work.restructured:
        restructure(work, entry, live, look.now(), work.restructured[name])
    elif readable and found:
        widen(work, entry, live, look.now, found[0].what)
    elif readable:
        work.progress.rest(name, live)


def _line(changes: Iterable[Drift]) -> str:
    """The changes of one table in one line."""
    told = [change.what for change in changes]
    more = f", and {len(told) - TOLD_CHANGES} more" if len(told) > TOLD_CHANGES else ""
    return ", ".join(told[:TOLD_CHANGES]) + more


def _tell(work: Work, name: TableName, line: str) -> None:
    """Report what a look shows of a table, and once, however many looks show the same."""
    if line and work.drift_told.get(name) != line:
        work.observer.progress("watch", f"table {name}: {line}")
    work.drift_told[name] = line


def _left(work: Work, entry: TableProgress, found: Sequence[Drift], *, paused: bool) -> bool:
    """Whether the table is not taken to what this look shows."""
    set_aside = work.settings.schema_changes == "set_aside"
    return entry.reshaping or (paused and bool(_first(found, Remedy.PARTITIONS) or not set_aside))


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
        self._columns: dict[TableName, str] = {}
        """The marks of the columns' catalog rows, as the last look or a copy's snapshot showed them."""
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
        """Look at the catalog, compare all tables with it, and save it. CopyBlocked if a lock prevents it."""
        work = self._work
        self._looked = time.monotonic()
        self._seen = self._stream.look(work.catalog, work.settings.tables)
        live = self._seen.tables
        watch(work, Look(live, self._mark, self._stream.without_rows), paused=self.paused)
        self._note_altered(live)
        if work.progress.listed.naming.asks:
            work.progress.listed.naming.seen(self._mark())
        if live != work.catalog.tables:
            work.catalog = replace(work.catalog, tables=live)
            save_catalog(work.catalog, CATALOG_FILE)

    def _mark(self) -> Lsn:
        self.named = self._stream.mark_now()
        return self.named

    def compare(self, copied: Table) -> None:
        """Compare a table whose copy landed with the last look. If it was altered between that look and its snapshot,
        or since, no point lists it before another look."""
        altered = altered_columns(copied.column_rows, self._columns.get(copied.name, ""))
        self._columns[copied.name] = copied.column_rows
        if self._seen is not None and (altered or not self._seen.shows(copied)):
            self._seen = None

    def _note_altered(self, live: Sequence[Table]) -> None:
        """Have no point below this look list a table whose columns' rows in the catalog were written anew.

        ATTACH and DETACH PARTITION write them, and leave no other trace once both are done: in between the table was
        none of its own, and the partitioned table that it was attached to had its rows. Which one that was nothing
        tells, so no partitioned table is listed either.
        """
        progress = self._work.progress
        followed = {entry.table.name: entry.table for entry in progress.followed()}
        before = {name: table.column_rows for name, table in followed.items()} | self._columns
        altered = [table for table in live if table.name in followed
                   and altered_columns(before[table.name], table.column_rows)]  # fmt: skip
        self._columns = {table.name: table.column_rows for table in live}
        if any(not table.partitioned for table in altered):
            altered += [table for table in followed.values() if table.partitioned]
        for table in altered:
            progress.listed.naming.found(table.name)


def _first(changes: Sequence[Drift], action: Remedy) -> Drift | None:
    return next((change for change in changes if change.action is action), None)
