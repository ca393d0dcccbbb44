"""`Lake.wait` returns as soon as the mirrors contain all changes below an LSN. Here the tests write the change log
themselves. `tests/flow/test_wait.py` tests the same with a PostgreSQL source.

A *note* is a file that the receiver writes. It has two LSNs, X and a higher Y, and says: as long as the log's position
is X, the log has every transaction that ends at or below Y.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import NotReached
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.log.content import StagedSegments
from pgcdc_assets.log.extent import Extent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import LocalStore
from pgcdc_assets.structure.record import TableState
from tests.deltatables import publish_at
from tests.lake.onetable import T
from tests.log.streams import START, WHO, frames_of, writer_of

LISTED, OTHER = TableName("public", "t1"), TableName("public", "t2")


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    """An empty change log for the tables ``t1`` (OID 1) and ``t2`` (OID 2). A point at LSN 100 lists only ``t1``."""
    layout = Layout.of(tmp_path)
    log = ChangeLog(layout)
    log.create(WHO, START, 3)
    states = TableStates(layout)
    states.set(replace(T, oid=1, name=LISTED), TableState.CATCHING_UP, START)
    states.set(replace(T, oid=2, name=OTHER), TableState.SET_ASIDE, START)
    publish_at(ConsistentPoints(layout), START, {LISTED: 1})
    return log


def batch(log: ChangeLog, at: int, relation_id: int = 1) -> None:
    """Commits a batch with one transaction, which changes the relation. The transaction and the batch end at ``at +
    50``."""
    writer_of(log)[0].commit(frames_of(at, relation_id), [StagedSegments()], Lsn(at + 50))


def arrived(log: ChangeLog, lsn: int) -> bool:
    try:
        Lake(log.layout.root).wait(lsn, timeout=0)
    except NotReached:
        return False
    return True


def test_wait_returns_a_point_at_or_above_the_lsn(log: ChangeLog) -> None:
    assert Lake(log.layout.root).wait("0/64", timeout=0).lsn == 100
    with pytest.raises(
        NotReached, match=r"did not reach 0/65 within 0 s: its newest consistent point is at 0/64.*pgcdc status"
    ):
        Lake(log.layout.root).wait(101, timeout=0)


def test_wait_for_a_lake_without_points_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotReached, match="it has no consistent point"):
        Lake(tmp_path).wait(1, timeout=0)


def test_wait_returns_a_point_below_the_lsn_if_the_log_has_no_change_between_them(log: ChangeLog) -> None:
    writer_of(log)[0].advance(Lsn(300))
    assert Lake(log.layout.root).wait(300, timeout=0).lsn == 100
    assert not arrived(log, 301)


def test_wait_waits_for_changes_above_the_point_of_a_table_that_the_point_lists(log: ChangeLog) -> None:
    batch(log, 200)
    assert not arrived(log, 150)
    publish_at(ConsistentPoints(log.layout), 250, {LISTED: 2})
    assert arrived(log, 250)


def test_wait_ignores_changes_of_tables_that_the_point_does_not_list(log: ChangeLog) -> None:
    batch(log, 200, relation_id=2)
    assert arrived(log, 250)


def test_wait_waits_for_changes_of_a_relation_without_a_mirror(log: ChangeLog) -> None:
    """The relation may be a new partition of a listed table."""
    TableStates(log.layout).set(replace(T, oid=3, name=OTHER), TableState.SET_ASIDE, START)
    batch(log, 200, relation_id=2)
    assert not arrived(log, 250)


def test_wait_waits_for_changes_of_a_renamed_table(log: ChangeLog) -> None:
    """The table states still have the table's OID under its earlier name."""
    TableStates(log.layout).set(replace(T, oid=1, name=TableName("public", "former")), TableState.MOVED, START)
    batch(log, 200)
    assert not arrived(log, 250)


def test_wait_waits_for_logical_messages_above_the_point(log: ChangeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` considers logical messages only if the point has an LSN for messages. A point has this LSN only if the
    setting ``messages`` is used."""
    writer_of(log)[0].advance(Lsn(300))
    of_message = SimpleNamespace(others={"M": 1}, rows={})
    monkeypatch.setattr(ChangeLog, "batches", lambda log, after: [of_message])
    assert arrived(log, 300)
    ConsistentPoints(log.layout).publish(Lsn(200), {LISTED: 1}, {LISTED: START}, messages=Lsn(200))
    assert not arrived(log, 300)


def test_note_applies_only_while_the_log_has_the_position_in_the_note(log: ChangeLog) -> None:
    """First the log is at the note's position, so `wait` accepts each LSN up to the note's second LSN, 500. Then the
    log moves to 400, so the note no longer applies, and `wait` accepts each LSN up to 400."""
    Extent(log.layout).note(START, Lsn(500))
    assert arrived(log, 500)
    assert not arrived(log, 501)
    writer_of(log)[0].advance(Lsn(400))
    assert (arrived(log, 400), arrived(log, 401)) == (True, False)


def test_wait_waits_for_changes_in_the_log_despite_a_note(log: ChangeLog) -> None:
    batch(log, 200)
    Extent(log.layout).note(Lsn(250), Lsn(500))
    assert not arrived(log, 150)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"position": 100, "complete": -1}', b"\xff"])
def test_wait_ignores_a_damaged_note(log: ChangeLog, content: bytes) -> None:
    storage.replace(log.layout.extent, content)
    assert not arrived(log, 101)


def test_receiver_writes_notes_at_intervals_and_at_the_end_of_its_connection(log: ChangeLog) -> None:
    extent = Extent(log.layout)
    extent.note(START, START)
    assert not storage.exists(log.layout.extent)
    extent.note(START, Lsn(200))
    extent.note(START, Lsn(300))
    assert (arrived(log, 200), arrived(log, 300)) == (True, False)
    extent.note(START, Lsn(300), last=True)
    assert arrived(log, 300)


def test_wait_ends_soon_after_a_point_at_the_lsn_is_published(log: ChangeLog) -> None:
    batch(log, 200)
    begun = threading.Event()

    def publish() -> None:
        begun.wait()
        publish_at(ConsistentPoints(log.layout), 250, {LISTED: 2})

    thread = threading.Thread(target=publish)
    thread.start()
    begun.set()
    started = time.monotonic()
    assert Lake(log.layout.root).wait(250, timeout=100).versions[LISTED] == 2
    assert time.monotonic() - started < 50
    thread.join()


def test_each_check_during_wait_needs_only_a_few_small_reads(log: ChangeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of reads does not depend on the length of the log, and no folder is listed."""
    for number in range(20):
        batch(log, 200 + 100 * number)
    calls: list[str] = []
    checks: list[int] = []

    def counted(name: str) -> None:
        real = getattr(LocalStore, name)

        def call(store: LocalStore, *arguments: Any) -> Any:
            calls.append(name)
            return real(store, *arguments)

        monkeypatch.setattr(LocalStore, name, call)

    for name in ("read", "head", "open", "list_after", "walk"):
        counted(name)
    monkeypatch.setattr("time.sleep", lambda seconds: checks.append(len(calls)))
    with pytest.raises(NotReached):
        Lake(log.layout.root).wait(5000, timeout=0.5)
    later = [after - before for before, after in pairwise(checks)]
    assert len(later) > 3
    assert max(later) <= 8
    assert "list_after" not in calls[checks[0] :]
