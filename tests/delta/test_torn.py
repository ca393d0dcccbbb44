"""Delta logs after a power cut, which may leave torn files: empty, cut, or partly zeros. Torn files are always
detected. Recovery renames a torn commit and all later commits (moves them aside), so that no reader sees them. If a
consistent point needs a torn commit, recovery moves nothing aside.

A *ledger* is a small Delta table to which syncs only append rows, such as the list of consistent points.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout, Location, commit_name
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.commit import commit_files, settle
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.log import DeltaLog, open_delta
from pgcdc_assets.delta.logfiles import ASIDE, commit_actions
from pgcdc_assets.delta.recovery import foreign_files, recover
from pgcdc_assets.errors import LakeError, LogCorrupt, TornLog
from pgcdc_assets.log.commit import recover_log
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import OWN_FILE_BYTES
from pgcdc_assets.points.ledger import AT, Ledger
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import path_of
from pgcdc_assets.store.localfiles import sync_folder
from tests.deltatables import opened
from tests.fix_postgres import Database
from tests.log.durable import Disk
from tests.log.streams import START, WHO, writer_of
from tests.mirror.pipeline import Pipeline

SCHEMA = pa.schema([("id", pa.int64())])
Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "half": lambda content: content[: len(content) // 2],
    "zeros at the end": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "cut after a line": lambda content: b"".join(content.splitlines(keepends=True)[:-1]),
    "no last newline": lambda content: content[:-1],
    "a line changed": lambda content: content.replace(b'{"add"', b'["add"'),
    "an add action without its size": lambda content: content.replace(b'"size"', b'"sise"'),
}


class Grown:
    """A table with one row per version. delta-rs created it, and our own commits wrote the versions."""

    def __init__(self, folder: Path, properties: dict[str, str | None] | None = None) -> None:
        self.folder, self.log = folder, folder / "_delta_log"
        DeltaTable.create(folder, SCHEMA, configuration=properties)

    def append(self) -> int:
        table = opened(self.folder)
        return commit_files(table, [self.written(table.number + 1)], "append", {"app": table.number + 1})

    def written(self, value: int) -> FileReport:
        with DataFile(Location.of(self.folder), SCHEMA) as file:
            file.write([pa.array([value])])
            report = file.finish()
        assert report is not None
        return report

    def damage(self, version: int, damage: Damage) -> None:
        path = self.log / commit_name(version)
        path.write_bytes(damage(path.read_bytes()))

    def aside(self) -> int:
        return len(list(self.log.glob(f"{ASIDE}*")))


@pytest.fixture
def table(tmp_path: Path) -> Grown:
    table = Grown(tmp_path / "t")
    for _ in range(3):
        table.append()
    return table


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_torn_commit_is_refused_until_it_is_recovered(table: Grown, damage: Damage) -> None:
    table.damage(3, damage)
    with pytest.raises(TornLog, match=commit_name(3)):
        open_delta(Location.of(table.folder))
    assert recover(Location.of(table.folder)).aside == (commit_name(3),)
    assert opened(table.folder).number == DeltaTable(table.folder).version() == 2
    assert table.append() == 3
    assert len(DeltaTable(table.folder).file_uris()) == 3
    assert recover(Location.of(table.folder)).aside == ()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_recovery_keeps_a_damaged_commit_that_a_point_needs(table: Grown, damage: Damage) -> None:
    table.damage(3, damage)
    assert recover(Location.of(table.folder), promised=3).aside == ()
    with pytest.raises(TornLog, match="moves the file aside if no consistent point needs it"):
        open_delta(Location.of(table.folder))


def test_recovery_moves_commits_after_a_missing_commit_aside(table: Grown) -> None:
    """If these commits stayed, they would seem to follow a new commit with the missing number."""
    (table.log / commit_name(2)).unlink()
    assert recover(Location.of(table.folder), promised=1).aside == (commit_name(3),)
    table.append()
    assert opened(table.folder).number == 2


def test_recovery_moves_a_commit_with_a_missing_data_file_aside(table: Grown) -> None:
    lost = next(action["add"]["path"] for action in commit_actions(Location.of(table.log), 2) if "add" in action)
    (table.folder / lost).unlink()
    assert recover(Location.of(table.folder)).aside == (commit_name(2), commit_name(3))
    assert opened(table.folder).number == 1


def test_recovery_accepts_missing_data_files_that_a_later_commit_removed(table: Grown) -> None:
    gone = [file.path for file in opened(table.folder).files]
    commit_files(opened(table.folder), [table.written(9)], "overwrite", {"app": 9})
    for name in gone:
        (table.folder / name).unlink()
    assert recover(Location.of(table.folder)).aside == ()
    assert opened(table.folder).number == 4


@pytest.mark.parametrize("damage", list(DAMAGES.values())[:4], ids=list(DAMAGES)[:4])
def test_torn_checkpoint_is_not_needed_if_the_commits_before_it_exist(table: Grown, damage: Damage) -> None:
    make_checkpoint(Location.of(table.folder), 2)
    make_checkpoint(Location.of(table.folder), 3)
    table.append()
    torn = table.log / f"{3:020}.checkpoint.parquet"
    torn.write_bytes(damage(torn.read_bytes()))
    assert opened(table.folder).number == DeltaLog(Location.of(table.folder)).at(4).number == 4
    assert len(opened(table.folder).files) == 4
    assert torn.name in recover(Location.of(table.folder)).aside
    assert DeltaTable(table.folder).version() == 4
    table.append()
    assert len(opened(table.folder).files) == len(DeltaTable(table.folder).file_uris()) == 5


def test_torn_checkpoint_is_an_error_if_the_commits_before_it_are_deleted(table: Grown) -> None:
    make_checkpoint(Location.of(table.folder), 3)
    torn = table.log / f"{3:020}.checkpoint.parquet"
    torn.write_bytes(b"")
    for number in range(4):
        (table.log / commit_name(number)).unlink()
    recover(Location.of(table.folder))
    with pytest.raises(TornLog, match=torn.name):
        open_delta(Location.of(table.folder))


def test_commits_are_deleted_only_after_their_checkpoint_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, os.fsync)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    table = Grown(tmp_path / "t", {"delta.logRetentionDuration": "interval 0 seconds"})
    for _ in range(3):
        table.append()
    make_checkpoint(Location.of(table.folder), 3)
    assert not (table.log / commit_name(0)).exists()
    table.append()
    settle([Location.of(table.folder)])
    sync_folder(tmp_path)
    left = disk.left(tmp_path.with_name("left"))
    assert not (left / "t" / "_delta_log" / commit_name(0)).exists()
    assert len(opened(left / "t").files) == 4


def test_delta_log_without_a_valid_first_commit_counts_as_missing_after_recovery(tmp_path: Path) -> None:
    table = Grown(tmp_path / "t")
    table.damage(0, lambda content: content.splitlines(keepends=True)[0].rstrip())
    assert recover(Location.of(table.folder)).aside == (commit_name(0),)
    assert open_delta(Location.of(table.folder)) is None


@pytest.mark.parametrize("last", ["metaData", "protocol"])
def test_delta_log_whose_first_commit_was_cut_after_a_line_counts_as_missing_after_recovery(
    tmp_path: Path, last: str
) -> None:
    """In the first commit, Spark writes the protocol last, and delta-rs writes the columns last. Neither engine records
    the number of lines."""
    table = Grown(tmp_path / "t")
    lines = (table.log / commit_name(0)).read_bytes().splitlines()
    left = b"".join(line + b"\n" for line in lines if not line.startswith(f'{{"{last}"'.encode()))
    table.damage(0, lambda _: left.replace(b"delta-rs", b"Apache-Spark"))
    assert recover(Location.of(table.folder)).aside == (commit_name(0),)
    assert open_delta(Location.of(table.folder)) is None


def test_torn_checksum_files_of_other_writers_are_deleted(table: Grown) -> None:
    """If the checksum file of a commit is damaged, Hadoop rejects the commit even if it is intact, so Spark could not
    read it. Recovery does not delete the checksum files of commits that a point needs, because these files were synced
    before the point was published."""
    rival = DeltaTable(table.folder)
    for _ in range(2):
        rival.alter.set_table_properties({"delta.checkpointInterval": "10"})
    newest = opened(table.folder).number
    torn = [table.log / f".{commit_name(number)}.crc" for number in (newest - 1, newest)]
    torn += [table.log / f"{newest:020}.crc", table.log / f".{newest:020}.crc.crc"]
    for path in torn:
        path.write_bytes(b"")
    found = recover(Location.of(table.folder), newest - 1)
    assert (found.number, found.aside) == (newest, ())
    assert [path for path in torn if path.exists()] == torn[:1]
    commits = {newest - 1: commit_actions(Location.of(table.log), newest - 1)}
    assert foreign_files(Location.of(table.folder), commits) == [
        Location.of(path) for path in (table.log / commit_name(newest - 1), torn[0])
    ]


def test_commit_with_an_unknown_action_is_refused(table: Grown) -> None:
    path = table.log / commit_name(4)
    path.write_text('{ "commitInfo" : {} }\n{ "domainMetadata" : {"domain": "d"} }\n{ "cdc": {"path": "c"} }\n')
    assert opened(table.folder).number == 4
    path.write_text('{"newThing": {"path": "c"}}\n')
    with pytest.raises(LakeError, match="unknown action: newThing"):
        open_delta(Location.of(table.folder))
    assert recover(Location.of(table.folder)).aside == ()


def test_commits_work_on_a_file_system_without_hard_links(table: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a file system without hard links, a commit is always complete, and each number is committed only once."""

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    before = opened(table.folder)
    table.append()
    assert len(opened(table.folder).files) == 4
    with pytest.raises(LakeError, match="another writer committed at the same time"):
        commit_files(before, [table.written(9)], "append", {"app": 9})
    assert list(table.log.glob("*.tmp")) == []


