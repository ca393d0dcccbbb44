"""Deletes the versions of a mirror that no point lists. Every reader can still read the versions that a point lists
(promised versions), unchanged."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog, hinted
from pgcdc_assets.delta.recovery import recover
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.removal import Unneeded, unneeded_parts
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import path_of
from tests.delta.rows import OWNER, SCHEMA, Rows
from tests.history.mirror import make

NAME = TableName("public", "t")
NOW, HOUR = timedelta(0), timedelta(hours=1)


def mirror_of(lake: Path) -> Mirror:
    return Mirrors(Layout.of(lake), OWNER).open(NAME)


def made(lake: Path) -> Rows:
    shutil.rmtree(lake / "public", ignore_errors=True)
    mirror = mirror_of(lake)
    make(mirror, SCHEMA, {IDENTITY: OWNER.app_id(), "delta.logRetentionDuration": "interval 30 days"})
    return Rows(path_of(mirror.path))


def grown(rows: Rows, versions: int) -> None:
    """Adds versions. Each version adds three rows, and deletes one row of each of the two versions before it."""
    for _ in range(versions):
        number = len(rows.history)
        rows.change([3 * number, 3 * number + 1, 3 * number + 2], {3 * number - 1, 3 * number - 5} & rows.held)


def thinned(lake: Path, promised: set[int], grace: timedelta = NOW) -> Unneeded:
    found = unneeded_parts(mirror_of(lake), promised, grace)
    found.delete()
    return found


def assert_reads(rows: Rows, versions: set[int]) -> None:
    """Reads these versions with pgcdc's own reader and with delta-rs. Both open the mirror again for each version."""
    for version in versions:
        assert rows.read(version) == sorted(rows.history[version - 1])
        assert DeltaLog(Location.of(rows.path)).at(version).number == version


