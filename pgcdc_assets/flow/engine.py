"""The operations behind every command, job and asset. Each takes the lake's lock, and gives it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import EmptyPublication, SetupNeeded
from pgcdc_assets.flow import backfill
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.observer import Observer
from pgcdc_assets.flow.progress import Progress
from pgcdc_assets.flow.reports import RangeReport, SyncReport
from pgcdc_assets.flow.stream import Stream
from pgcdc_assets.flow.sync import Bounds, Sync
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.client import ReceiverProcess
from pgcdc_assets.log.table import ChangeLog
from pgcdc_assets.settings import CATALOG_FILE, Settings
from pgcdc_assets.source.catalog import read_catalog
from pgcdc_assets.source.connection import connect
from pgcdc_assets.source.replication import ReplicationConnection
from pgcdc_assets.source.slots import require_slot


class Engine:
    """``conninfo`` is the source's (the embedded server's where the settings name none)."""

    def __init__(
        self,
        settings: Settings,
        conninfo: str,
        observer: Observer,
        session: Callable[[], SparkSession],
        command: str,
    ) -> None:
        self._settings = settings
        self._conninfo = conninfo
        self._observer = observer
        self._session = session
        self._command = command

    def sync(self, bounds: Bounds, *, copy_anew: Sequence[TableName] = ()) -> SyncReport:
        """Copy what is not yet copied, receive, and apply, until ``bounds`` say so."""
        with lake_lock(self._settings.layout, self._command), connect(self._conninfo) as conn:
            catalog = self._live_catalog(conn)
            log = self._log(conn, catalog.identity)
            work = self._work(catalog, log)
            work.progress.request_copy(copy_anew)
            receiver = ReceiverProcess(
                self._conninfo,
                self._settings.layout,
                catalog.publications,
                batch_bytes=self._settings.batch_bytes,
                batch_seconds=self._settings.batch_seconds,
            )
            return Sync(work, self._conninfo, Stream(receiver, log, conn), bounds).run()

    def check_range(self, span: LsnRange) -> RangeReport:
        """``change_log`` by hand: the range is in the log, whole."""
        with self._by_hand() as work:
            return backfill.check(work, span)

    def transform_range(self, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
        """``changes/...`` by hand: derive the feeds of a range again."""
        with self._by_hand() as work:
            return backfill.derive(work, tables, span)

    def apply_range(self, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
        """Mirrors by hand: forward above their ``replay_lsn``, repair below."""
        with self._by_hand() as work:
            return backfill.apply(work, tables, span)

    def repair(self, table: TableName, span: LsnRange) -> RangeReport:
        with self._by_hand() as work:
            return backfill.repair(work, table, span)

    @contextmanager
    def _by_hand(self) -> Iterator[Work]:
        catalog = Catalog.load(CATALOG_FILE)
        if catalog is None:
            raise SetupNeeded("there is no saved catalog", thing=str(CATALOG_FILE))
        with lake_lock(self._settings.layout, self._command):
            yield self._work(catalog, ChangeLog(self._settings.layout).open())

    def _live_catalog(self, conn: psycopg.Connection[Any]) -> Catalog:
        saved = Catalog.load(CATALOG_FILE)
        if saved is None:
            raise SetupNeeded("there is no saved catalog", thing=str(CATALOG_FILE))
        live = read_catalog(conn, saved.identity, saved.publications, self._settings.tables)
        if not live.tables:
            raise EmptyPublication("lists no table any more", thing=f"publication {saved.publication}",
                                   do="add the tables back, or run `pgcdc setup`")  # fmt: skip
        if live != saved:
            live.save(CATALOG_FILE)
        return live

    def _log(self, conn: psycopg.Connection[Any], identity: Identity) -> ChangeLog:
        """The change log, made where there is none: it begins where the slot stands.

        Nothing is lost by that, whatever was confirmed before: a mirror whose position lies below the
        log's start is copied anew, and a copy's consistent point lies above it.
        """
        log = ChangeLog(self._settings.layout)
        if not log.exists:
            start = require_slot(conn, self._settings.slot).confirmed_flush_lsn
            if start is None:
                raise SetupNeeded("has no confirmed position", thing=f"slot {self._settings.slot}")
            with ReplicationConnection.open(self._conninfo) as stream:
                log.create(identity, start, stream.identify().timeline)
        return log.open()

    def _work(self, catalog: Catalog, log: ChangeLog) -> Work:
        return Work(
            settings=self._settings,
            catalog=catalog,
            log=log,
            progress=Progress(self._settings.layout, catalog, log.start),
            observer=self._observer,
            session=self._session,
        )
