"""The positions that the receiver confirms. A receiver must never make the source keep WAL or delay the source's
shutdown. A **mark** is an LSN up to which the flow orders the receiver to complete the log."""

from __future__ import annotations

import gc
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.definition import commit_properties, create_table
from pgcdc_assets.delta.log import Added, open_delta
from pgcdc_assets.errors import CommitLost, LogConflict
from pgcdc_assets.log.batch import BatchWriter, Committed, PendingFrames
from pgcdc_assets.log.commit import LogWriter, shut_out
from pgcdc_assets.log.content import CommittedContent, StagedSegments
from pgcdc_assets.log.extent import complete_to
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.batches import Limits
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import Database, fresh_database
from tests.log.conftest import PUBLICATION, SECONDS, Source, content, eventually, rows, until_event
from tests.log.durable import Disk
from tests.log.inside import RECEIVING, receive_inside, writing
from tests.servers import new_server

_FOREIGN = "INSERT INTO foreign_table SELECT g, repeat('x', 500) FROM generate_series(1, 40000) g"
"""About 22 MB of WAL."""


@pytest.mark.long
def test_receiver_does_not_import_pandas(source: Source) -> None:
    """pyarrow imports pandas when it converts a list to an array. That costs each run 0.3 s of CPU time and 60 MB."""
    receiver = source.receiver(source.log())
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    until_event(receiver, "batch")
    libraries = [library.path for library in psutil.Process(receiver.pid).memory_maps()]
    assert any("/pyarrow/" in path for path in libraries)
    assert not any("/pandas/" in path for path in libraries)
    receiver.stop()


