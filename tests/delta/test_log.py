"""pgcdc reads a Delta log by commit numbers, without listing the folder. delta-rs lists the folder. In each version,
pgcdc and delta-rs must find the same files, schema, properties and positions.

The *hint* is the file ``_last_checkpoint``, which has the number of the newest checkpoint. It may be missing, or name
an older checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.log import DeltaLog, DeltaVersion, open_delta
from pgcdc_assets.errors import LakeError

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
STEPS = st.lists(st.sampled_from(["append", "overwrite", "checkpoint", "forget", "hint lost", "hint old"]), max_size=25)


class Grown:
    """A table that delta-rs writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "_delta_log"
        self.fresh = count(1)
        configuration = {"delta.checkpointInterval": "100000", "owner": "me"}
        DeltaTable.create(folder, SCHEMA, configuration=configuration, raise_if_key_not_exists=False)

    @property
    def version(self) -> int:
        return int(DeltaTable(self.folder).version())

    def step(self, kind: str) -> None:
        if kind in ("append", "overwrite"):
            rows = pa.table({"id": [next(self.fresh)], "v": ["x"]}, schema=SCHEMA)
            positions = CommitProperties(app_transactions=[Transaction("app", self.version + 1)])
            write_deltalake(self.folder, rows, mode=kind, commit_properties=positions)  # type: ignore[call-overload]
        elif kind == "checkpoint":
            make_checkpoint(Location.of(self.folder), self.version)
        elif kind == "forget":
            self.forget()
        elif kind == "hint lost":
            (self.log / "_last_checkpoint").unlink(missing_ok=True)
        elif kind == "hint old":
            self.hint_old()

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name[:20]) for path in self.log.glob("*.checkpoint.parquet"))

    def forget(self) -> None:
        """Deletes all log files before the newest checkpoint, as a clean-up by any writer may do."""
        for path in sorted(self.log.glob("0*")):
            if int(path.name[:20]) < max(self.checkpoints(), default=0):
                path.unlink()

    def hint_old(self) -> None:
        """Makes the state that a writer leaves if it dies after it has written its checkpoint, but before it has
        written ``_last_checkpoint``."""
        older = self.checkpoints()[:-1]
        if older:
            (self.log / "_last_checkpoint").write_text(json.dumps({"version": older[-1], "size": 1}))


def same(mine: DeltaVersion | None, theirs: DeltaTable) -> None:
    assert mine is not None
    assert mine.number == theirs.version()
    assert sorted(file.path for file in mine.files) == sorted(Path(uri).name for uri in theirs.file_uris())
    assert mine.positions.get("app") == theirs.transaction_version("app")
    assert mine.configuration == theirs.metadata().configuration
    assert mine.schema == theirs.schema()
    assert sum(file.rows or 0 for file in mine.files) == theirs.count()


@pytest.mark.long
@given(STEPS)
@example(["checkpoint", "hint lost", "checkpoint"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_version_is_the_same_for_pgcdc_and_delta_rs(tmp_path: Path, steps: list[str]) -> None:
    """Handles that were opened at earlier versions read the newest version, even if log files were deleted since."""
    shutil.rmtree(tmp_path / "t", ignore_errors=True)
    table = Grown(tmp_path / "t")
    awake, asleep = DeltaLog(Location.of(table.folder)), [DeltaLog(Location.of(table.folder))]
    for kind in steps:
        table.step(kind)
        asleep.append(DeltaLog(Location.of(table.folder)))
        for handle in (awake, asleep[-1]):
            same(handle.newest(), DeltaTable(table.folder))
    for handle in asleep:
        same(handle.newest(), DeltaTable(table.folder))
    oldest = max(table.checkpoints(), default=0)
    for version in range(oldest, table.version + 1):
        same(DeltaLog(Location.of(table.folder)).at(version), DeltaTable(table.folder, version=version))


@pytest.mark.parametrize("hint", ["whole", "lost"])
def test_handle_opened_before_log_files_were_deleted_reads_the_newest_version(tmp_path: Path, hint: str) -> None:
    table = Grown(tmp_path / "t")
    table.step("append")
    early = DeltaLog(Location.of(table.folder))
    assert early.newest() == open_delta(Location.of(table.folder))
    for kind in ("append", "append", "checkpoint", "forget"):
        table.step(kind)
    assert not (table.log / f"{2:020}.json").exists()
    if hint == "lost":
        (table.log / "_last_checkpoint").unlink()
    same(early.newest(), DeltaTable(table.folder))


def test_a_delta_log_with_a_missing_commit_is_refused(tmp_path: Path) -> None:
    table = Grown(tmp_path / "t")
    for _ in range(3):
        table.step("append")
    (table.log / f"{0:020}.json").unlink()
    with pytest.raises(LakeError, match="need this commit"):
        open_delta(Location.of(table.folder))


def test_reading_a_delta_log_lists_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of one day has 60,000 files. Neither the first read nor a later read may list them."""
    table = Grown(tmp_path / "t")
    for kind in ("append", "checkpoint", "append"):
        table.step(kind)
    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("listed"))
    handle = DeltaLog(Location.of(table.folder))
    for _ in range(2):
        found = handle.newest()
        assert found is not None
        assert found.number == 2


def test_version_whose_log_files_were_deleted_is_reported_as_missing(tmp_path: Path) -> None:
    table = Grown(tmp_path / "t")
    for kind in ("append", "append", "checkpoint", "forget"):
        table.step(kind)
    with pytest.raises(LakeError, match="need this commit"):
        DeltaLog(Location.of(table.folder)).at(1)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("part_size", [pytest.param(None, marks=pytest.mark.long), 3], ids=["whole", "parts"])
def test_table_and_checkpoints_written_by_spark_are_read(
    spark: SparkSession, tmp_path: Path, part_size: int | None
) -> None:
    """Spark's checkpoints have statistics by column and may consist of parts."""
    folder, own = tmp_path / "t", spark.newSession()
    if part_size is not None:
        own.conf.set("spark.databricks.delta.checkpoint.partSize", str(part_size))
    own.sql(f"CREATE TABLE delta.`{folder}` (id BIGINT, v STRING) USING delta TBLPROPERTIES "
            "('delta.enableDeletionVectors' = 'true', 'delta.checkpointInterval' = '4')").collect()  # fmt: skip
    for number in range(3):
        own.range(10 * number, 10 * number + 10).selectExpr("id", "string(id) v").coalesce(1).write.format(
            "delta").mode("append").save(str(folder))  # fmt: skip
        own.sql(f"DELETE FROM delta.`{folder}` WHERE id = {10 * number}").collect()
    names = [path.name for path in (folder / "_delta_log").glob("*.checkpoint*.parquet")]
    assert any(len(name) > 50 for name in names) == (part_size is not None), names
    found = open_delta(Location.of(folder))
    assert found is not None
    theirs = DeltaTable(folder)
    assert found.number == theirs.version()
    assert sorted(file.path for file in found.files) == sorted(Path(uri).name for uri in theirs.file_uris())
    assert [(file.rows, file.deleted) for file in found.files] == [(10, 1)] * 3
    assert {"deletionVectors"} <= found.features
