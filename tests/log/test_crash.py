"""The receiver ends unexpectedly, and is started again. The log then equals a log that was received in one run."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import MachineError, SourceUnavailable
from pgcdc_assets.log import announcements
from pgcdc_assets.log.announcements import Announcement, Announcer, announced
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.log.transactions import TransactionsInProgress
from pgcdc_assets.protocol.messages import StreamStart
from pgcdc_assets.source.connect import silence
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.connect.silence import Patience
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.store import lease
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.lease import FileLease
from pgcdc_assets.store.local import path_of
from tests.deadpath import DeadPath
from tests.log.conftest import PUBLICATION, Source, content, eventually, rows, until_event
from tests.log.inside import receive_inside
from tests.log.received_twice import little_memory, many


def test_receiver_stores_its_open_batch_and_ends_when_its_parent_process_dies(source: Source) -> None:
    log = source.log()
    settings = ReceiverSettings(source.database.conninfo, str(source.folder / "s"), (PUBLICATION,), 1 << 25, 60)
    command = [sys.executable, "-c", _PARENT, settings.to_line().decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        eventually(lambda: source.slot_row(log, "active") == "true")
        end = source.run("INSERT INTO a VALUES (1, 'x')")
        # The receiver gets the transaction, but its batch stays open for a minute, so the log has no rows yet.
        eventually(lambda: bool(source.conn.execute(_SENT, [str(end)]).fetchone()))
        assert rows(log) == []
        parent.kill()
        eventually(lambda: not _alive(child))
    assert [row["kind"] for row in rows(log)] == ["I", "C"]
    eventually(lambda: source.slot_row(log, "active") == "false")
    assert source.confirmed(log) == log.position()


def test_lost_connection_is_reported_and_no_change_is_lost(source: Source) -> None:
    log, twin = source.log(), source.log("twin")
    receiver = source.receiver(log, batch_seconds=60)
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    source.conn.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
                        [log.identity.slot])  # fmt: skip
    with pytest.raises(SourceUnavailable):
        until_event(receiver, "arrived")
    end = source.run("INSERT INTO a VALUES (2, 'y')")
    source.receive(log, end)
    source.receive(twin, end)
    assert content(log) == content(twin)


def test_transactions_that_a_slot_behind_the_log_resends_are_stored_once(source: Source) -> None:
    """A crash of the source can set the slot back."""
    log, twin = source.log(), source.log("twin")
    with source.slot_set_back(log):
        source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    assert source.confirmed(log) < log.position()
    end = source.run("INSERT INTO a VALUES (2, 'y')")
    source.receive(log, end)
    source.receive(twin, end)
    assert content(log) == content(twin)
    assert source.confirmed(log) == log.position() > Lsn(0)


_SENT = """
SELECT 1 FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid
WHERE s.database = current_database() AND r.write_lsn >= %s::pg_lsn
"""
_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "pgcdc_assets.log.receive.process"], stdin=subprocess.PIPE,
                         stdout=subprocess.DEVNULL, start_new_session=True)
child.stdin.write(sys.argv[1].encode())
child.stdin.flush()
print(child.pid, flush=True)
time.sleep(600)
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.long
def test_error_of_the_receiver_for_a_full_disk_names_the_folder_of_the_log(source: Source) -> None:
    """The error also contains the operating system's message. The test sets a limit on the file size, which acts like a
    full disk."""
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    assert receiver.pid is not None
    resource.prlimit(receiver.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    end = source.run("INSERT INTO a SELECT g, md5(g::text) FROM generate_series(1, 20000) g")
    with pytest.raises(MachineError) as told:
        until_event(receiver, "batch")
    assert told.value.what == os.strerror(errno.EFBIG)
    assert str(log.path) in str(told.value.thing)
    source.receive(log, end)
    assert len(rows(log, "kind = 'I'")) == 20000


# A run ends if nothing arrives on an open connection, not even replies to requests ------------------

SHORT = Patience(0.4, 1, 0.3)


@pytest.fixture
def path(source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadPath]:
    monkeypatch.setattr(SourceConnection, "patience", SHORT)
    monkeypatch.setattr(silence, "CHECK_SECONDS", 2)
    with DeadPath(source.database) as path:
        yield path


def after(seconds: float, action: Callable[[Receiver], None]) -> Callable[[Receiver], None]:
    """A callback for the receiver. It calls ``action`` once, when ``seconds`` have passed from now."""
    due = [time.monotonic() + seconds]

    def order(receiver: Receiver) -> None:
        if due and time.monotonic() > due[0]:
            due.clear()
            action(receiver)

    return order


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "new"),
    [
        ("stream", False), ("stream", True), ("stream by libpq", False), ("drain", True),
        pytest.param("stream by libpq", True, marks=pytest.mark.long),
        pytest.param("drain", False, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_run_ends_when_the_network_path_is_dead(
    source: Source, path: DeadPath, kind: str, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection reports no error. The run ends because nothing arrives for too long. A later run continues."""
    if kind == "stream by libpq":
        monkeypatch.setattr(ReplicationConnection, "socket", lambda connection: None)
    log = source.log()
    source.run("INSERT INTO a VALUES (1, 'x')")
    if kind == "drain":
        # These rows do not fit into the proxy's buffer, so the network path dies while the server still sends the
        # result.
        source.run("INSERT INTO a SELECT g, repeat(md5(g::text), 30) FROM generate_series(2, 60000) g")
    started = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"has sent nothing for 1 s|timeout"):
        receive_inside(
            source, log, None, lambda lsn: None, conninfo=path.conninfo, patience=SHORT,
            drain_bytes=0 if kind == "drain" else 1 << 40,
            orders=after(0 if kind == "drain" else 0.7, lambda receiver: path.die(new=new)),
        )  # fmt: skip
    assert time.monotonic() - started < 30
    path.close()
    source.receive(log, source.run("INSERT INTO a VALUES (0, 'y')"))
    assert len(rows(log, "kind = 'I'")) == (60001 if kind == "drain" else 2)


