"""Turns the engine's reports into Dagster events. When an LSN range ends, registers its partition key and records
materialisations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets import logs
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.dagsterinternals import record_check
from pgcdc_assets.defs.partitions import DELETE, register_snapshot

if TYPE_CHECKING:
    from pgcdc_assets.defs.replication import Replication
    from pgcdc_assets.flow.maintenance import MaintenanceReport
    from pgcdc_assets.flow.reports import RangeReport, RunState, StructureChange, SyncReport
    from pgcdc_assets.mirror.target import CopyReport


class Watcher:
    """Receives a run's reports in addition to Dagster, for example to show progress on a command's terminal. This base
    class ignores the reports. It is used in runs that no command waits for."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        """Set this event to end the run at the next boundary."""

    def progress(self, stage: str, message: str, **numbers: float | str) -> None: ...

    def moving(self, now: Callable[[], RunState]) -> None: ...

    def copied(self, report: CopyReport) -> None: ...

    def range_closed(self, report: RangeReport) -> None: ...

    def finished(self, report: SyncReport) -> None: ...

    def maintained(self, report: MaintenanceReport) -> None: ...


class DagsterObserver:
    """The engine's observer inside a Dagster run.

    Events are recorded by asset key, without a look-up of the asset definition, because tables may have been added
    since the code location was loaded. No event is recorded for a table that did not change in a range, because each
    event costs two SQLite transactions. The asset ``consistent_points`` has an event for every range.
    """

    def __init__(self, context: dg.OpExecutionContext, of: Replication, watcher: Watcher) -> None:
        self._context = context
        self._of = of
        self._layout = of.settings.layout
        self._watcher = watcher
        self._ranges = of.register(context.instance)
        self._health = ""
        self._unchecked: set[dg.AssetKey] = set()
        """Mirrors that this run has materialised, but for which it has not yet recorded a check result."""
        self._checked: set[dg.AssetKey] = set()
        """Assets for which this run has recorded a check result."""

    def known_ranges(self) -> list[LsnRange]:
        """The registered ranges. First deletes the keys of ranges that the log no longer contains, and registers again
        the ranges whose keys a user deleted. The engine calls it under the lake's lock."""
        from pgcdc_assets.log.reader import ChangeLog

        log = ChangeLog(self._layout)
        if log.exists and (gone := self._ranges.prune(log.start, log.position())):
            self._context.log.info(
                f"partition keys deleted, because the change log no longer has their ranges: {len(gone)}"
            )
        for hole in self._ranges.mend():
            self._context.log.warning(
                f"Dagster no longer had the partitions of the LSN range {hole}; one partition for the whole range "
                "was added"
            )
        for key in self._ranges.odd():
            what = f"partition {key!r} of {self._ranges.name} is not a range of the change log, so pgcdc ignores it"
            self._context.log.warning(f"{what}; {DELETE}")
        return self._ranges.known()

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        self._watcher.progress(stage, message, **numbers)
        self._context.log.info(f"{stage}: {logs.in_words(message, numbers)}")

    def moving(self, now: Callable[[], RunState]) -> None:
        self._watcher.moving(now)

    def copied(self, report: CopyReport) -> None:
        key = register_snapshot(self._context.instance, self._of.names, report.consistent_point)
        passed(FaultPoint.COPY_REGISTERED)
        found = metadata.of_copy(report, self._of.table(report.table))
        asset = self._of.key("snapshot", report.table)
        self._context.log_event(dg.AssetMaterialization(asset, partition=key, metadata=found))
        self._context.log_event(self._mirror_copied(report, found))
        self._materialised([report.table])
        if not self._health:
            # Record the checks of all tables now, so that the next copies in this run need not read the status again.
            self._tell_health(all_tables=True)
        passed(FaultPoint.COPY_RECORDED)
        self._watcher.copied(report)

    def restructured(self, report: StructureChange) -> None:
        found = metadata.of_structure(report)
        event = dg.AssetObservation(self._of.key("mirror", report.table), description=report.what, metadata=found)
        self._context.log_event(event)

    def _mirror_copied(self, report: CopyReport, found: metadata.Metadata) -> dg.AssetMaterialization:
        """A materialisation of the mirror for a snapshot copy. Without this event, the mirror of a table that never
        changes would never be shown as materialised.

        The copy contains the changes of every range up to the copy's LSN, so the materialisation is for the newest of
        these ranges. It has no partition if there is no such range.
        """
        held = [span for span in self._ranges.known() if span.end <= report.consistent_point]
        newest = held[-1] if held else None
        bounds = metadata.lsns(start_lsn=newest.start, end_lsn=newest.end) if newest else {}
        folder = self._layout.mirror(report.table)
        uri: metadata.Metadata = {"dagster/uri": dg.MetadataValue.text(folder.uri)}
        key = newest.key if newest else None
        return dg.AssetMaterialization(
            self._of.key("mirror", report.table), partition=key, metadata=found | bounds | uri
        )

    def range_closed(self, report: RangeReport) -> None:
        key = self._ranges.add(report.span).key
        for event in self._events(report, key):
            self._context.log_event(event)
        self._materialised(report.tables)
        passed(FaultPoint.RANGE_RECORDED)
        self._tell_health()
        self._watcher.range_closed(report)

    def _materialised(self, tables: Iterable[TableName]) -> None:
        self._unchecked |= {self._of.key("mirror", table) for table in tables} - self._checked

    def _tell_health(self, *, all_tables: bool = False) -> None:
        """Record check results. The first call in a run, and each call after which the problems have changed, records
        the checks that fail, and the checks that pass now but did not pass the last time (``all_tables``: all checks).

        In addition, the run records the check of each mirror that it has materialised, once. Otherwise Dagster would
        show the check as not evaluated, because the materialisation is newer than the last result of the check. If the
        result comes from the same run as the materialisation, Dagster shows the result.
        """
        from pgcdc_assets.defs.checks import current_health, evaluations, health_digest, news

        instance = self._context.instance
        health = current_health(self._of, instance)
        digest, found = health_digest(health), evaluations(self._of, health)
        due = set(self._unchecked)
        if digest != self._health:
            self._health = digest
            due |= {evaluation.asset_key for evaluation in (found if all_tables else news(instance, found))}
        for evaluation in found:
            if evaluation.asset_key in due:
                record_check(self._context, evaluation)
                self._checked.add(evaluation.asset_key)
        self._unchecked -= self._checked

    def _events(self, report: RangeReport, key: str) -> list[dg.AssetMaterialization]:
        """Materialisations of the assets that belong to no single table, such as the log, and of the assets of each
        table that changed."""
        from pgcdc_assets.points.points import ConsistentPoints

        names, placed, key_of = self._of.names, self._of.placed, self._of.key
        found = [(placed(names.change_log), metadata.of_log(report))]
        for table, turn in report.tables.items():
            found.append((key_of("changes", table), metadata.of_changes(report, turn)))
            found.append((key_of("mirror", table), metadata.of_mirror(report, turn, self._of.table(table))))
        if report.messages is not None:
            found.append((placed(names.messages), metadata.of_messages(report)))
        point = ConsistentPoints(self._layout).newest()
        counts = {"tables": len(point.tables) if point else 0, "tables_changed": len(report.tables)}
        found.append((placed(names.consistent_points), metadata.of_range(report) | metadata.numbers(counts)))
        return [dg.AssetMaterialization(asset, partition=key, metadata=entries) for asset, entries in found]