def test_receiver_does_not_keep_the_list_of_the_files_of_the_log(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may last for days. The memory that it needs must not depend on the size of the log."""
    log, run = source.log(), Receiver.run
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    assert log.all_segments()
    known = files_in_memory()
    kept: list[Added] = []

    def observed(receiver: Receiver) -> Lsn:
        kept.extend(file for file in files_in_memory() if not any(file is other for other in known))
        return run(receiver)

    monkeypatch.setattr(Receiver, "run", observed)
    source.receive(log, source.run("INSERT INTO a VALUES (2, 'x')"))
    assert [row["kind"] for row in rows(log)] == ["I", "C", "I", "C"]
    assert kept == []


def files_in_memory() -> list[Added]:
    """All objects in this process that describe a file of a Delta table."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Added]


def test_position_above_wal_without_published_changes_is_recorded_then_confirmed(source: Source) -> None:
    log = source.log()
    # With streaming, the server would also send the end of the large transaction that follows. This end would then be a
    # boundary.
    receiver = source.receiver(log, streaming=False)
    until_event(receiver, "started")
    before = source.lsn()
    source.run(_FOREIGN)
    position = until_event(receiver, "position")[-1].lsn
    assert position - before >= Limits.foreign_wal_bytes // 2
    assert log.position() >= position
    eventually(lambda: source.confirmed(log) >= position)
    assert rows(log, "true") == []
    receiver.stop()


@pytest.mark.long
def test_apply_lsn_that_the_parent_process_reports_is_sent_to_the_server(source: Source) -> None:
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    end = until_event(receiver, "batch")[-1].lsn
    receiver.report_apply(end)
    source.run("INSERT INTO a VALUES (2, 'x')")
    until_event(receiver, "batch")
    eventually(lambda: source.scalar_lsn(_reported("replay_lsn")) == end)
    receiver.report_apply(log.start)
    source.run("INSERT INTO a VALUES (3, 'x')")
    until_event(receiver, "batch")
    assert source.scalar_lsn(_reported("replay_lsn")) == end
    receiver.stop()


def test_large_transaction_is_spilled_to_files_and_stored_completely(source: Source) -> None:
    log = source.log()
    source.transaction(
        "INSERT INTO a SELECT g, repeat(md5(g::text), 12) FROM generate_series(1, 120000) g",
        "INSERT INTO b SELECT g, g FROM generate_series(1, 1000) g",
        "UPDATE a SET v = 'y' WHERE id <= 1000",
    )
    end = source.run("INSERT INTO a VALUES (0, 'after')")
    receiver = source.receiver(log, batch_bytes=1 << 20)
    receiver.until(end)
    until_event(receiver, "arrived")
    found = rows(log)
    commits = [row["commit_lsn"] for row in found]
    assert len(set(commits)) == 2
    first = min(commits)
    large = [row for row in found if row["commit_lsn"] == first]
    assert [row["tx_ordinal"] for row in large] == list(range(122_001))
    holders = [batch for batch in log.batches(log.start) if batch.start <= first < batch.end]
    # One batch contains both transactions. Its counts include all rows except the two Commits.
    assert [sum(sum(kinds.values()) for kinds in batch.counts.values()) for batch in holders] == [len(large) - 1 + 1]
    assert [batch.others["C"] for batch in holders] == [2]
    assert len({row["xid"] for row in large}) == 1
    assert not list(path_of(log.path / "_spill").iterdir())


def test_source_can_shut_down_while_a_receiver_is_connected(database: Database, source: Source) -> None:
    """A fast shutdown waits until everything that was sent is confirmed. The server requests a reply in a keepalive,
    and the receiver then ends its batch, which would otherwise stay open for an hour."""
    server = new_server(source.folder / "own", database.server.version)
    with server:
        mine = Database(server, "postgres")
        with mine.connect() as conn:
            own = Source(mine, conn, source.folder / "lake")
            own.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a")
            log = own.log()
            receiver = own.receiver(log, batch_seconds=3600)
            try:
                until_event(receiver, "started")
                end = own.run("INSERT INTO a VALUES (1, 'x')")
                # Wait until the receiver has read the relation's catalog facts: it needs an SQL session for this, and a
                # shutdown ends SQL sessions first.
                eventually(lambda: _written(own) >= end)
                conn.close()
                started = time.monotonic()
                server.stop()
                assert time.monotonic() - started < 10
                assert [row["kind"] for row in rows(log)] == ["I", "C"]
            finally:
                receiver.kill()
        server.start(survive=False)
        with mine.connect() as conn:
            own = Source(mine, conn, source.folder / "lake")
            own.receive(log, own.lsn())
            assert len(content(log)) == 2


def _written(source: Source) -> Lsn:
    return source.scalar_lsn(_reported("write_lsn"))


def _reported(column: str) -> str:
    """A query for a column of pg_stat_replication. It reads the row of the receiver that uses a slot of this
    database."""
    return (
        f"SELECT coalesce(max(r.{column}), '0/0') FROM pg_stat_replication r "
        "JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.database = current_database()"
    )


def test_locked_table_does_not_delay_the_stream(source: Source, database: Database) -> None:
    """A TRUNCATE, ALTER TABLE or VACUUM FULL in another session holds the lock. The server still sends the table's
    changes, so the receiver must store and confirm them."""
    log = source.log()
    end = source.run("INSERT INTO a VALUES (1, 'x')")
    with database.connect() as other:
        other.execute("BEGIN; TRUNCATE a")
        source.receive(log, end)
        assert [row["kind"] for row in rows(log)] == ["I", "C"]
        other.execute("ROLLBACK")


# Marks: LSNs up to which the log must become complete at once (MARK orders) -------------------------

FOREIGN = "INSERT INTO foreign_table SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g"


@pytest.mark.parametrize("goal", [True, False], ids=["goal", "no goal"])
def test_log_reaches_a_mark_if_the_server_sends_only_keepalives(source: Source, goal: bool) -> None:
    """A mark can be the LSN of a snapshot. No published change is near this mark, and the source's WAL already ends far
    above it."""
    log, before = source.log(), source.run("INSERT INTO a VALUES (1, 'x')")
    mark = source.run(FOREIGN)
    source.run(FOREIGN)
    receiver = source.receiver(log)
    receiver.mark(mark)
    if goal:
        receiver.until(mark)
    until_event(receiver, "complete")
    # The log is complete up to the mark, so mirrors can now be brought to this LSN.
    assert log.position() >= mark > before
    if goal:
        receiver.join(SECONDS)
        assert log.position() == mark == source.confirmed(log)
    receiver.stop()
    source.receive(log, source.run("INSERT INTO a VALUES (2, 'y')"))
    assert len(rows(log, "kind = 'I'")) == 2


def test_mark_inside_an_open_batch_ends_the_batch_at_once(source: Source) -> None:
    log, mark = source.log(), source.run("INSERT INTO a VALUES (1, 'x')")
    source.run("INSERT INTO a VALUES (2, 'y')")
    receiver = source.receiver(log, batch_seconds=3600)
    receiver.mark(mark)
    until_event(receiver, "complete")
    assert log.position() >= mark
    receiver.stop()


# In WAL without published changes, the receiver notes up to which LSN the log is complete -----------


def test_receiver_notes_up_to_which_lsn_the_log_is_complete_while_no_published_table_changes(source: Source) -> None:
    """The position in the log's Delta table stays the same, because a commit moves it only after 16 MiB of WAL without
    published changes."""
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    recorded = log.position()
    lsn = source.run("INSERT INTO foreign_table VALUES (1)")
    eventually(lambda: complete_to(log.layout, log.position()) >= lsn)
    assert log.position() == recorded
    receiver.stop()
    assert complete_to(log.layout, log.position()) >= lsn


# While no published table is written, the slot still advances, and neither WAL nor files accumulate -


def _files(log: ChangeLog) -> list[Path]:
    return sorted(path_of(log.path).glob("*.parquet"))


def _version(log: ChangeLog) -> int:
    return int(DeltaTable(path_of(log.path)).version())


@pytest.mark.long
def test_slot_advances_while_only_another_database_writes(source: Source) -> None:
    """A logical slot keeps the WAL of the whole cluster. Without confirmations, the slot would also keep the WAL of the
    other database."""
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    with fresh_database(source.database.server) as other, other.connect() as conn:
        conn.execute("CREATE TABLE t (v text)")
        conn.execute("INSERT INTO t SELECT repeat('x', 500) FROM generate_series(1, 60000) g")
        position = until_event(receiver, "position")[-1].lsn
        eventually(lambda: source.confirmed(log) >= position)
    receiver.stop()
    assert source.confirmed(log) == log.position() >= position
    assert _version(log) <= 5

    def level() -> bool:
        # The server may write WAL above the goal before it sends the goal's position. The slot then stays where it is.
        goal = source.lsn()
        source.receive(log, goal)
        return goal - source.confirmed(log) < 1 << 16

    eventually(level)
    assert (_files(log), rows(log, "true")) == ([], [])


@pytest.mark.long
def test_restarts_of_an_idle_receiver_add_no_commit_to_the_log(source: Source) -> None:
    """At each start, the receiver sends positions and requests keepalives. This must not add a commit or set the slot
    back."""
    log = source.log()
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.conn.execute("SELECT pg_log_standby_snapshot()") if _can_log_snapshots(source) else source.run("CHECKPOINT")
    source.receive(log, source.lsn())
    confirmed, versions = source.confirmed(log), []
    for _ in range(3):
        receiver = source.receiver(log)
        receiver.until(source.lsn())
        until_event(receiver, "arrived")
        receiver.join(10)
        assert source.confirmed(log) >= confirmed
        confirmed = source.confirmed(log)
        assert confirmed == log.position()
        versions.append(_version(log))
    # One commit is allowed, because the source itself lists its running transactions in the WAL every 15 s.
    assert versions[-1] - versions[0] <= 1
    assert len(_files(log)) == 1


def _can_log_snapshots(source: Source) -> bool:
    return source.database.server.version >= 16


# With a wal_sender_timeout of one second, the connection survives a slow parent process, receiver or disk


@pytest.fixture
def short(source: Source) -> Iterator[None]:
    """Sets ``wal_sender_timeout`` of the whole server to one second."""
    source.run("ALTER SYSTEM SET wal_sender_timeout = '1s'", "SELECT pg_reload_conf()")
    try:
        eventually(lambda: source.conn.execute("SHOW wal_sender_timeout").fetchone() == ("1s",))
        yield
    finally:
        source.run("ALTER SYSTEM RESET wal_sender_timeout", "SELECT pg_reload_conf()")


@pytest.mark.usefixtures("short")
@pytest.mark.long
def test_connection_survives_a_parent_process_that_does_not_read_reports(source: Source) -> None:
    """The parent process is the driver. While the driver is busy with Spark, it does not read the receiver's reports
    from the pipe."""
    log, twin = source.log(), source.log("twin")
    settings = ReceiverSettings(source.database.conninfo, str(source.folder / "s"), (PUBLICATION,), 1 << 20, 0.02)
    command = [sys.executable, "-m", "pgcdc_assets.log.receive.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(settings.to_line())
        child.stdin.flush()
        eventually(lambda: source.slot_row(log, "active") == "true")
        walsender = source.slot_row(log, "active_pid")
        with writing(source, 1):
            time.sleep(5)
        end = source.lsn()
        eventually(lambda: bool(rows(log, f"kind = 'C' AND lsn > {int(end) - 4000}")))
        assert source.slot_row(log, "active_pid") == walsender
        child.stdin.close()
        told = child.stdout.read()
    assert told.count(b'"batch"') > 5
    source.receive(log, end)
    source.receive(twin, end)
    assert content(log) == content(twin)


@pytest.mark.long
@pytest.mark.usefixtures("short")
def test_connection_survives_a_paused_receiver(source: Source) -> None:
    """The connection is still alive after the pause, because the receiver's session sets its own, longer
    ``wal_sender_timeout``."""
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    assert receiver.pid is not None
    walsender = source.slot_row(log, "active_pid")
    os.kill(receiver.pid, signal.SIGSTOP)
    end = source.run("INSERT INTO a VALUES (1, 'x')")
    time.sleep(3)
    os.kill(receiver.pid, signal.SIGCONT)
    receiver.mark(end)
    until_event(receiver, "complete")
    assert source.slot_row(log, "active_pid") == walsender
    assert len(rows(log, "kind = 'I'")) == 1
    receiver.stop()


class SlowDisk(BatchWriter):
    """A writer whose commits take three times as long as the server's timeout."""

    def commit(  # type: ignore[override]
        self, closed: PendingFrames, parts: list[StagedSegments], end: Lsn, ended: Sequence[CommittedContent] = ()
    ) -> Committed:
        time.sleep(3)
        return super().commit(closed, parts, end)


@pytest.mark.long
def test_receiver_answers_the_server_in_time_while_a_slow_disk_writes_a_batch(source: Source, tmp_path: Path) -> None:
    """The receiver's session has a wal_sender_timeout of one second, but the disk needs three seconds for each batch.
    The next batch is due before the previous batch is written."""
    log, asked = source.log(), list[float]()
    end = source.run(*(f"INSERT INTO a VALUES ({number}, repeat('x', 100000))" for number in range(30)))

    def confirming(flush: Lsn) -> None:
        asked.append(time.monotonic())

    receive_inside(source, log, end, confirming, writer=SlowDisk, wal_sender_timeout="1s")
    assert len(rows(log, "kind = 'I'")) == 30
    assert len(log.batches(log.start)) > 1
    assert max(later - earlier for earlier, later in pairwise(asked)) < 1


# The receiver confirms only commit boundaries that are already durable in the log -------------------


def test_no_confirmed_lsn_lies_inside_a_commit_record(source: Source) -> None:
    """If the receiver confirmed an LSN inside a commit record, the transaction would be lost (DecodeTXNNeedSkip). A
    second slot, which publishes all tables, shows where the commit records are."""
    log, twin = source.log(), source.log("twin")
    witness = source.slot("witness")
    source.conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    source.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [witness])
    chance, confirmed = random.Random(11), list[Lsn]()
    with writing(source, 2):
        for number in range(8):
            position = log.position()
            eventually(lambda at=position: source.lsn() > at + 8000)  # type: ignore[misc]
            start, stop = chance.choice([record for record in _commit_records(source, witness) if record[0] > position])
            goal = Lsn(start + 8 if number % 2 else start - chance.randrange(1000))
            assert goal < stop
            receiving = replace(RECEIVING, batch_seconds=chance.choice([0, 0.005, 0.05]))
            receive_inside(source, log, goal, confirmed.append, receiving=receiving)
            assert log.position() <= max(goal, position)
    end = source.lsn()
    receive_inside(source, log, end, confirmed.append)
    records = _commit_records(source, witness)
    assert len(records) > 50
    inside = [lsn for lsn in set(confirmed) for start, stop in records if start < lsn < stop]
    assert inside == []
    assert len(set(confirmed)) > 8
    source.receive(twin, end)
    assert content(log) == content(twin)


def _commit_records(source: Source, slot: str) -> list[tuple[int, int]]:
    """The commit record of every transaction that changed a table: its start (commit_lsn), and the first byte after it
    (end_lsn)."""
    found = source.conn.execute(
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'everything') WHERE get_byte(data, 0) = ascii('C')", [slot],
    ).fetchall()  # fmt: skip
    return [struct.unpack_from(">QQ", data, 2) for (data,) in found]


