"""Maintenance of a whole lake: points within ``retention`` stay readable, and data that no point and no mirror needs is
deleted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.checks.report import TableReport
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core import retention
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.definition import commit_properties
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.feed import table
from pgcdc_assets.flow.boundary import Boundary
from pgcdc_assets.flow.maintenance import Allowance, Maintenance, MaintenanceReport
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta import compaction
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirrors
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import load_catalog
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig, T, U, promised, turns
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark


def counts(report: MaintenanceReport) -> int:
    """Adds up the files and points that were deleted or merged, and the tables whose mirrors were compacted."""
    return report.log_files + report.feed_files + report.points + report.deleted_files + len(report.optimized)


def no_spark() -> SparkSession:
    raise AssertionError("nothing was to be done, and Spark was asked for")


def maintain(rig: Rig, days: int | None = None, **allowance: Any) -> MaintenanceReport:
    if days is not None:
        rig.settings = rig.settings.model_copy(update={"retention": timedelta(days=days)})
    return rig.engine("maintain").maintain(Allowance(**allowance))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes maintenance delete unneeded files at once, and merge the files of every table with more than one small
    file."""
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(compaction, "MOST_SMALL", 1)
    monkeypatch.setattr(table, "FEWEST_MERGED", 2)


@pytest.mark.takes(40)
def test_maintenance_keeps_points_within_retention_and_a_second_run_changes_nothing(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    turns(rig, 2)
    before = promised(rig)
    log = ChangeLog(rig.settings.layout)
    ranges = [report.span for report in rig.observer.ranges]

    kept = maintain(rig, days=7)
    assert kept.optimized == [T, U]
    assert (kept.points, kept.log_files, kept.deleted_files, log.start) == (0, 0, 0, log.began)
    assert {key: rows for key, rows in promised(rig).items() if key in before} == before
    assert kept.feed_files == 0, "the syncs have already merged the feed's files"

    report = maintain(rig, days=0)
    assert report.points == len({lsn for lsn, _ in before})
    assert len(ConsistentPoints(rig.settings.layout).all()) == 1
    assert (report.log_start, report.failed, report.left) == (ranges[-1].end, [], [])
    assert report.log_files > 0
    assert report.vacuumed == [T, U]
    assert report.deleted_files > 0
    left = promised(rig)
    assert len(left) == 2
    assert left == {key: before[key] for key in left}
    rig.assert_equal()

    tables = sorted(path.parent for path in rig.lake.rglob("_delta_log"))
    versions = [DeltaTable(path).version() for path in tables]
    rig.session = no_spark
    again = maintain(rig, days=0)
    assert not counts(again), again
    assert [DeltaTable(path).version() for path in tables] == versions


@pytest.mark.long
def test_points_stay_readable_if_maintenance_is_killed_between_any_two_steps(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.setup()
    rig.sync()
    turns(rig, 2)
    before = promised(rig)
    newest = max(lsn for lsn, _ in before)

    class Killed(BaseException):
        pass

    def killed(self: Maintenance) -> None:
        raise Killed

    for step in ("publish", "prune", "cut", "vacuum", "sweep"):
        with monkeypatch.context() as patch:
            patch.setattr(Maintenance, step, killed)
            with pytest.raises(Killed):
                maintain(rig, days=0)
        left = promised(rig)
        assert left == {key: before[key] for key in left}
        assert {key for key in left if key[0] == newest} == {(newest, "public.t"), (newest, "public.u")}
    assert maintain(rig, days=0).failed == []
    assert not counts(maintain(rig, days=0))
    turns(rig, 1, first=2000)
    rig.assert_equal()


@pytest.mark.long
def test_maintenance_continues_after_an_unreadable_mirror_or_a_mirror_of_another_project(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    turns(rig, 1)
    layout = rig.settings.layout
    torn = layout.mirror(T) / "_delta_log" / f"{Mirrors(layout, ChangeLog(layout).identity).open(T).version:020}.json"
    content = path_of(torn).read_bytes()
    path_of(torn).write_bytes(content[:100])
    report = maintain(rig, days=7)
    assert {name for name, _ in report.failed} == {T}
    assert report.optimized == [U], "only the table u is maintained"
    commit_properties(DeltaLog(layout.mirror(U)).at(Mirrors(layout, ChangeLog(layout).identity).open(U).version),
                      {IDENTITY: "somebody else"})  # fmt: skip
    report = maintain(rig, days=7)
    assert {name for name, _ in report.failed} == {T}
    assert report.optimized == [], "the mirror of another project is left alone"


@pytest.mark.long
def test_verify_reads_each_mirror_at_its_point_even_if_older_points_are_deleted_before_verify_ends(rig: Rig) -> None:
    """After the first table is compared, a sync and a maintenance run. They delete all points except the newest point
    and the point of the running ``verify``."""
    rig.setup()
    rig.sync()
    left: list[int] = []

    def after_the_first_table(report: TableReport) -> None:
        if report.table == T:
            turns(rig, 2)
            maintain(rig, days=0)
            left.append(len(ConsistentPoints(rig.settings.layout).all()))

    def sync_to(lsn: Lsn, max_seconds: float | None) -> None:
        rig.sync(until=lsn, max_seconds=max_seconds)

    source, catalog = rig.settings.source, load_catalog(CATALOG_FILE)
    assert source is not None
    assert catalog is not None
    boundary = Boundary(rig.settings, source, sync_to, lambda _: None)
    report = verify(
        rig.settings, catalog, [T, U], boundary.reach, snapshot=boundary.snapshot, on_table=after_the_first_table
    )
    assert [(table.table, table.reason, table.equal) for table in report.tables] == [(T, None, True), (U, None, True)]
    assert left == [2]
    assert maintain(rig, days=0).points == 1
    assert len(ConsistentPoints(rig.settings.layout).all()) == 1
