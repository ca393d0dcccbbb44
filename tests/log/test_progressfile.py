"""A receiver announces its transactions in progress to other processes as long as it runs."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive import progressfile
from pgcdc_assets.log.receive.progressfile import Announcement, Announcer, announced
from pgcdc_assets.log.transactions import TransactionsInProgress
from pgcdc_assets.protocol.messages import StreamStart
from pgcdc_assets.store import lease
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.lease import FileLease
from pgcdc_assets.store.local import path_of
from tests.log.conftest import Source, eventually, until_event
from tests.log.received_twice import little_memory, many

SAID = Announcement(2, 5_000_000, 771, Lsn(0x16B374D), datetime(2026, 11, 25, 12, tzinfo=UTC))


def layout_of(log: ChangeLog) -> Layout:
    return Layout.of(log.path.parent.parent)


def told(log: ChangeLog) -> tuple[int, int] | None:
    """The number of transactions in progress, and the xid of the oldest one."""
    found = announced(layout_of(log))
    return None if found is None else (found.number, found.xid)


@contextmanager
def open_transaction(source: Source, first: int) -> Iterator[tuple[psycopg.Connection[Any], int]]:
    """An open transaction of 720 kB, and its xid."""
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
    assert told(log) is None
    start = source.lsn()
    with ExitStack() as stack:
        first, oldest = stack.enter_context(open_transaction(source, 0))
        eventually(lambda: told(log) == (1, oldest))
        found = announced(layout_of(log))
        assert found is not None
        assert start <= found.lsn <= source.lsn()
        assert timedelta(0) <= found.age < timedelta(minutes=1)
        second, younger = stack.enter_context(open_transaction(source, 10_000))
        eventually(lambda: told(log) == (2, oldest))
        first.execute("ROLLBACK")
        eventually(lambda: told(log) == (1, younger))
        second.execute(many(20_000).encode())
        eventually(lambda: (now := announced(layout_of(log))) is not None and now.bytes > 1_300_000)
        second.execute("COMMIT")
        eventually(lambda: told(log) is None)
        assert source.running[0].alive


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_announcement_of_a_dead_receiver_is_not_shown(source: Source, way: str) -> None:
    little_memory(source)
    log = source.log()
    receiver = source.receiver(log, drain_bytes=1 << 40)
    until_event(receiver, "started")
    with open_transaction(source, 0) as (_, xid):
        eventually(lambda: told(log) == (1, xid))
        text = path_of(layout_of(log).in_progress)
        if way == "killed":
            assert receiver.pid is not None
            os.kill(receiver.pid, signal.SIGKILL)
            receiver.join(10)
            assert Announcement.from_line(text.read_text()) is not None, "what it said last is still there"
        else:
            receiver.stop()
            assert text.read_text() == ""
        assert told(log) is None


def test_incomplete_announcement_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progressfile, "_PAUSE_SECONDS", 0)
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
    """The cause is a full disk, or the announcement of another receiver, which may exist for a second after its run."""
    monkeypatch.setattr(progressfile, "ANNOUNCE_SECONDS", 0)
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
