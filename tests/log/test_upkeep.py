"""Compaction changes only the files of the log. Retention deletes complete batches from the start of the log."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta import commit as delta_commit
from pgcdc_assets.delta.sweep import sweep
from pgcdc_assets.errors import LakeError, LogConflict
from pgcdc_assets.log import commit as log_commit
from pgcdc_assets.log import upkeep
from pgcdc_assets.log.batch import BatchWriter, PendingFrames
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.segment import OWN_FILE_BYTES
from pgcdc_assets.log.upkeep import compact, forget
from pgcdc_assets.store.local import path_of
from tests.log.conftest import rows
from tests.log.streams import begin, commit, describe, frame, insert, relation, run_of

WHO = Identity("7", "db", "slot")
BATCHES = 6


@pytest.fixture
def writer(tmp_path: Path) -> BatchWriter:
    ChangeLog(Layout.of(tmp_path / "lake")).create(WHO, Lsn(100), 1)
    relations = Relations()
    for relation_id in (1, 2, 3):
        describe(relations, relation(relation_id, f"t{relation_id}"), 0)
    return BatchWriter(Location.of(tmp_path / "lake" / "_pgcdc" / "change_log"), WHO, 1, relations)


@pytest.fixture
def log(tmp_path: Path, writer: BatchWriter) -> ChangeLog:
    for number in range(BATCHES):
        _batch(writer, 1000 * (number + 1), [1, 2, 1, 3][number % 3 :])
    return ChangeLog(Layout.of(tmp_path / "lake"))


def _batch(writer: BatchWriter, at: int, relation_ids: list[int], size: int = 10) -> None:
    payloads = [begin(at, 5), *(insert(i, bytes([i]) * size) for i in relation_ids), commit(at, at + 50)]
    frames = PendingFrames()
    frames.append(run_of([frame(payload, at) for payload in payloads], 0))
    writer.commit(frames, [], Lsn(at + 50))


def _state(log: ChangeLog) -> tuple[Any, ...]:
    everything = LsnRange(Lsn(100), log.position())
    return rows(log, "true"), log.batches(Lsn(0)), log.shapes(everything), log.verify(everything), log.position()


def _files(log: ChangeLog) -> int:
    return len(DeltaTable(path_of(log.path)).file_uris())


def _fresh(log: ChangeLog) -> ChangeLog:
    return ChangeLog(Layout.of(log.path.parent.parent))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(str(value) for value in row.values())


def test_compaction_changes_no_row(log: ChangeLog) -> None:
    before = _state(log)
    assert _files(log) == BATCHES
    assert compact(log, LsnRange(Lsn(100), Lsn(4050))) == 3
    assert _files(log) == BATCHES - 3
    after = _state(_fresh(log))
    assert sorted(before[0], key=_key) == sorted(after[0], key=_key)
    assert before[1:] == after[1:]
    assert _state(log)[1:] == after[1:]
    assert compact(log, LsnRange(Lsn(100), Lsn(4050))) == 0


def test_reading_a_relation_or_lsn_range_of_a_compacted_log_skips_files_without_its_rows(
    log: ChangeLog, writer: BatchWriter
) -> None:
    _batch(writer, 9000, [2] * 3, size=OWN_FILE_BYTES)
    _batch(writer, 9900, [1])
    compact(log, LsnRange(Lsn(100), Lsn(6050)))
    span = LsnRange(Lsn(100), Lsn(6050))
    assert len(log.segments(span)) == 1
    assert log.segments(span, [9]) == []
    assert log.segments(LsnRange(Lsn(9950), Lsn(9999))) == []


def test_compaction_writes_a_large_relation_to_a_file_of_its_own(
    log: ChangeLog, writer: BatchWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "OWN_FILE_BYTES", 100)
    before = _state(log)
    _batch_count = _files(log)
    compact(log, LsnRange(Lsn(100), Lsn(6050)))
    assert 1 < _files(log) < _batch_count
    after = _state(_fresh(log))
    assert sorted(before[0], key=_key) == sorted(after[0], key=_key)
    alone = [segment for segment in log.all_segments() if segment.relation_min == segment.relation_max]
    assert alone
    assert not any(segment.notes for segment in alone)


def test_large_files_are_not_rewritten_by_compaction(log: ChangeLog, writer: BatchWriter) -> None:
    for number in range(3):
        _batch(writer, 7000 + 1000 * number, [1], size=OWN_FILE_BYTES + 1)
    large = {segment.path for segment in log.all_segments() if not segment.notes}
    assert len(large) == 3
    assert compact(log, LsnRange(Lsn(100), Lsn(9050))) > 0
    assert large == {segment.path for segment in _fresh(log).all_segments() if not segment.notes}


def test_batch_can_be_committed_after_a_concurrent_compaction(
    log: ChangeLog, writer: BatchWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(point: FaultPoint) -> None:
        if point is FaultPoint.BATCH_COMMITTING:
            monkeypatch.undo()
            assert compact(_fresh(log), LsnRange(Lsn(100), Lsn(6050))) > 0

    monkeypatch.setattr(log_commit, "passed", overtaken)
    _batch(writer, 8000, [1])
    assert len(log.verify(LsnRange(Lsn(100), Lsn(8050)))) == BATCHES + 1


def test_compaction_can_be_committed_after_a_concurrent_batch(
    log: ChangeLog, writer: BatchWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = delta_commit.replace_files

    def overtaken(*arguments: Any, **options: Any) -> int:
        monkeypatch.undo()
        _batch(writer, 8000, [1])
        return replace(*arguments, **options)

    monkeypatch.setattr(upkeep, "replace_files", overtaken)
    assert compact(log, LsnRange(Lsn(100), Lsn(6050))) > 0
    assert len(log.verify(LsnRange(Lsn(100), Lsn(8050)))) == BATCHES + 1


def test_compaction_is_refused_if_another_compaction_has_already_replaced_its_files(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = LsnRange(Lsn(100), Lsn(6050))
    merge = upkeep._merged

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(upkeep, "_merged", merge)
        compact(_fresh(log), span)
        return merge(*arguments)

    before = sorted(_state(log)[0], key=_key)
    monkeypatch.setattr(upkeep, "_merged", overtaken)
    with pytest.raises(LogConflict):
        compact(log, span)
    assert sorted(_state(_fresh(log))[0], key=_key) == before


def test_retention_removes_whole_batches_and_moves_the_start_of_the_log(log: ChangeLog) -> None:
    assert (log.began, log.start) == (100, 100)
    assert forget(log, Lsn(2050)) == 2
    assert (log.began, log.start) == (100, 2050)
    assert _fresh(log).start == 2050
    assert [batch.end for batch in log.batches(Lsn(0))] == [3050, 4050, 5050, 6050]
    assert log.position() == 6050
    assert forget(log, Lsn(2050)) == 0
    assert len(log.verify(LsnRange(Lsn(2050), Lsn(6050)))) == 4


def test_retention_at_an_lsn_inside_a_compacted_file_is_refused(log: ChangeLog) -> None:
    compact(log, LsnRange(Lsn(100), Lsn(4050)))
    with pytest.raises(LakeError, match="a file has batches on both sides"):
        forget(log, Lsn(2050))
    assert log.start == 100
    assert forget(log, Lsn(4050)) == 1
    assert (log.start, [batch.end for batch in log.batches(Lsn(0))]) == (4050, [5050, 6050])


def test_sweep_deletes_old_files_that_the_log_does_not_list(log: ChangeLog, writer: BatchWriter) -> None:
    before = set(path_of(log.path).glob("*.parquet"))
    compact(log, LsnRange(Lsn(100), Lsn(3050)))
    spilled = log.path / "_spill" / "x.parquet"
    path_of(spilled.parent).mkdir(exist_ok=True)
    for orphan in (log.path / "orphan.parquet", spilled):
        path_of(orphan).write_bytes(b"x")
        os.utime(path_of(orphan), (1, 1))
    assert sweep(log.path, timedelta(hours=1)) == 0
    version = DeltaTable(path_of(log.path)).version()
    assert sweep(log.path, timedelta(0)) == 4
    assert sweep(log.path, timedelta(0)) == 0
    left = set(path_of(log.path).glob("*.parquet"))
    assert len(left) == 4
    assert len(left & before) == 3
    assert path_of(spilled).exists()
    assert DeltaTable(path_of(log.path)).version() == version
    assert len(_state(_fresh(log))[1]) == BATCHES
    assert sweep(log.path.parent / "nowhere", timedelta(0)) == 0
