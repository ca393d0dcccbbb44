"""The operations that commands, jobs and assets call. Each operation holds the lake's lock while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import (
    CopyBlocked,
    IdentityMismatch,
    LakeError,
    LockHeld,
    LogAhead,
    SetupNeeded,
    SlotActive,
    SourceUnavailable,
)
from pgcdc_assets.failures import machine_told
from pgcdc_assets.flow import backfill
from pgcdc_assets.flow.catalogwatch import refuse_emptied
from pgcdc_assets.flow.copies import COPY_ROUNDS
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.lock import free_again, lake_in_turn, lake_lock
from pgcdc_assets.flow.maintenance import Allowance, Forgotten, Maintenance, MaintenanceReport, forget_tables
from pgcdc_assets.flow.messages import begin_messages
from pgcdc_assets.flow.outcomes import Operation, OperationKind, recorded
from pgcdc_assets.flow.ownlake import note_lake, refuse_other_lake, refuse_taken_slot
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.registration import registering
from pgcdc_assets.flow.reports import Observer, RangeReport, SyncReport
from pgcdc_assets.flow.requests import apply_paused, operator_requests
from pgcdc_assets.flow.stream import LogStream, Outage, publish_new
from pgcdc_assets.flow.sync import Sync
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.points.states import TableStates, recover_tables
from pgcdc_assets.project import required_catalog, save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_catalog
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.failures import NEW_LAKE
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot import slot as slots
from pgcdc_assets.spark.session import SparkOnDemand, jvm_death_told


class Engine:
    """The operations on one lake. ``conninfo``: the connection string of the source, which may be the embedded
    server."""

    def __init__(
        self, settings: Settings, conninfo: str, observer: Observer, session: Callable[[], SparkSession], command: str
    ) -> None:
        self._settings = settings
        self._conninfo = conninfo
        self._observer = observer
        self._session = session
        self._command = command

    def sync(
        self, bounds: Bounds, *, copy_anew: Sequence[TableName] = (), heal: Sequence[TableName] = ()
    ) -> SyncReport:  # fmt: skip
        """Copy new tables, receive, and apply, until ``bounds`` end the sync. ``copy_anew``: tables to copy again.
        ``heal``: tables that were set aside, to be followed again from their mirrors' positions.

        Without follow mode, the sync runs again, at most COPY_ROUNDS times, while tables wait for a copy or for a point
        that lists them. With ``copy_anew`` or ``heal``, it makes a running sync in follow mode pause.

        In follow mode, the sync pauses while a command needs the lake; with a time limit, it ends instead. If it loses
        the connection to the source, it connects again. But if the first run, which carries out ``copy_anew`` and
        ``heal``, loses the connection, the error is raised.
        """
        if copy_anew or heal:
            self._refuse_while_paused()
        started = time.monotonic()
        report = self._sync(bounds, copy_anew, heal)
        if report.lost is not None and (copy_anew or heal):
            raise report.lost
        rounds, outage = 0, Outage(partial(self._observer.progress, "source"))
        while True:
            if report.lost is not None:
                goes_on = outage.waited(report.lost, bounds.from_now(time.monotonic() - started))
            elif report.gave_way:
                goes_on = bounds.max_seconds is None and free_again(self._settings.layout, bounds.stop)
            else:
                rounds += 1
                goes_on = bool(report.left) and rounds <= COPY_ROUNDS and not bounds.stopped
            if not goes_on:
                break
            outage.tries()
            try:
                report = self._sync(bounds.from_now(time.monotonic() - started)).after(report)
            except LockHeld as held:
                # Another command took the lock first. If this sync had paused or had lost the source, it waits for that
                # command. Otherwise it ends, maybe with tables that still wait for a copy.
                report = report if report.lost is None else replace(report, lost=held)
            except (SourceUnavailable, SlotActive) as error:
                # After a lost connection, the server may need a minute to notice that the session that used the slot
                # has ended. During this time, SlotActive is not an error.
                if not bounds.follow or (report.lost is None and isinstance(error, SlotActive)):
                    raise
                report = replace(report, lost=error)
        if report.lost is not None and not bounds.stop.is_set():
            raise report.lost
        return report

    def _sync(
        self, bounds: Bounds, copy_anew: Sequence[TableName] = (), heal: Sequence[TableName] = ()
    ) -> SyncReport:  # fmt: skip
        waits = bool(copy_anew or heal) and not bounds.follow
        at_once = lake_lock(self._settings.layout, self._command, gives_way=bounds.follow)
        lake = self._in_turn(bounds.stop) if waits else at_once
        with self._operation(OperationKind.SYNC, lake) as operation, connect(self._conninfo) as conn:
            operation.given_up = bounds.stop.is_set
            saved = self._saved_catalog(conn)
            self._recover()
            catalog = self._live_catalog(conn, saved)
            log = self._log(conn, catalog.identity)
            work = self._work(catalog, log)
            work.operation = operation
            receiver = ReceiverProcess(self._receiver_settings(catalog, work.progress.highest))
            begin_messages(work)
            stream = LogStream(receiver, log, conn)
            self._check_level(work, stream.source_position())
            # The receiver also checks the slot, but so late that copies would have started Spark already.
            slots.usable_slot(conn, catalog.identity.slot, two_phase=self._settings.two_phase)
            work.progress.request_copy(copy_anew)
            work.progress.heal(heal)
            with registering(work):
                report = Sync(work, self._conninfo, stream, bounds).run()
            operation.failures += [] if report.lost is None else [report.lost]
            operation.renewed += [str(copied.table) for copied in report.copied]
            return report

    def check_range(self, span: LsnRange) -> RangeReport:
        """A backfill of the asset ``change_log``: check that the log contains the whole range."""
        with self._by_hand(OperationKind.BACKFILL) as work:
            return backfill.check(work, span)

    def transform_range(self, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
        """A backfill of the assets ``changes/...``: write the feeds of a range again, from the log."""
        with self._by_hand(OperationKind.BACKFILL) as work:
            return backfill.derive(work, tables, span)

    def messages_range(self, span: LsnRange) -> RangeReport:
        """A backfill of the asset ``messages``: write the feed of logical messages again for a range, from the log."""
        with self._by_hand(OperationKind.BACKFILL) as work:
            return backfill.messages(work, span)

    def apply_range(self, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
        """A backfill of mirrors: for each table, apply the part of the range above its ``replay_lsn``, and repair the
        part below."""
        self._refuse_while_paused()
        with self._by_hand(OperationKind.BACKFILL) as work:
            return backfill.apply(work, tables, span)

    def repair(self, table: TableName, span: LsnRange) -> RangeReport:
        """Compute again, from the log, the rows that changed in a range, and merge them into the mirror."""
        self._refuse_while_paused()
        with self._by_hand(OperationKind.REPAIR) as work:
            return backfill.repair(work, table, span)

    def maintain(self, allowance: Allowance) -> MaintenanceReport:
        """Delete data that is no longer needed, and merge small files. The source is not used."""
        with self._by_hand(OperationKind.MAINTENANCE, allowance.stop) as work:
            report = Maintenance(work, allowance).run()
            # These failures concern single mirrors. They are recorded when the operation ends.
            work.operation.failures += [LakeError(error) for _, error in report.failed]
            work.operation.given_up = allowance.stop.is_set
            return report

    def forget(self, tables: Sequence[TableName]) -> list[Forgotten]:
        """Delete the mirrors of tables that are no longer followed. The source is not used."""
        with self._by_hand(OperationKind.FORGETTING) as work, registering(work):
            return forget_tables(work, tables)

    def _refuse_while_paused(self) -> None:
        if operator_requests(self._settings.layout).paused:
            raise apply_paused(self._settings.layout)

    def _receiver_settings(self, catalog: Catalog, highest: Lsn) -> ReceiverSettings:
        settings = self._settings
        return ReceiverSettings(
            self._conninfo, str(settings.layout.root), catalog.publications, settings.batch_bytes,
            settings.batch_seconds, settings.drain_bytes, highest, tuple(settings.messages), settings.origin,
            streaming=settings.streaming == "auto", two_phase=settings.two_phase,
        )  # fmt: skip

    def _in_turn(self, stop: threading.Event) -> AbstractContextManager[None]:
        """Takes the lake's lock. If a sync in follow mode has it, waits until that sync pauses."""
        return lake_in_turn(self._settings.layout, self._command, partial(self._observer.progress, "lock"), stop)

    @contextmanager
    def _operation(self, kind: OperationKind, lake: AbstractContextManager[None]) -> Iterator[Operation]:
        """Run a block under the lake's lock ``lake``. The outcome is recorded for ``status``, except if the lock cannot
        be taken."""
        layout, command = self._settings.layout, self._command
        refuse_other_lake(self._settings)
        say = partial(self._observer.progress, "outcome")
        with (
            machine_told(layout.root), lake,
            recorded(layout, kind, command, say) as operation, machine_told(layout.root), jvm_death_told(),
        ):  # fmt: skip
            yield operation

    @contextmanager
    def _by_hand(self, kind: OperationKind, stop: threading.Event | None = None) -> Iterator[Work]:
        catalog = required_catalog(self._settings.catalog_file)
        with self._operation(kind, self._in_turn(stop or threading.Event())) as operation:
            self._recover()
            work = self._work(catalog, ChangeLog(self._settings.layout).open())
            work.operation = operation
            begin_messages(work)
            yield work

    def _recover(self) -> None:
        for folder, aside in recover_tables(self._settings.layout):
            if aside:
                self._note_put_aside(folder, aside)

    def _note_put_aside(self, folder: Location | str, names: tuple[str, ...]) -> None:
        text = f"{folder}: its Delta log is incomplete from {names[0]} on; {len(names)} log files were renamed, " \
               "so that readers ignore them"  # fmt: skip
        self._observer.progress("recover", text)

    def _saved_catalog(self, conn: psycopg.Connection[Any]) -> Catalog:
        saved = required_catalog(self._settings.catalog_file)
        found = slots.identity(conn, saved.identity.slot)
        if not found.is_same(saved.identity):
            raise IdentityMismatch(
                f"is database {found.database} of system {found.system_identifier}, but this project was set up for "
                f"database {saved.identity.database} of system {saved.identity.system_identifier}", thing="source",
                do="set `source` to the project's database; for the other database, set up a separate project folder",
            )  # fmt: skip
        return saved

    def _live_catalog(self, conn: psycopg.Connection[Any], saved: Catalog) -> Catalog:
        """Publish new tables, and return the source's present catalog. If a lock on the source prevents reading it,
        return the catalog that was ``saved``. The run's own catalog check then waits for the lock, or reports it."""
        publish_new(conn, self._settings, saved, TableStates(self._settings.layout), self._observer)
        try:
            live = read_catalog(conn, saved.identity, saved.publications, self._settings.tables, saved.tables)
        except CopyBlocked:
            return saved
        refuse_emptied(saved, live.tables)
        if live != saved:
            save_catalog(live, self._settings.catalog_file)
        return live

    def _log(self, conn: psycopg.Connection[Any], identity: Identity) -> ChangeLog:
        """The change log. If there is none, a log is created that starts at the slot's confirmed position. If an
        earlier log was deleted, changes below this position are missing. A mirror that needs them is copied again."""
        log = ChangeLog(self._settings.layout)
        if not log.exists:
            slot = slots.usable_slot(conn, identity.slot, two_phase=self._settings.two_phase)
            refuse_taken_slot(slot, self._settings.layout)
            start = slot.confirmed_flush_lsn
            if start is None:
                raise SetupNeeded("has no confirmed_flush_lsn, where the change log would start", thing=slot.thing)
            with ReplicationConnection.open(self._conninfo, application_name=f"{APPLICATION}/setup") as stream:
                log.create(identity, start, stream.identify().timeline)
        log.open()
        if log.identity != identity:
            raise IdentityMismatch(
                f"belongs to {log.identity.app_id()}, but this project was set up for {identity.app_id()}",
                thing=f"change log {log.path}",
                do="set `source` to the source of this lake, or set `lake` to this source's lake or a new lake",
            )  # fmt: skip
        # The project records its lake before the receiver confirms anything to the slot. So a run with another lake is
        # refused, and cannot take changes that this lake needs.
        note_lake(self._settings, log)
        return log

    def _check_level(self, work: Work, source: Lsn) -> None:
        """Raise LogAhead if the lake is ahead of the source. A source that was restored to an earlier time writes new
        transactions at LSNs that the lake has passed. pgcdc would skip them, as if the lake already had them."""
        stands = work.progress.highest
        if stands > source:
            raise LogAhead(
                f"is at {stands}, ahead of the source's WAL at {source}: the source was restored to an earlier time",
                thing=f"lake {work.layout.root}", do=NEW_LAKE,
            )  # fmt: skip

    def _started_spark(self) -> SparkSession:
        self._observer.progress("spark", "starting")
        return self._session()

    def _work(self, catalog: Catalog, log: ChangeLog) -> Work:
        session = SparkOnDemand(self._started_spark)
        target = DeltaTarget(self._settings.layout, catalog.identity, session, self._settings.retention)
        progress = TablesProgress(self._settings.layout, catalog, target, log.began, log.start)
        for place, aside in progress.recovered.items():
            self._note_put_aside(place, aside)
        return Work(
            settings=self._settings,
            catalog=catalog,
            log=log,
            target=target,
            progress=progress,
            observer=self._observer,
            session=session,
        )
