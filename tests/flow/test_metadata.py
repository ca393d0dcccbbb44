"""With ``schema_changes = metadata``, a schema change changes only the mirror's Delta metadata. All writers and readers
handle files from before and after the change."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pyarrow as pa
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core import retention
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.log import DeltaLog, DeltaVersion
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.mirror.delta import compaction
from pgcdc_assets.mirror.delta.compaction import Compaction
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from tests.flow.rig import Rig, T, U
from tests.oracle import RAW, source_rows, written

pytestmark = [pytest.mark.spark, pytest.mark.takes(60)]

CHANGES = ("ALTER TABLE t RENAME v TO w", "ALTER TABLE t RENAME big TO v", "ALTER TABLE u ALTER v TYPE numeric(12,2)")


@pytest.fixture
def rig(rig: Rig) -> Rig:
    return rig.started(batch_seconds=0.1, range_seconds=1, schema_changes="metadata")


def newest(rig: Rig, name: TableName) -> DeltaVersion:
    table = DeltaLog(rig.settings.layout.mirror(name)).newest()
    assert table is not None
    return table


def read(rig: Rig, by: str, name: TableName) -> pa.Table:
    at = Lake(rig.lake).at()
    return at.arrow(name) if by == "files" else at.spark(rig.session(), name).toArrow()


def assert_read(rig: Rig) -> None:
    """Checks that at the newest point, Lake and Spark both read exactly the rows of the source."""
    for name in (T, U):
        columns, expected = source_rows(rig.conn, name.schema, name.name)
        for by in ("files", "Spark"):
            found = read(rig, by, name)
            assert [one for one in found.column_names if not one.startswith("_pgcdc_")] == columns
            misfits = [dict(entry or ()) for entry in found[RAW].to_pylist()]
            data = (written(column, found[column], misfits) for column in columns)
            assert Counter(zip(*data, strict=True)) == expected, by


def follow_all(rig: Rig) -> None:
    rig.commit(*CHANGES)
    rig.sync()
    assert [one.copied for one in rig.observer.structures] == [False, False]
    rig.observer.structures.clear()


@pytest.mark.long
def test_metadata_change_keeps_files_and_later_changes_of_every_kind_are_applied(rig: Rig) -> None:
    """The source does not send unchanged TOAST values. The sync finds them in older files, which were written when the
    column still had its old name."""
    before = {name: {file.path for file in newest(rig, name).files} for name in (T, U)}
    earlier = Lake(rig.lake).at().lsn
    copies = len(rig.observer.copies)
    follow_all(rig)
    assert {name: {file.path for file in newest(rig, name).files} for name in (T, U)} == before
    assert newest(rig, T).features >= {"columnMapping"}
    assert newest(rig, U).features >= {"typeWidening"}
    rig.commit(
        "UPDATE t SET w = 'x' WHERE id < 10", "UPDATE t SET id = -id WHERE id > 45", "DELETE FROM t WHERE id = 20",
        "INSERT INTO t VALUES (1000, 'new', repeat('z', 9000))", "UPDATE u SET v = 1234567890.12 WHERE a < 5",
        "INSERT INTO u VALUES (2000, 1, 9999999999.99), (2001, 1, 'NaN')", "DELETE FROM u WHERE a = 30",
    )  # fmt: skip
    rig.sync()
    assert_read(rig)
    rig.commit("TRUNCATE t", "INSERT INTO t VALUES (1, 'after', NULL)", "INSERT INTO u VALUES (2002, 1, 5)")
    rig.sync()
    assert_read(rig)
    old = Lake(rig.lake).at(earlier)
    assert old.arrow(T).column_names[:3] == ["id", "v", "big"]
    assert old.arrow(U).schema.field("v").type == pa.decimal128(10, 2)
    for was, now in (("", "2"), ("2", "")):
        rig.commit(*(f"ALTER TABLE {name}{was} RENAME TO {name}{now}" for name in "tu"))
        rig.commit(f"UPDATE u{now} SET v = v + 1e9 WHERE a < 5", f"UPDATE t{now} SET w = w || 'x' WHERE id < 5")
        rig.sync()
    assert_read(rig)
    # After ``schema_changes`` was set to ``rewrite``, a schema change rewrites all files of the mirror.
    rig.settings = rig.settings.model_copy(update={"schema_changes": "rewrite"})
    before = {name: {file.path for file in newest(rig, name).files} for name in (T, U)}
    rig.commit("ALTER TABLE t RENAME w TO x", "ALTER TABLE u ALTER v TYPE numeric(14,2)", "UPDATE t SET v = id::text")
    rig.sync()
    assert not before[T] & {file.path for file in newest(rig, T).files}
    assert_read(rig)
    assert len(rig.observer.copies) == copies


@pytest.mark.long
def test_maintenance_works_on_files_from_before_and_after_a_metadata_change(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test first makes a Delta checkpoint of each mirror, and reads the mirrors. Then maintenance merges files from
    before and after the change, and deletes unneeded files."""
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(compaction, "MOST_SMALL", 1)
    follow_all(rig)
    for number in range(3):
        rig.commit(f"INSERT INTO t VALUES ({1000 + number}, 'new', NULL)", f"UPDATE u SET v = 1e9 WHERE a = {number}")
        rig.sync()
    for name in (T, U):
        make_checkpoint(rig.settings.layout.mirror(name), newest(rig, name).number)
    assert_read(rig)
    rig.settings = rig.settings.model_copy(update={"retention": timedelta(0)})
    report = rig.engine("maintain").maintain(Allowance())
    assert report.optimized == [T, U]
    assert report.deleted_files > 0
    assert all(len(newest(rig, name).files) == 1 for name in (T, U))
    assert_read(rig)
    rig.session().sql(f"VACUUM delta.`{rig.lake / 'public/t'}`")
    rig.commit("UPDATE t SET w = 'y' WHERE id < 20", "UPDATE u SET v = v + 0.01 WHERE a < 20")
    rig.sync()
    for name in (T, U):
        rig.session().sql(f"OPTIMIZE delta.`{rig.lake / name.folder}`")
    rig.commit("UPDATE t SET w = 'z' WHERE id > 10", "UPDATE u SET v = v + 0.01 WHERE a > 10")
    rig.sync()
    assert_read(rig)


@pytest.mark.long
def test_repair_rewrite_and_copy_work_after_a_metadata_change(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, the sync also merges the small files of a mirror after each turn."""
    monkeypatch.setattr(DeltaTarget, "compaction", Compaction(look_every=1, most_small=1))
    start = rig.flush()
    rig.commit("UPDATE t SET v = 'before' WHERE id < 5", "UPDATE u SET v = 2 WHERE a < 5")
    follow_all(rig)
    rig.commit("UPDATE t SET w = 'after' WHERE id BETWEEN 3 AND 8", "UPDATE u SET v = 1e9 WHERE a BETWEEN 3 AND 8")
    rig.sync()
    span = LsnRange(start, rig.observer.known_ranges()[-1].end)
    for name in (T, U):
        rig.engine().repair(name, span)
    assert_read(rig)
    rig.commit("ALTER TABLE t ADD c int NOT NULL DEFAULT 5", "ALTER TABLE u ADD c text DEFAULT 'c'")
    rig.sync()
    assert_read(rig)
    rig.engine("snapshot").sync(Bounds(), copy_anew=[T, U])
    rig.commit("ALTER TABLE t DROP v", "ALTER TABLE u RENAME c TO d", "UPDATE u SET d = 'd' WHERE a = 7")
    rig.sync()
    assert_read(rig)