@pytest.mark.long
@given(st.integers(1, 45), st.lists(st.sets(st.integers(1, 60), max_size=6), min_size=1, max_size=3), st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_promised_versions_are_kept_and_versions_between_them_are_deleted(
    tmp_path: Path, first: int, rounds: list[set[int]], data: st.DataObject
) -> None:
    """There are several rounds of deleting, with new versions between the rounds. A process that opened the mirror at
    any version still finds the newest version."""
    rows = made(tmp_path)
    promised: set[int] = set()
    asleep: list[DeltaLog] = []
    for number, wanted in enumerate(rounds):
        for _ in range(first if number == 0 else 12):
            grown(rows, 1)
            if data.draw(st.booleans()):
                asleep.append(DeltaLog(Location.of(rows.path)))
                asleep[-1].newest()
        newest = rows.delta.number
        # A version may stop being promised. A version that was deleted is never promised again.
        promised = {version for version in wanted if version in promised or version > newest - 12 or number == 0}
        promised = {version for version in promised if version <= newest}
        found = thinned(tmp_path, promised)
        assert hinted(Location.of(rows.path / "_delta_log")) >= found.whole_from or found.whole_from == 0
        assert_reads(rows, promised | {newest})
        below = set(range(1, found.whole_from)) - promised
        for version in list(below)[:3]:
            with pytest.raises(LakeError):
                DeltaLog(Location.of(rows.path)).at(version)
        for log in asleep:
            told = log.newest()
            assert told is not None
            assert told.number == newest
        again = unneeded_parts(mirror_of(tmp_path), promised, NOW)
        assert (again.files, again.log_files) == ((), ())
        assert recover(Location.of(rows.path), max(promised, default=newest)).number == newest
        assert recover(Location.of(rows.path), max(promised, default=newest)).aside == ()


@pytest.mark.long
@pytest.mark.parametrize("damage", [b"", b"PAR1", bytes(5000)], ids=["empty", "cut", "zeros"])
def test_a_damaged_checkpoint_of_an_old_version_is_written_again(tmp_path: Path, damage: bytes) -> None:
    """A power cut may damage a checkpoint that is being written. No version may depend on an unreadable checkpoint."""
    rows = made(tmp_path)
    grown(rows, 45)
    torn = rows.path / "_delta_log" / f"{7:020}.checkpoint.parquet"
    torn.write_bytes(damage)
    found = thinned(tmp_path, {7, 8, 12, 38})
    assert found.alone == {7, 8, 12}
    assert_reads(rows, {7, 8, 12, 38, 45})
    assert list(storage.walk(mirror_of(tmp_path).mirrors.layout.staging)) == []


def test_an_old_version_is_never_mistaken_for_the_newest(tmp_path: Path) -> None:
    """A power cut may undo deletions and remove ``_last_checkpoint``. A process that opened the mirror before the
    newest version was written deletes nothing."""
    rows = made(tmp_path)
    grown(rows, 45)
    log, stale = rows.path / "_delta_log", mirror_of(tmp_path)
    lost = {path: path.read_bytes() for path in log.glob("*.json") if int(path.stem) < 2}
    assert stale.version == 45
    thinned(tmp_path, {38})
    for path, content in lost.items():
        path.write_bytes(content)
    (log / "_last_checkpoint").unlink()
    told = DeltaLog(Location.of(rows.path)).newest()
    assert told is not None
    assert told.number == 45
    grown(rows, 1)
    with pytest.raises(LakeError, match="was changed by another writer during the search"):
        unneeded_parts(stale, {38}, NOW)
    thinned(tmp_path, {38})
    assert_reads(rows, {38, 46})


@pytest.mark.long
def test_versions_stay_readable_if_a_deletion_is_killed_and_the_next_run_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(tmp_path)
    grown(rows, 45)

    class Killed(BaseException):
        pass

    unlink, left = os.unlink, [0]

    def dying(path: str, **how: Any) -> None:
        # Deletions of temporary files, which are outside this folder, are not counted and not interrupted.
        if str(path).startswith(str(tmp_path)):
            if not left[0]:
                raise Killed
            left[0] -= 1
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", dying)
    killed = 0
    for steps in (0, 1, 20, 5, 17):
        left[0] = steps
        try:
            thinned(tmp_path, {7, 12, 38})
        except Killed:
            killed += 1
        assert_reads(rows, {7, 12, 38, 45})
        told = DeltaLog(Location.of(rows.path)).newest()
        assert told is not None
        assert told.number == 45
    monkeypatch.undo()
    assert killed >= 3
    thinned(tmp_path, {7, 12, 38})
    grown(rows, 10)
    assert_reads(rows, {7, 12, 38, *range(45, 56)})


def test_a_point_has_no_effect_if_the_log_lacks_the_version_that_the_point_lists(tmp_path: Path) -> None:
    """The log lacks the version if Delta's own clean-up deleted it, or if the point is about an earlier table in this
    folder."""
    rows = made(tmp_path)
    grown(rows, 25)
    thinned(tmp_path, {23})
    found = thinned(tmp_path, {4, 23, 99})
    assert found.alone == set()
    assert_reads(rows, {23, 25})


@pytest.mark.long
@pytest.mark.spark
def test_spark_and_delta_rs_read_and_write_a_log_that_lacks_versions(spark: SparkSession, tmp_path: Path) -> None:
    """Time travel, history, VACUUM, OPTIMIZE and other writers' commits work on a log that lacks versions."""
    mirror = mirror_of(tmp_path)
    properties = {IDENTITY: OWNER.app_id(), "delta.checkpointInterval": "10"}
    create_mirror(mirror.path, SCHEMA, properties, mirror.path)
    rows, name = Rows(path_of(mirror.path)), f"delta.`{mirror.path}`"

    def read(version: int | None = None) -> list[int]:
        at = "" if version is None else f" VERSION AS OF {version}"
        return sorted(row[0] for row in spark.sql(f"SELECT id FROM {name}{at}").collect())

    grown(rows, 25)
    assert read() == rows.read()
    thinned(tmp_path, {7, 12, 23})
    for version in (7, 12):
        assert read(version) == sorted(rows.history[version - 1])
    versions = [row["version"] for row in spark.sql(f"DESCRIBE HISTORY {name}").collect()]
    assert {23, 25} <= set(versions)
    assert DeltaTable(path_of(mirror.path)).history(3)[0]["version"] == 25
    spark.sql(f"VACUUM {name}").collect()
    DeltaTable(path_of(mirror.path)).vacuum(dry_run=False)
    spark.sql(f"OPTIMIZE {name}").collect()
    spark.sql(f"INSERT INTO {name} VALUES (-1, 'x')").collect()
    assert read() == sorted([*rows.held, -1])
    assert_reads(rows, {7, 12, 23, 25})
    assert read(12) == sorted(rows.history[11])