def test_idle_source_does_not_end_the_run(source: Source, path: DeadPath) -> None:
    """The source has nothing to send, but answers requests for a reply."""
    log = source.log()
    end = receive_inside(
        source, log, None, lambda lsn: None, conninfo=path.conninfo, patience=SHORT,
        orders=after(4, lambda receiver: receiver.until(source.run("INSERT INTO a VALUES (1, 'x')"))),
    )  # fmt: skip
    assert len(rows(log, "kind = 'I'")) == 1
    assert end > log.start


@pytest.mark.long
def test_receiver_waits_for_a_walsender_that_is_decoding(
    source: Source, path: DeadPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walsender that decodes WAL of unpublished tables sends nothing, and reads no requests. This must not end the
    run."""
    looked: list[bool] = []
    at_work = ReplicationConnection.at_work

    def busy(connection: ReplicationConnection) -> bool:
        looked.append(at_work(connection))
        return True

    monkeypatch.setattr(ReplicationConnection, "at_work", busy)
    log = source.log()

    def give_up(receiver: Receiver) -> None:
        if len(looked) > 3:
            receiver.stop()

    def orders(receiver: Receiver) -> None:
        die(receiver)
        give_up(receiver)

    die = after(0.5, lambda receiver: path.die(new=True))
    receive_inside(source, log, None, lambda lsn: None, conninfo=path.conninfo, patience=SHORT, orders=orders)
    assert looked[:2] == [False, False], "a walsender that waits for the receiver does not count as busy"


# A receiver announces its transactions in progress to other processes as long as it runs ------------

SAID = Announcement(2, 5_000_000, 771, Lsn(0x16B374D), datetime(2026, 11, 25, 12, tzinfo=UTC))


def layout_of(log: ChangeLog) -> Layout:
    return Layout.of(log.path.parent.parent)


def in_announcement(log: ChangeLog) -> tuple[int, int] | None:
    """The announced number of transactions in progress, and the announced xid of the oldest transaction."""
    found = announced(layout_of(log))
    return None if found is None else (found.number, found.xid)


@contextmanager
def open_transaction(source: Source, first: int) -> Iterator[tuple[psycopg.Connection[Any], int]]:
    """Opens a transaction of 720 kB. Yields its connection and its xid."""
    with source.database.connect() as conn:
        conn.execute("BEGIN")
        conn.execute(many(first).encode())
        ((xid,),) = conn.execute("SELECT pg_current_xact_id()::text::int").fetchall()
        yield conn, xid


@pytest.mark.timeout(120)
def test_transaction_in_progress_is_announced_until_it_ends(source: Source) -> None:
    little_memory(source)
    log = source.log()
    until_event(source.receiver(log, drain_bytes=1 << 40), "started")
    assert in_announcement(log) is None
    start = source.lsn()
    with ExitStack() as stack:
        first, oldest = stack.enter_context(open_transaction(source, 0))
        eventually(lambda: in_announcement(log) == (1, oldest))
        found = announced(layout_of(log))
        assert found is not None
        assert start <= found.lsn <= source.lsn()
        assert timedelta(0) <= found.age < timedelta(minutes=1)
        second, younger = stack.enter_context(open_transaction(source, 10_000))
        eventually(lambda: in_announcement(log) == (2, oldest))
        first.execute("ROLLBACK")
        eventually(lambda: in_announcement(log) == (1, younger))
        second.execute(many(20_000).encode())
        eventually(lambda: (now := announced(layout_of(log))) is not None and now.bytes > 1_300_000)
        second.execute("COMMIT")
        eventually(lambda: in_announcement(log) is None)
        assert source.running[0].alive


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_announcement_of_a_receiver_is_ignored_after_the_receiver_has_ended(source: Source, way: str) -> None:
    little_memory(source)
    log = source.log()
    receiver = source.receiver(log, drain_bytes=1 << 40)
    until_event(receiver, "started")
    with open_transaction(source, 0) as (_, xid):
        eventually(lambda: in_announcement(log) == (1, xid))
        text = path_of(layout_of(log).in_progress)
        if way == "killed":
            assert receiver.pid is not None
            os.kill(receiver.pid, signal.SIGKILL)
            receiver.join(10)
            assert Announcement.from_line(text.read_text()) is not None, "the file has the last announcement"
        else:
            receiver.stop()
            assert text.read_text() == ""
        assert in_announcement(log) is None


def test_incomplete_announcement_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "_PAUSE_SECONDS", 0)
    line = SAID.to_line()
    assert Announcement.from_line(line) == SAID
    layout = Layout.of(tmp_path)
    assert announced(layout) is None
    with lease.held(layout.in_progress) as held:
        assert held is not None
        for text in ("", line[:-1], line[:20], "{}\n", line.replace("xid", "top")):
            held.write(text)
            assert announced(layout) is None, text
        held.write(line)
        assert announced(layout) == SAID
    assert announced(layout) is None


def test_receiver_continues_if_its_announcement_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two causes: the disk is full, or an earlier receiver, which has just ended, still holds the announcement's
    file."""
    monkeypatch.setattr(announcements, "ANNOUNCE_SECONDS", 0)
    layout, open_ = Layout.of(tmp_path), TransactionsInProgress()
    open_.start(StreamStart(771, True), Lsn(8), 0.0)
    here = Announcer(layout)
    with lease.held(layout.in_progress) as held:
        assert held is not None
        here.announce(open_)
    assert announced(layout) is None
    here.announce(open_)
    assert announced(layout) is not None

    def full(lease: Lease, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FileLease, "write", full)
        here.announce(open_)
    assert announced(layout) is None
    here.announce(open_)
    assert announced(layout) is not None
    here.close()
    assert announced(layout) is None