@pytest.mark.parametrize("damage", list(DAMAGES.values())[:5], ids=list(DAMAGES)[:5])
def test_ledger_continues_without_its_last_commit_if_this_commit_is_damaged(tmp_path: Path, damage: Damage) -> None:
    schema = pa.schema([("n", pa.int64()), AT])
    ledger = Ledger(Location.of(tmp_path / "l"), schema)
    for number in range(3):
        ledger.append([{"n": number}])
    path = tmp_path / "l" / "_delta_log" / commit_name(3)
    path.write_bytes(damage(path.read_bytes()))
    recover(Location.of(tmp_path / "l"))
    again = Ledger(Location.of(tmp_path / "l"), schema)
    assert again.rows()["n"].to_pylist() == [0, 1]
    again.append([{"n": 7}])
    assert again.rows()["n"].to_pylist() == [0, 1, 7]


# Another process commits during a recovery ----------------------------------------------------------


class ActsBetweenReads:
    """Calls ``act`` once, before call number ``call`` of the functions that list a folder or read a file."""

    def __init__(self, patch: pytest.MonkeyPatch, call: int, act: Callable[[], object]) -> None:
        self._left, self._act = call, act
        patch.setattr(storage, "list_after", self._after(storage.list_after))
        patch.setattr(storage, "read", self._after(storage.read))

    @property
    def done(self) -> bool:
        return self._left <= 0

    def _after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._act()
            return function(*args, **kwargs)

        return called