def test_confirmed_position_survives_a_crash_of_the_machine(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each confirmation, the fsynced part of the lake is a complete log up to the confirmed position."""
    lake = tmp_path / "s"
    lake.mkdir()
    disk = Disk(tmp_path, os.fsync)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    # The segments are so small that some are written before their whole transaction has arrived.
    receiving = replace(RECEIVING, segment_bytes=1 << 19)
    log, left = source.log(), dict[Lsn, Path]()

    def confirming(flush: Lsn) -> None:
        if flush > max(left, default=ZERO):
            left[flush] = disk.left(tmp_path.parent / f"{tmp_path.name}_crash" / str(int(flush))) / "s"

    for number in range(4):
        receive_inside(source, log, _work(source, number), confirming, receiving=receiving)
    monkeypatch.undo()
    assert len(left) > 4
    assert max(left) == log.position()
    for flush, copy in left.items():
        found = ChangeLog(Layout.of(copy)).open()
        assert found.position() >= flush
        found.verify(LsnRange(found.start, found.position()))
        below = f"commit_lsn < {int(flush)}"
        assert rows(found, below) == rows(log, below)


def _work(source: Source, number: int) -> Lsn:
    """Runs small transactions, a large transaction, and a transaction on unpublished tables."""
    source.transaction(*(f"INSERT INTO a VALUES ({number * 10 + row}, 'x')" for row in range(3)))
    source.run(f"UPDATE a SET v = repeat(md5(id::text), 20000) WHERE id >= {number * 10}")
    return source.run(f"INSERT INTO b VALUES ({number}, 1)", "INSERT INTO foreign_table SELECT 1, 'x'")


# A process that takes over the lake (the new leader) prevents commits of the earlier writer ---------

WHO = Identity("7", "db", "slot")


@pytest.fixture(params=["local", "s3"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    if request.param == "s3":
        bucket: Location = request.getfixturevalue("bucket")
        return Layout(bucket)
    return Layout.of(tmp_path / "lake")


def test_writer_cannot_commit_after_a_new_leader_has_taken_the_lake(layout: Layout) -> None:
    ChangeLog(layout).create(WHO, Lsn(100), 1)
    before = LogWriter(layout.change_log, WHO)
    before.commit(Lsn(100), Lsn(200), 1, [])
    shut_out(layout, 5)
    assert ChangeLog(layout).position() == 200, "the new leader keeps the durable position"
    with pytest.raises(LogConflict, match="another writer, because this process did not renew its lease"):
        before.commit(Lsn(200), Lsn(300), 1, [])
    with pytest.raises(LogConflict, match="another writer"):
        # The earlier writer cannot commit even if it opens the log again, because it does not know the new leader's
        # number.
        LogWriter(layout.change_log, WHO)
    after = LogWriter(layout.change_log, WHO, ChangeLog(layout).leader)
    after.commit(Lsn(200), Lsn(250), 1, [])
    shut_out(layout, 9)
    with pytest.raises(LogConflict):
        after.commit(Lsn(250), Lsn(300), 1, [])
    assert ChangeLog(layout).position() == 250


def test_new_leader_prevents_commits_of_the_earlier_writer_to_every_table_of_the_lake(layout: Layout) -> None:
    ChangeLog(layout).create(WHO, Lsn(100), 1)
    names = [TableName("public", "t"), TableName("public", "with a log_of.its own"), TableName("odd", "_delta_log")]
    places = [*map(layout.mirror, names), layout.changes(names[0])]
    for place in places:
        create_table(place, Schema.from_arrow(pa.schema([("a", pa.int64())])), {}, {}, layout.root)
    seen = [open_delta(place) for place in places]
    shut_out(layout, 5)
    for version in seen:
        assert version is not None
        with pytest.raises(CommitLost):
            commit_properties(version, {"a": "b"})
    for place in places:
        now = open_delta(place)
        assert now is not None
        assert commit_properties(now, {"a": "b"}) == 2
        assert now.positions == {"pgcdc/leader": 5}
