"""With a wal_sender_timeout of one second, the connection survives a slow parent, a slow receiver and a slow disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.batch import BatchWriter, Committed, PendingFrames
from pgcdc_assets.log.content import CommittedContent, StagedSegments
from pgcdc_assets.log.receive.messages import ReceiverSettings
from tests.log.conftest import PUBLICATION, Source, content, eventually, rows, until_event
from tests.log.inside import receive_inside
from tests.log.writers import writing


@pytest.fixture
def short(source: Source) -> Iterator[None]:
    """Sets the timeout of the whole server to one second."""
    source.run("ALTER SYSTEM SET wal_sender_timeout = '1s'", "SELECT pg_reload_conf()")
    try:
        eventually(lambda: source.conn.execute("SHOW wal_sender_timeout").fetchone() == ("1s",))
        yield
    finally:
        source.run("ALTER SYSTEM RESET wal_sender_timeout", "SELECT pg_reload_conf()")


@pytest.mark.usefixtures("short")
@pytest.mark.long
def test_connection_survives_a_parent_that_does_not_read(source: Source) -> None:
    """A driver that is busy with Spark does not read the receiver's reports from the pipe."""
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
    """The connection is still alive after the pause, because our sessions set their own, longer timeout."""
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
def test_slow_disk_delays_no_answer_to_the_server(source: Source, tmp_path: Path) -> None:
    """Here our session's own timeout is also one second. While one batch is written, the next batch is already due."""
    log, asked = source.log(), list[float]()
    end = source.run(*(f"INSERT INTO a VALUES ({number}, repeat('x', 100000))" for number in range(30)))

    def confirming(flush: Lsn) -> None:
        asked.append(time.monotonic())

    receive_inside(source, log, end, confirming, writer=SlowDisk, wal_sender_timeout="1s")
    assert len(rows(log, "kind = 'I'")) == 30
    assert len(log.batches(log.start)) > 1
    assert max(later - earlier for earlier, later in pairwise(asked)) < 1
