"""The receiver is killed at some moment and started again. The log then equals the log without a kill."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import MachineError, SourceUnavailable
from pgcdc_assets.log.receive.messages import ReceiverSettings
from tests.log.conftest import PUBLICATION, Source, content, eventually, rows, until_event


def test_receiver_ends_at_a_boundary_when_its_parent_dies(source: Source) -> None:
    log = source.log()
    settings = ReceiverSettings(source.database.conninfo, str(source.folder / "s"), (PUBLICATION,), 1 << 25, 60)
    command = [sys.executable, "-c", _PARENT, settings.to_line().decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        eventually(lambda: source.slot_row(log, "active") == "true")
        end = source.run("INSERT INTO a VALUES (1, 'x')")
        # The batch would stay open for a minute if the parent did not end.
        eventually(lambda: bool(source.conn.execute(_SENT, [str(end)]).fetchone()))
        assert rows(log) == []
        parent.kill()
        eventually(lambda: not _alive(child))
    assert [row["kind"] for row in rows(log)] == ["I", "C"]
    eventually(lambda: source.slot_row(log, "active") == "false")
    assert source.confirmed(log) == log.position()


def test_lost_connection_is_reported_and_loses_nothing(source: Source) -> None:
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


def test_transactions_that_a_slot_behind_the_log_repeats_are_stored_once(source: Source) -> None:
    """PostgreSQL does not write confirmations to disk at once. The test sets the slot back by a copy of the slot."""
    log, twin = source.log(), source.log("twin")
    slot = log.identity.slot
    source.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [slot, f"{slot}_old"])
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    source.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [f"{slot}_old", slot])
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
def test_full_disk_is_reported_with_its_folder(source: Source) -> None:
    """The error contains the folder and the system's message. A limit on the file size acts like a full disk."""
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
