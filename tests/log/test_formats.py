"""Logs as versions before format 3 wrote them: seven commits, a compaction of the first three batches, a checkpoint.

Rows of format 1 have the end of their batch as a column. ``change_log_format1.tar.gz`` and its like were saved from
such versions.
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
from tests.log.twins import START as TWINS_START
from tests.log.twins import STEP, Change, Transaction, Twin
from tests.log.written import START, WHO, frames_of, writer_of

ENDS = [250, 350, 450, 550, 650, 750]


@pytest.fixture(params=["1", "2"])
def former(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def log(tmp_path: Path, former: str) -> ChangeLog:
    layout = Layout.of(tmp_path / "lake")
    path_of(layout.own).mkdir(parents=True)
    with tarfile.open(Path(__file__).parent / f"change_log_format{former}.tar.gz") as saved:
        saved.extractall(path_of(layout.own), filter="data")
    return ChangeLog(layout)


def _format(log: ChangeLog) -> str:
    return str(DeltaTable(path_of(log.path)).metadata().configuration["pgcdc.format"])


def test_it_is_read_as_it_is(log: ChangeLog, former: str) -> None:
    assert (log.identity, log.start, log.position(), log.timeline) == (WHO, START, Lsn(800), 3)
    assert [batch.end for batch in log.verify(LsnRange(START, Lsn(800)))] == ENDS
    assert [batch.end for batch in log.batches(Lsn(350), Lsn(650))] == [450, 550, 650]
    assert len(log.segments(LsnRange(Lsn(250), Lsn(450)), [1])) == 1
    for segment in log.all_segments():
        assert read_rows(segment.file).schema.equals(FILLED_SCHEMA)
    assert _format(log) == former


def test_the_first_writer_makes_it_one_of_today_s(log: ChangeLog) -> None:
    reader = ChangeLog(log.layout).open()
    before = {segment.path.name for segment in log.all_segments()}
    writer, _ = writer_of(log)
    writer.commit(frames_of(800), [], Lsn(850))
    table = DeltaTable(path_of(log.path))
    assert _format(log) == "3"
    assert [field.name for field in table.schema().fields] == LOG_SCHEMA.names
    assert table.version() == 10
    for one in (reader, ChangeLog(log.layout)):
        assert [batch.end for batch in one.verify(LsnRange(START, Lsn(850)))] == [*ENDS, 850]
        assert before < {segment.path.name for segment in one.all_segments()}
    # A second one finds nothing to do.
    writer_of(log)
    assert DeltaTable(path_of(log.path)).version() == 10


def test_it_takes_files_with_late_facts(log: ChangeLog) -> None:
    changes = tuple(Change("I", 1, 0, sub, b"x") for sub in (0, 1, 2))
    Twin(path_of(log.layout.root), early=True).add([Transaction(changes, (1,))])
    end = Lsn(TWINS_START + STEP)
    (late,) = [segment for segment in log.all_segments() if segment.late is not None]
    assert read_rows(late.file, ["tx_ordinal"])["tx_ordinal"].to_pylist() == [0, 2]
    assert [batch.end for batch in log.verify(LsnRange(START, end))] == [*ENDS, end]
    assert compact(log, LsnRange(START, end)) > 0
    assert [batch.end for batch in ChangeLog(log.layout).verify(LsnRange(START, end))] == [*ENDS, end]


def test_other_engines_read_what_has_files_of_both_formats(log: ChangeLog) -> None:
    writer, _ = writer_of(log)
    writer.commit(frames_of(800), [], Lsn(850))
    query = "SELECT commit_lsn, count(*) AS n FROM log WHERE kind = 'I' GROUP BY 1 ORDER BY 1"
    found = QueryBuilder().register("log", DeltaTable(path_of(log.path))).execute(query).read_all()
    assert dict(zip(found["commit_lsn"].to_pylist(), found["n"].to_pylist(), strict=True)) == dict.fromkeys(
        range(200, 900, 100), 2
    )


def test_it_is_compacted_and_cut_off_like_any_other(log: ChangeLog) -> None:
    writer, _ = writer_of(log)
    writer.commit(frames_of(800), [], Lsn(850))
    assert compact(log, LsnRange(Lsn(450), Lsn(850))) == 3
    assert [batch.end for batch in log.verify(LsnRange(START, Lsn(850)))] == [*ENDS, 850]
    assert forget(log, Lsn(450)) == 1
    assert log.start == 450
    assert [batch.end for batch in log.verify(LsnRange(Lsn(450), Lsn(850)))] == [*ENDS[3:], 850]


def test_what_a_dead_writer_left_of_an_upgrade_is_made_again(log: ChangeLog) -> None:
    """The commit is all of it: with it the table is upgraded, without it, or with a part of it, it is not."""
    writer_of(log)
    log_folder = log.path / "_delta_log"
    commit = max(path_of(log_folder).glob("*.json"))
    commit.unlink()
    again = ChangeLog(log.layout)
    assert again.position() == 800
    writer_of(again)
    assert _format(log) == "3"
