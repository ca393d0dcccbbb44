"""If an apply fails for one table, only that table is set aside, with the reason. The turn applies all other
changes."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Lock

import pytest
from deltalake.exceptions import DeltaError
from pyspark.errors import AnalysisException

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import LakeError, LogCorrupt, MachineError, ProtocolError, SourceUnavailable, SparkDied
from pgcdc_assets.failures import ATTEMPTS, machine_told, of_one_table
from pgcdc_assets.mirror.delta import tableplan
from pgcdc_assets.mirror.delta.apply import apply_tables
from pgcdc_assets.store.local import path_of
from tests.deltatables import commit, live_files
from tests.mirror.pipeline import Pipeline


@pytest.mark.parametrize("error", [
    LakeError("is damaged"), ProtocolError("a value is not valid for its type"), FileNotFoundError(2, "no", "/lake/x"),
    MemoryError(), PermissionError(13, "no"), ValueError("Karl"), OSError("Karl"), OSError("gone (os error 2)"),
])  # fmt: skip
def test_an_error_of_one_table_is_recognised_and_its_reason_shows_no_values(error: Exception) -> None:
    told = of_one_table(error)
    assert told
    assert "Karl" not in told


@pytest.mark.parametrize("error", [
    LogCorrupt("a segment is damaged"), SourceUnavailable("gone"), SparkDied("ended"), KeyboardInterrupt(),
    OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded"), OSError(24, "Too many open files"),
    OSError("Generic LocalFileSystem error: No space left on device (os error 28)"), ConnectionRefusedError(111, "no"),
    AnalysisException("Job aborted: java.io.IOException: No space left on device"),
    TimeoutError(), TypeError("a fault of this program"), DeltaError("unknown"),
])  # fmt: skip
def test_an_error_of_the_whole_run_is_not_blamed_on_one_table(error: BaseException) -> None:
    assert of_one_table(error) is None


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device", "/lake/t/part-1.parquet"),
    MachineError("No space left on device", thing="lake"),
    OSError("Generic LocalFileSystem error: No space left on device (os error 28)"),
    AnalysisException("Job aborted: java.io.IOException: No space left on device"),
])  # fmt: skip
def test_the_error_for_a_full_disk_names_the_folder(error: Exception) -> None:
    with pytest.raises(MachineError) as told, machine_told(Location.of(Path("/srv/lake"))):
        raise error
    assert "No space left on device" in told.value.what
    assert "/srv/lake" in str(told.value.thing)
    assert "free space" in str(told.value)


def _files(pipe: Pipeline, name: str) -> list[Path]:
    folder = path_of(pipe.mirror(name).path)
    return [folder / added.path for added in live_files(folder)]


def _garble(path: Path) -> None:
    """Damages the pages of a Parquet file, but not its footer."""
    held = bytearray(path.read_bytes())
    held[8 : len(held) // 2] = bytes(255 - byte for byte in held[8 : len(held) // 2])
    path.write_bytes(held)


@pytest.mark.long
@pytest.mark.spark
def test_a_turn_applies_changes_to_intact_mirrors_even_if_other_mirrors_are_broken(pipe: Pipeline) -> None:
    names = ["sound", "emptied", "removed", "garbled", "vector", "retyped", "dropped", "taken", "feed"]
    for name in names:
        pipe.run(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
    pipe.follow(", ".join(names))
    for name in names:
        pipe.run(f"INSERT INTO {name} SELECT g, 'v' || g FROM generate_series(1, 2000) g")
    pipe.turn()
    for name in names:
        pipe.run(f"UPDATE {name} SET v = 'new' WHERE id < 10")
    pipe.turn()
    before = {name: pipe.replayed[name] for name in names}

    _files(pipe, "emptied")[0].write_bytes(b"")
    for path in _files(pipe, "removed"):
        path.unlink()
    for path in _files(pipe, "garbled"):
        _garble(path)
    for path in path_of(pipe.mirror("vector").path).glob("deletion_vector_*.bin"):
        path.write_bytes(path.read_bytes()[:-1])
    at = {name: f"delta.`{pipe.mirror(name).path}`" for name in names}
    columns = "id, CAST(id AS string) AS v, _pgcdc_commit_lsn, _pgcdc_commit_ts, _pgcdc_raw"
    pipe.spark.sql(f"SELECT {columns} FROM {at['retyped']}").withColumnRenamed("v", "w").selectExpr(
        "id", "CAST(w AS int) AS v", "_pgcdc_commit_lsn", "_pgcdc_commit_ts", "_pgcdc_raw"
    ).write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(str(pipe.mirror("retyped").path))
    pipe.spark.sql(f"ALTER TABLE {at['dropped']} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    pipe.spark.sql(f"ALTER TABLE {at['dropped']} DROP COLUMN v")
    pipe.spark.sql(f"ALTER TABLE {at['taken']} ADD COLUMNS (`EXTRA` int)")
    pipe.run("ALTER TABLE taken ADD COLUMN extra int")
    for name in names:
        pipe.run(f"UPDATE {name} SET v = 'newer' WHERE id BETWEEN 5 AND 20", f"INSERT INTO {name} VALUES (3000, 'x')")
    upto = pipe.receive()
    parts = pipe.derive(upto)
    for file in pipe.parts["feed"].files:
        _garble(path_of(pipe.layout.changes(pipe.mirror("feed").name) / file.name))
    known = {pipe.tables[name].name: pipe.tables[name] for name in names}
    done = apply_tables(pipe.spark, pipe.mirrors, list(parts.values()), upto, known)
    found = {result.table.name.name: result.set_aside for result in done}
    expected = {
        "emptied": r"part-.*\.parquet: cannot be read", "removed": r"part-.*\.parquet: cannot be read: No such file",
        "garbled": "cannot be read", "vector": r"deletion_vector_.*\.bin: is damaged", "feed": "cannot be read",
        "retyped": "has column 'v' with another type", "dropped": "no longer has column 'v'",
        "taken": "has a column 'EXTRA' that another writer added, so 'extra' cannot be added",
    }  # fmt: skip
    assert found.pop("sound") is None
    assert {name for name, told in found.items() if told} == set(expected)
    for name, pattern in expected.items():
        told = found[name]
        assert told is not None
        assert told[0] == before[name]
        assert re.search(pattern, told[1]), told
        assert "Traceback" not in told[1]
    pipe.same("sound")


@pytest.mark.long
@pytest.mark.spark
def test_a_column_that_another_writer_added_is_null_in_rows_that_pgcdc_writes(pipe: Pipeline) -> None:
    """The feed's files lack the column that another writer added. So no file of the feed can become a file of the
    mirror, not even a file with only inserts."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    pipe.follow("t, u")
    pipe.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    pipe.turn()
    path = pipe.mirror("t").path
    pipe.spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMNS (note string)")
    pipe.spark.sql(f"UPDATE delta.`{path}` SET note = 'mine'")
    pipe.run("INSERT INTO t VALUES (3, 'c')", "INSERT INTO u VALUES (1)")
    pipe.turn()
    pipe.run("UPDATE t SET v = 'B' WHERE id = 2")
    pipe.turn()
    assert pipe.set_aside == {}
    pipe.same("t")
    pipe.same("u")
    assert pipe.mirrored("t", ["id", "note"]) == [("1", "mine"), ("2", None), ("3", None)]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("times", [1, ATTEMPTS])
