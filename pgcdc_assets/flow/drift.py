"""Looks in the catalog for what no LSN shows: at the start of a run, as ranges close, and now and then while idle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.work import Work
from pgcdc_assets.savedcatalog import save_catalog
from pgcdc_assets.settings import CATALOG_FILE
from pgcdc_assets.source.catalog.drift import Drift, Remedy, table_changes
from pgcdc_assets.source.catalog.look import CatalogLook


def watch(work: Work, live: Sequence[Table]) -> None:
    """Compare each table, as at its copy, with the catalog now. Raises EmptyPublication where nothing is left.

    Tables that lost or gained rows behind the stream, and those that were published since, wait for a copy
    afterwards, also where they had been set aside; those that cannot be followed exactly are set aside; those
    that the stream no longer carries are followed no further. All are told.
    """
    refuse_emptied(work.catalog, live)
    now = {table.name: table for table in live}
    for name in work.progress.gone(now):
        work.observer.progress("watch", f"table {name}: is not published any more, or was dropped")
    for name in work.progress.found(live):
        work.observer.progress("watch", f"table {name}: is published now")
    for entry in [*work.progress.followed(), *work.progress.set_aside()]:
        found = [change for change in table_changes(entry.table, now.get(entry.table.name))
                 if entry.state.readable or change.action is Remedy.COPY]  # fmt: skip
        for change in found:
            if change.action in (Remedy.COPY, Remedy.SET_ASIDE):
                work.observer.progress("watch", str(change))
        live_table = now.get(entry.table.name)
        if live_table is not None and (reason := work.target.refusal(live_table)) is not None:
            work.progress.refuse(live_table, reason)
        elif entry.refused:
            work.progress.request_copy([entry.table.name])
        elif copy := _first(found, Remedy.COPY):
            work.progress.must_copy(copy.table, work.log.position(), copy.what)
        elif aside := _first(found, Remedy.SET_ASIDE):
            work.progress.put_aside(aside.table, work.log.position(), aside.what)


def refuse_emptied(catalog: Catalog, live: Sequence[Table]) -> None:
    """Going on would look well while every change is lost."""
    if not live:
        raise EmptyPublication("lists no table any more", thing=f"publication {catalog.publication}",
                               do="add the tables back, or run `pgcdc setup`")  # fmt: skip


class CatalogWatch:
    """One run's looks at the catalog. Every method runs in the run's own thread."""

    def __init__(self, work: Work, stream: LogStream) -> None:
        self._work = work
        self._stream = stream
        self._seen: CatalogLook | None = None
        """The last look, which all followed tables have been compared with; None before the first, and where a copy
        landed that it does not show as the copy is."""
        self.named = ZERO
        """The position that the log has to reach before tables that were away are listed again."""
        self._looked = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last look is as long ago as a range takes."""
        return time.monotonic() - self._looked >= self._work.settings.range_seconds

    @property
    def stands(self) -> bool:
        """Whether the source's catalog is still as the last look saw it, and the copies are as that shows them."""
        return self._seen is not None and self._stream.stands(self._seen)

    def look(self) -> None:
        """Look, compare all tables with what is found, and save it."""
        work = self._work
        self._seen = self._stream.look(work.catalog, work.settings.tables)
        live = self._seen.tables
        watch(work, live)
        if work.progress.naming.asks:
            self.named = self._stream.mark_now()
            work.progress.naming.seen(self.named)
        if live != work.catalog.tables:
            work.catalog = replace(work.catalog, tables=live)
            save_catalog(work.catalog, CATALOG_FILE)
        self._looked = time.monotonic()

    def compare(self, copied: Table) -> None:
        """A copy landed. One that was altered between the last look and its snapshot, or since, is listed by no point
        before another look."""
        if self._seen is not None and not self._seen.shows(copied):
            self._seen = None


def _first(changes: Sequence[Drift], action: Remedy) -> Drift | None:
    return next((change for change in changes if change.action is action), None)
