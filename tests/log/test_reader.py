"""The change log as a Delta table: its position is set by compare-and-set, it is durable, readers get its rows, and
damage is detected."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

from pgcdc_assets.core.formats import FORMAT_PROPERTY
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.errors import LogConflict, LogCorrupt, SetupNeeded, UnknownFormat
from pgcdc_assets.log.commit import LogWriter
from pgcdc_assets.log.content import StagedSegments
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import LOG_SCHEMA
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.spill import SPILL
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.store.local import path_of
from tests.log.streams import START, WHO, frames_of, writer_of


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    log = ChangeLog(Layout.of(tmp_path / "lake"))
    log.create(WHO, START, 3)
    return log


def test_position_of_a_new_log_is_its_start(log: ChangeLog) -> None:
    assert (log.identity, log.start, log.position(), log.timeline) == (WHO, START, START, 3)
    assert log.batches(Lsn(0)) == []
    assert log.segments(LsnRange(Lsn(0), Lsn(1 << 60))) == []
    assert log.shapes(LsnRange(Lsn(0), Lsn(1 << 60))) == {}


def test_error_for_a_missing_log_advises_setup(tmp_path: Path) -> None:
    log = ChangeLog(Layout.of(tmp_path))
    assert not log.exists
    with pytest.raises(SetupNeeded):
        log.open()


def test_log_of_another_format_version_is_refused(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    schema = Schema.from_arrow(LOG_SCHEMA)
    create_table(layout.change_log, schema, {FORMAT_PROPERTY: "2"}, {}, layout.root)
    for use in (ChangeLog(layout).open, lambda: LogWriter(layout.change_log, WHO)):
        with pytest.raises(UnknownFormat, match=r"change log .*: has format 2, .* reads format 1; use the version"):
            use()


def test_moving_the_position_without_rows_adds_no_file(log: ChangeLog) -> None:
    writer, _ = writer_of(log)
    writer.advance(Lsn(200))
    assert log.position() == 200
    assert DeltaTable(path_of(log.path)).file_uris() == []


def test_position_is_set_by_compare_and_set(log: ChangeLog) -> None:
    one, _ = writer_of(log)
    other, _ = writer_of(log)
    one.commit(frames_of(300), [], Lsn(350))
    with pytest.raises(LogConflict, match="ends at 0/15E, but the batch to commit begins at 0/64"):
        other.commit(frames_of(300), [], Lsn(350))
    with pytest.raises(LogConflict):
        other.advance(Lsn(200))
    assert log.position() == 350
    assert len(log.batches(Lsn(0))) == 1
    assert sum(segment.rows for segment in log.segments(LsnRange(Lsn(0), Lsn(1000)))) == 6


def test_batches_and_segments_are_found_by_lsn_range(log: ChangeLog) -> None:
    writer, _ = writer_of(log)
    for at, relation_id in ((200, 1), (300, 2), (400, 1)):
        writer.commit(frames_of(at, relation_id), [], Lsn(at + 50))
    assert [batch.end for batch in log.batches(START)] == [250, 350, 450]
    assert [batch.end for batch in log.batches(Lsn(250), Lsn(350))] == [350]
    assert [batch.counts for batch in log.batches(START)] == [{1: {"I": 2}}, {2: {"I": 2}}, {1: {"I": 2}}]
    assert [batch.others for batch in log.batches(START)] == [{"C": 1}] * 3
    assert len(log.segments(LsnRange(Lsn(250), Lsn(350)))) == 1
    assert len(log.segments(LsnRange(START, Lsn(450)), [1])) == 2
    assert len(log.segments(LsnRange(START, Lsn(450)), [3])) == 0
    assert {shape.relation_id for shape in log.shapes(LsnRange(Lsn(250), Lsn(350))).values()} == {2}
    assert {shape.relation_id for shape in log.shapes(LsnRange(Lsn(210), Lsn(450))).values()} == {1, 2}


def test_log_span_reads_the_batches_of_its_lsn_range_only_once(log: ChangeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = writer_of(log)
    for at, relation_id in ((200, 1), (300, 2), (400, 1)):
        writer.commit(frames_of(at, relation_id), [], Lsn(at + 50))
    read: list[Lsn] = []
    batches = log.batches

    def noted(after: Lsn) -> list[BatchSummary]:
        read.append(after)
        return batches(after)

    monkeypatch.setattr(log, "batches", noted)
    span = LogSpan(log, LsnRange(Lsn(210), Lsn(440)))
    assert [batch.end for batch in span.batches] == [250, 350, 450]
    assert [batch.end for batch in span.ending_within(Lsn(210), Lsn(440))] == [250, 350]
    assert span.ending_within(Lsn(440), Lsn(210)) == []
    part = span.part(LsnRange(Lsn(250), Lsn(350)))
    assert ([batch.end for batch in part.batches], {s.relation_id for s in part.shapes.values()}) == ([350], {2})
    assert part.rows == {2: {"I": 2}}
    assert part is span.part(LsnRange(Lsn(250), Lsn(350)))
    assert part.kinds({1, 2}) == {"I": 2}
    assert LogSpan(log, LsnRange(Lsn(250), Lsn(250))).batches == []
    assert read == [Lsn(210)]
    assert [batch.end for batch in part.part(LsnRange(START, Lsn(350))).batches] == [250, 350]
    assert read == [Lsn(210), START], "an LSN range that begins below the span is read from the log"


def _first_file(log: ChangeLog) -> Path:
    (segment,) = log.segments(LsnRange(START, Lsn(1000)))
    return path_of(segment.path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lose_a_row(path: Path) -> None:
    """Writes a valid Parquet file of the same size that has one row less. Only the row counts show the loss."""
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)


def _flip_a_bit(path: Path) -> None:
    """Flips a bit in the middle of the column ``payload``. Row counts do not show this damage."""
    footer = pq.read_metadata(path)
    payload = footer.row_group(footer.num_row_groups - 1).column(LOG_SCHEMA.get_field_index("payload"))
    content = bytearray(path.read_bytes())
    content[payload.data_page_offset + payload.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _lose_a_row, _flip_a_bit])
def test_damaged_file_is_detected(log: ChangeLog, damage: Any) -> None:
    writer, _ = writer_of(log)
    writer.commit(frames_of(200), [], Lsn(250))
    assert len(log.verify(LsnRange(START, Lsn(250)))) == 1
    damage(_first_file(log))
    with pytest.raises(LogCorrupt):
        ChangeLog(Layout.of(log.path.parent.parent)).verify(LsnRange(START, Lsn(250)))


def test_file_with_an_unreadable_summary_is_named_in_the_error(log: ChangeLog) -> None:
    writer, _ = writer_of(log)
    writer.commit(frames_of(200), [], Lsn(250))
    path = _first_file(log)
    content = path.read_bytes()
    table = pq.read_table(path)
    spoilt = [b"{" if kind == "#" else payload for kind, payload in zip(table["kind"].to_pylist(),
              table["payload"].to_pylist(), strict=True)]  # fmt: skip
    pq.write_table(table.set_column(10, "payload", pa.array(spoilt, pa.binary())), path)
    with pytest.raises(LogCorrupt, match=path.name):
        ChangeLog(Layout.of(log.path.parent.parent)).batches(START)
    path.write_bytes(content)
    assert len(ChangeLog(Layout.of(log.path.parent.parent)).batches(START)) == 1


def test_position_that_is_not_an_lsn_is_reported_as_damage(log: ChangeLog) -> None:
    commit = path_of(log.path) / "_delta_log" / f"{0:020}.json"
    commit.write_text(commit.read_text().replace(f'"version": {int(START)}', f'"version": {1 << 70}'))
    with pytest.raises(LogCorrupt, match="is damaged, and cannot be read"):
        ChangeLog(log.layout).position()


def test_file_that_was_changed_after_it_was_written_is_not_committed(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = writer_of(log)
    moving = writer._spill.move

    def spoil(files: Any, end: Lsn) -> Any:
        moved = moving(files, end)
        path = path_of(log.path / moved[0].path)
        pq.write_table(pq.read_table(path).drop_columns(["xid"]), path)
        return moved

    monkeypatch.setattr(writer._spill, "move", spoil)
    with pytest.raises(LogCorrupt):
        writer.commit(frames_of(200), [], Lsn(250))
    assert log.position() == START


def test_log_files_are_synced_before_the_commit_and_the_commit_before_it_is_reported(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = writer_of(log)
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(path_of(log.path.parent)).as_posix()
        name = re.sub(r"_\d{20}\.json\..*", "commit", re.sub(r"\w{32}\.draft", "draft", name))
        synced.append((name, _version(log)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    before = _version(log)
    writer.commit(frames_of(200), [], Lsn(250))
    written = synced.index((f"change_log/{SPILL}/draft", before))
    folder = synced.index(("change_log", before))
    commit = synced.index(("change_log/_delta_log/commit", before))
    assert written < folder < commit
    assert ("change_log/_delta_log", before + 1) in synced[commit + 1 :]
    assert all(version == before for _, version in synced[: commit + 1])


def _version(log: ChangeLog) -> int:
    return int(DeltaTable(path_of(log.path)).version())


def test_uncommitted_files_of_a_dead_process_are_deleted_when_the_next_process_starts(log: ChangeLog) -> None:
    writer, _ = writer_of(log)
    staged = StagedSegments()
    writer.stage(frames_of(200), staged)
    assert len(list(path_of(log.path / SPILL).iterdir())) == 1
    again, _ = writer_of(log)
    assert list(path_of(log.path / SPILL).iterdir()) == []
    again.commit(frames_of(200), [], Lsn(250))
    assert len(log.verify(LsnRange(START, Lsn(250)))) == 1


def test_log_has_the_columns_that_readers_rely_on() -> None:
    assert LOG_SCHEMA.names == [
        "commit_lsn", "tx_ordinal", "xid", "commit_ts", "origin", "lsn", "kind", "relation_id", "schema_id", "payload",
        "subxid",
    ]  # fmt: skip
    assert all(field.nullable for field in LOG_SCHEMA)
