"""Delta commits of other writers to mirrors, made with Spark's defaults or with delta-rs. Each is harmless or is
reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.checks.status import status
from pgcdc_assets.cli.console import ConsoleProgress
from pgcdc_assets.cli.status_verify import verified
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import DELETED_FILES
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.errors import LakeError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.mirror.delta.tableplan import merged
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.deltatables import commit, opened
from tests.flow.rig import Rig

pytestmark = pytest.mark.spark

TIMES = (
    "0001-01-01 00:00:00+00", "1500-01-01 12:00:00.000001+00", "1582-10-10 00:00:00+00",
    "1969-12-31 23:59:59.999999+00",
    "2024-02-29 00:00:00+00", "2300-01-01 00:00:00.5+00", "9999-12-31 23:59:59.999999+00",
)  # fmt: skip

SPARK_LEAVES_ROWS = (
    "COMMENT ON TABLE {} IS 'mine'", "ALTER TABLE {} ALTER COLUMN v COMMENT 'mine'",
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')",
    "ALTER TABLE {} ADD COLUMNS (note string)", "OPTIMIZE {} ZORDER BY (at)",
)  # fmt: skip
SPARK_CHANGES_ROWS: Mapping[str, str] = {
    "updated": "UPDATE {} SET v = 'mine' WHERE id = 3",
    "merged": "MERGE INTO {} t USING (SELECT 99 AS id) s ON t.id = s.id WHEN NOT MATCHED THEN INSERT (id) VALUES (99)",
}
WORDS = "another writer changed rows of this mirror (version "
REFUSED = "tracked"
SPARK_IS_REFUSED = "ALTER TABLE {} SET TBLPROPERTIES ('delta.feature.rowTracking' = 'supported')"
RUST_LEAVES_ROWS: tuple[Callable[[DeltaTable], Any], ...] = (
    lambda t: t.alter.set_table_description("mine"), lambda t: t.alter.set_column_metadata("v", {"comment": "mine"}),
    lambda t: t.alter.set_table_properties({"delta.dataSkippingNumIndexedCols": "3"}),
    lambda t: t.alter.add_columns([Field("note", PrimitiveType("string"))]),
    lambda t: t.optimize.compact(), lambda t: t.vacuum(dry_run=False),
)  # fmt: skip
HARMLESS = ["by_spark", "by_rust"]
RUST_CHANGES_ROWS = "r_deleted"
CHANGED = [*SPARK_CHANGES_ROWS, RUST_CHANGES_ROWS]
TABLES = [*HARMLESS, *CHANGED, REFUSED]


@pytest.mark.long
@pytest.mark.takes(60)
def test_commits_of_other_writers_are_harmless_or_reported(
    rig: Rig, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(rig)
    before = ConsistentPoints(rig.settings.layout).newest()
    assert before is not None
    _commit_as_others(rig, spark)
    found = {
        one.name.name: one.reason for one in status(rig.settings).tables if one.reason and one.name.name != REFUSED
    }
    assert found.keys() == {*CHANGED}
    assert all(WORDS in reason for reason in found.values())

    # The source changes the tables, too: a Delta commit of another writer must not delay these changes.
    for name in TABLES:
        rig.conn.execute(f"INSERT INTO {name} SELECT 50, now(), 'new'".encode())
        rig.conn.execute(f"UPDATE {name} SET v = 'changed' WHERE id = 1".encode())
    report = rig.sync()
    ((aside, reason),) = report.set_aside
    assert aside == _name(REFUSED)
    assert re.search("has a table feature .*rowTracking", reason)
    assert dict(report.changed) == {_name(name): reason for name, reason in found.items()}
    assert {problem.what for problem in status(rig.settings).problems if "does not match the source" in problem.what}

    _read_at_points(rig, before.replay_lsn)
    done = verified(rig.settings, _source(rig), None, ConsoleProgress(), lambda lsn, _: _sync_to(rig, lsn))
    compared = {one.table.name: one for one in done.tables}
    assert {name for name, one in compared.items() if not one.equal} == {*CHANGED, REFUSED}
    assert compared["updated"].examples[0].key == {"id": "3"}
    reported_still = {one.name.name: one.reason for one in status(rig.settings).tables}
    assert {name: reported_still[name] for name in CHANGED} == found
    assert (compared["r_deleted"].missing, compared["merged"].extra) == (1, 1)

    _maintained(rig)
    _copied_again(rig, monkeypatch)


def _name(table: str) -> TableName:
    return TableName("public", table)


def _source(rig: Rig) -> str:
    assert rig.settings.source is not None
    return rig.settings.source


def _sync_to(rig: Rig, lsn: Lsn) -> None:
    rig.sync(until=lsn)


def _fill(rig: Rig) -> None:
    """Makes mirrors with several files and a deletion vector, so that compaction has files to merge and deleted rows to
    purge."""
    values = ", ".join(f"({number}, '{time}', 'v')" for number, time in enumerate(TIMES))
    for name in TABLES:
        rig.conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, at timestamptz, v text)".encode())
        rig.conn.execute(f"INSERT INTO {name} VALUES {values}".encode())
    rig.setup()
    rig.sync()
    for name in TABLES:
        rig.conn.execute(f"INSERT INTO {name} SELECT 20, '{TIMES[0]}', 'v'".encode())
        rig.conn.execute(f"DELETE FROM {name} WHERE id = 2".encode())
    rig.sync()


def _commit_as_others(rig: Rig, spark: SparkSession) -> None:
    # A new session has Spark's defaults.
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    statements = [("by_spark", statement) for statement in SPARK_LEAVES_ROWS]
    for name, statement in [*statements, *SPARK_CHANGES_ROWS.items(), (REFUSED, SPARK_IS_REFUSED)]:
        theirs.sql(statement.format(f"delta.`{rig.settings.layout.mirror(_name(name))}`")).collect()
    for commit_theirs in RUST_LEAVES_ROWS:
        commit_theirs(DeltaTable(path_of(rig.settings.layout.mirror(_name("by_rust")))))
    DeltaTable(path_of(rig.settings.layout.mirror(_name(RUST_CHANGES_ROWS)))).delete("id = 3")


def _read_at_points(rig: Rig, before: int) -> None:
    """Checks that points below the commits of other writers are read as before. At later points, only tables with
    harmless commits can be read."""
    lake = Lake(rig.lake)
    newest = lake.at()
    for name in CHANGED:
        assert len(lake.at(before).arrow(f"public.{name}")) == len(TIMES)
        with pytest.raises(LakeError, match="another writer changed rows of this mirror"):
            newest.arrow(f"public.{name}")
    assert {name.name for name in newest.tables} == {"t", "u", *HARMLESS}
    for name in HARMLESS:
        query = f"SELECT id, at AT TIME ZONE 'UTC' FROM {name} WHERE id NOT IN (50)"
        rows = newest.arrow(f"public.{name}").select(["id", "at"]).to_pylist()
        found = {row["id"]: row["at"].replace(tzinfo=None) for row in rows if row["id"] != 50}
        assert found == dict(rig.conn.execute(query.encode()).fetchall()), name


def _maintained(rig: Rig) -> None:
    """Maintenance repairs retention settings that another writer made too short."""
    folder = rig.settings.layout.mirror(_name("by_rust"))
    DeltaTable(path_of(folder)).alter.set_table_properties({DELETED_FILES: "interval 1 hours"})
    assert rig.engine("maintain").maintain(Allowance()).failed == []
    assert opened(folder).configuration[DELETED_FILES] == "interval 192 hours"
    # Spark wrote this table's timestamps as INT96, which only delta-rs reads wrong. `Lake.at` reads them right.
    rig.assert_equal(*(f"public.{name}" for name in HARMLESS if name != "by_spark"))


def _copied_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a changed mirror is no longer reported after a new copy. A concurrent Delta commit of another writer
    makes neither the copy nor a repair fail."""
    left = {"public/updated": 1, "public/by_rust": 1}

    def racing(step: Callable[..., int], *args: Any) -> int:
        folder = args[0].folder
        place = f"{folder.parent.name}/{folder.name}"
        if left.get(place, 0) > 0:
            left[place] -= 1
            commit(folder, [], "append", {"other": 1})
        return step(*args)

    monkeypatch.setattr("pgcdc_assets.mirror.delta.copy.commit_files", lambda *args: racing(commit_files, *args))
    monkeypatch.setattr("pgcdc_assets.mirror.delta.apply.merged", lambda *args: racing(merged, *args))
    DeltaTable(path_of(rig.settings.layout.mirror(_name("by_rust")))).delete("id = 20")
    rig.engine().repair(_name("by_rust"), rig.observer.ranges[0].span)
    rig.assert_equal("public.by_rust")
    report = rig.engine().sync(Bounds(), copy_anew=[_name(name) for name in [*CHANGED, "by_rust", REFUSED]])
    assert left == {"public/updated": 0, "public/by_rust": 0}
    assert report.changed == []
    assert {name.name for name, _ in report.set_aside} <= {REFUSED}
    rig.assert_equal(*(f"public.{name}" for name in CHANGED))
    assert len(Lake(rig.lake).at().arrow("public.updated")) == len(TIMES) + 1
    assert not [one for one in status(rig.settings).tables if one.reason and one.name.name != REFUSED]
    assert rig.settings.retention == timedelta(days=7)