def test_a_table_is_not_set_aside_if_another_writer_commits_first(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """During a turn, another writer commits to the mirror just before pgcdc does: once, or before each of pgcdc's
    attempts."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
    pipe.follow("t, u")
    left, one_at_a_time = [times], Lock()

    def meanwhile(point: FaultPoint) -> None:
        """The tables t and u are committed in different threads. Both call this."""
        passed(point)
        with one_at_a_time:
            if point in (FaultPoint.LINK_COMMITTING, FaultPoint.MERGE_COMMITTING) and left[0] > 0:
                left[0] -= 1
                commit(pipe.mirror("t").path, [], "append", {f"other-{point}": times - left[0]})

    monkeypatch.setattr(tableplan, "passed", meanwhile)
    for change in ("INSERT INTO {} VALUES (1, 'a'), (2, 'b')", "UPDATE {} SET v = 'c' WHERE id = 2"):
        left[0] = times
        pipe.run(change.format("t"), change.format("u"))
        stood = pipe.replayed["t"]
        done = pipe.turn()
        assert pipe.set_aside == {}
        pipe.same("u")
        if done["t"].outrun:
            assert times == ATTEMPTS
            pipe.replayed["t"] = stood
            assert not pipe.turn()["t"].outrun
        pipe.same("t")
