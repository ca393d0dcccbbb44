"""A log as versions before format 2 wrote it: seven commits, a compaction of the first three batches, a checkpoint.

Its rows have the end of their batch as a column. ``change_log_format1.tar.gz`` was saved from such a version.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import FILLED_SCHEMA, LOG_SCHEMA, read_rows
from pgcdc_assets.log.upkeep import compact, forget
from pgcdc_assets.store.local import path_of
from tests.log.test_reader import START, WHO, _transaction, _writer

SAVED = Path(__file__).parent / "change_log_format1.tar.gz"
ENDS = [250, 350, 450, 550, 650, 750]


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    layout = Layout.of(tmp_path / "lake")
    path_of(layout.own).mkdir(parents=True)
    with tarfile.open(SAVED) as saved:
        saved.extractall(path_of(layout.own), filter="data")
    return ChangeLog(layout)


def test_it_is_read_as_it_is(log: ChangeLog) -> None:
    assert (log.identity, log.start, log.position(), log.timeline) == (WHO, START, Lsn(800), 3)
    assert [batch.end for batch in log.verify(LsnRange(START, Lsn(800)))] == ENDS
    assert [batch.end for batch in log.batches(Lsn(350), Lsn(650))] == [450, 550, 650]
    assert len(log.segments(LsnRange(Lsn(250), Lsn(450)), [1])) == 1
    for segment in log.all_segments():
        assert read_rows(segment.file).schema.equals(FILLED_SCHEMA)
    assert DeltaTable(path_of(log.path)).metadata().configuration["pgcdc.format"] == "1"


def test_the_first_writer_makes_it_one_of_today_s(log: ChangeLog) -> None:
    reader = ChangeLog(log.layout).open()
    before = {segment.path.name for segment in log.all_segments()}
    writer, _ = _writer(log)
    writer.commit(_transaction(800), [], Lsn(850))
    table = DeltaTable(path_of(log.path))
    assert table.metadata().configuration["pgcdc.format"] == "3"
    assert [field.name for field in table.schema().fields] == LOG_SCHEMA.names
    assert table.version() == 10
    for one in (reader, ChangeLog(log.layout)):
        assert [batch.end for batch in one.verify(LsnRange(START, Lsn(850)))] == [*ENDS, 850]
        assert before < {segment.path.name for segment in one.all_segments()}
    # A second one finds nothing to do.
    _writer(log)
    assert DeltaTable(path_of(log.path)).version() == 10


def test_other_engines_read_what_has_both_kinds_of_files(log: ChangeLog) -> None:
    writer, _ = _writer(log)
    writer.commit(_transaction(800), [], Lsn(850))
    query = "SELECT commit_lsn, count(*) AS n FROM log WHERE kind = 'I' GROUP BY 1 ORDER BY 1"
    found = QueryBuilder().register("log", DeltaTable(path_of(log.path))).execute(query).read_all()
    assert dict(zip(found["commit_lsn"].to_pylist(), found["n"].to_pylist(), strict=True)) == dict.fromkeys(
        range(200, 900, 100), 2
    )


def test_it_is_compacted_and_cut_off_like_any_other(log: ChangeLog) -> None:
    writer, _ = _writer(log)
    writer.commit(_transaction(800), [], Lsn(850))
    assert compact(log, LsnRange(Lsn(450), Lsn(850))) == 3
    assert [batch.end for batch in log.verify(LsnRange(START, Lsn(850)))] == [*ENDS, 850]
    assert forget(log, Lsn(450)) == 1
    assert log.start == 450
    assert [batch.end for batch in log.verify(LsnRange(Lsn(450), Lsn(850)))] == [*ENDS[3:], 850]


def test_what_a_dead_writer_left_of_an_upgrade_is_made_again(log: ChangeLog) -> None:
    """The commit is all of it: with it the table is upgraded, without it, or with a part of it, it is not."""
    _writer(log)
    log_folder = log.path / "_delta_log"
    commit = max(path_of(log_folder).glob("*.json"))
    commit.unlink()
    again = ChangeLog(log.layout)
    assert again.position() == 800
    _writer(again)
    assert DeltaTable(path_of(log.path)).metadata().configuration["pgcdc.format"] == "3"