def test_recovery_of_a_table_keeps_a_commit_that_another_program_makes_during_the_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the user may change a mirror's properties, or compact the mirror, at any time."""
    for call in itertools.count(1):
        table = Grown(tmp_path / str(call))
        with monkeypatch.context() as patch:
            other = ActsBetweenReads(patch, call, table.append)
            assert recover(Location.of(table.folder)).aside == ()
        assert opened(table.folder).number == other.done
        if not other.done:
            break
    assert call > 4


def test_recovery_of_the_change_log_keeps_a_commit_that_a_receiver_makes_during_the_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command was killed, and its receiver still finishes its batch. It then confirms the batch to the source, which
    does not send the batch again."""
    for call in itertools.count(1):
        log = ChangeLog(Layout.of(tmp_path / str(call)))
        log.create(WHO, START, 3)
        writer, _ = writer_of(log)
        with monkeypatch.context() as patch:
            other = ActsBetweenReads(patch, call, partial(writer.advance, Lsn(START + 100)))
            assert recover_log(log.path) == ()
        assert log.position() == START + 100 * other.done
        if not other.done:
            break
    assert call > 4


# A file of the change log is lost or damaged --------------------------------------------------------

LogDamage = Callable[[Path, bytes], None]


def _missing(path: Path, content: bytes) -> None:
    path.unlink()


def _half_written(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def _emptied(path: Path, content: bytes) -> None:
    path.write_bytes(b"")


def _flipped(share: float) -> LogDamage:
    def flip(path: Path, content: bytes) -> None:
        changed = bytearray(content)
        changed[int(len(content) * share)] ^= 4
        path.write_bytes(changed)

    return flip


LOG_DAMAGES: tuple[LogDamage, ...] = (_missing, _half_written, _emptied, *map(_flipped, (0.1, 0.6, 0.99)))


@pytest.mark.spark
def test_error_names_a_damaged_log_file_and_no_row_of_the_file_reaches_a_feed(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    """In the change log, rows of small tables are in the same file as the batch's Relation messages and catalog facts.
    A large table has its own file, which only Spark's workers read."""
    with database.connect() as conn:
        pipe = Pipeline(database, conn, spark, Layout.of(tmp_path / "lake"))
        pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
        pipe.follow("t, u")
        size = 1000
        pipe.transaction(f"INSERT INTO t SELECT g, repeat(md5(g::text), {size // 32}) "
                         f"FROM generate_series(1, {2 * OWN_FILE_BYTES // size}) g",
                         "INSERT INTO u SELECT g, md5(g::text) FROM generate_series(1, 100) g")  # fmt: skip
        end = pipe.receive()
        paths = [segment.path for segment in pipe.log.all_segments()]
        assert len(paths) == 2
        for path in paths:
            content = path_of(path).read_bytes()
            for damage in LOG_DAMAGES:
                damage(path_of(path), content)
                pipe.log = ChangeLog(pipe.layout).open()
                with pytest.raises(LogCorrupt, match=path.name):
                    pipe.derive(end)
                with pytest.raises(LogCorrupt, match=path.name):
                    ChangeLog(pipe.layout).verify(LsnRange(pipe.log.start, end))
                path_of(path).write_bytes(content)
                assert _rows(pipe, "t") == _rows(pipe, "u") == 0
        pipe.log = ChangeLog(pipe.layout).open()
        pipe.turn(end)
        assert _rows(pipe, "u") == 100


def _rows(pipe: Pipeline, name: str) -> int:
    folder = pipe.layout.changes(TableName("public", name))
    if not DeltaTable.is_deltatable(str(folder)):
        return 0
    return sum(pa.table(DeltaTable(path_of(folder)).get_add_actions(flatten=True))["num_records"].to_pylist())
