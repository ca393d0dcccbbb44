"""Known difficult cases of the positions that the receiver stores and reports to the server. Spark is not used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pgcdc_assets.core.faultpoints import REACHED, VARIABLE, FaultPoint
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Insert
from tests.log.conftest import Source, content, eventually, rows, until_event


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of armed fault points. A file in this folder stops the receiver at the fault point with the file's
    name."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def _written(source: Source) -> Lsn:
    """The position that the receiver has reported as received (write_lsn). The status update with this position also
    reports the flushed position."""
    return source.scalar_lsn(
        "SELECT coalesce(max(r.write_lsn), '0/0') FROM pg_stat_replication r "
        "JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.database = current_database()"
    )


def test_transactions_over_two_ranges_are_received_in_commit_order(source: Source) -> None:
    """The transaction that began first is committed in the second range, although its first WAL record is in the first
    range."""
    log, twin = source.log(), source.log("twin")
    with source.database.connect() as other:
        other.execute("BEGIN")
        other.execute("INSERT INTO a VALUES (1, 'began first')")
        middle = source.run("INSERT INTO a VALUES (2, 'committed first')")
        source.receive(log, middle)
        assert log.position() >= middle
        other.execute("COMMIT")
    end = source.run("INSERT INTO b VALUES (1, 1)")
    source.receive(log, end)
    source.receive(twin, end)
    changes = [decode(row["payload"], Lsn(0)) for row in rows(log, "kind = 'I'")]
    assert [change.new[0] for change in changes if isinstance(change, Insert)] == ["2", "1", "1"]
    assert content(log) == content(twin)


def test_position_is_not_reported_as_flushed_before_it_is_durable(source: Source, faults: Path) -> None:
    log = source.log()
    (faults / FaultPoint.BATCH_COMMITTING).write_text("0")
    receiver = source.receiver(log)
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    reached = faults / f"{FaultPoint.BATCH_COMMITTING}{REACHED}"
    eventually(reached.exists)
    # At least one more status update is sent before the receiver continues.
    end = source.run("INSERT INTO a VALUES (2, 'x')")
    eventually(lambda: _written(source) >= end)
    assert source.confirmed(log) == log.position() == log.start
    reached.unlink()
    eventually(lambda: source.confirmed(log) >= end)
    assert log.position() >= end
    receiver.stop()


def test_keepalive_does_not_confirm_an_open_batch(source: Source) -> None:
    log = source.log()
    receiver = source.receiver(log, batch_seconds=3600)
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    # Keepalives report WAL above the batch, which stays open for an hour.
    end = source.run("INSERT INTO foreign_table VALUES (1, 'x')")
    eventually(lambda: _written(source) >= end)
    end = source.run("INSERT INTO foreign_table VALUES (2, 'x')")
    eventually(lambda: _written(source) >= end)
    assert rows(log) == []
    assert source.confirmed(log) == log.position() == log.start
    receiver.stop()


@pytest.mark.long
def test_large_transaction_is_not_held_in_memory(source: Source) -> None:
    """The transaction's rows need three times as much memory as the receiver may use."""
    log = source.log()
    end = source.run("INSERT INTO a SELECT g, repeat(md5(g::text), 30) FROM generate_series(1, 900000) g")
    receiver = source.receiver(log)
    receiver.until(end)
    peak, landed = 0, False
    while not landed:
        landed = any(event.name == "arrived" for event in receiver.events(0.1))
        peak = max(peak, _peak_bytes(receiver.pid))
    (batch,) = log.batches(log.start)
    assert batch.bytes > 800 << 20
    assert peak < 300 << 20, f"{peak >> 20} MB"


def _peak_bytes(pid: int | None) -> int:
    """The peak of resident memory in bytes. 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) << 10 if found else 0


def test_stored_position_may_differ_from_the_slots_position(source: Source) -> None:
    """After a crash of the source, the slot is at its last persisted position. An idle slot may have been advanced over
    WAL without published changes."""
    log = source.log()
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.run("INSERT INTO foreign_table VALUES (1, 'x')")
    assert source.confirmed(log) < source.lsn()
    source.receive(log, source.run("INSERT INTO a VALUES (2, 'x')"))
    assert [row["kind"] for row in rows(log)] == ["I", "C", "I", "C"]
