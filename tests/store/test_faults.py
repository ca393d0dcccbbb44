"""An object store that is busy or slow, or loses responses: no write is lost, and no write is made twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.checkpoint import write_checkpoint
from pgcdc_assets.delta.datafile import read_footer
from pgcdc_assets.delta.log import open_delta
from pgcdc_assets.delta.recovery import recover
from pgcdc_assets.errors import LogConflict, StoreFailed
from pgcdc_assets.log.commit import LogWriter
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import SegmentFile, check_content, read_rows
from pgcdc_assets.store import objects, storage
from tests.log.streams import START, WHO, frames_of, writer_of
from tests.store.faultproxy import Fault, Faults


@pytest.mark.long
@pytest.mark.parametrize("fault", Fault)
def test_a_file_is_created_once_despite_any_fault(fault: Fault, faults: Faults, bucket: Location) -> None:
    faults.next = [fault, fault]
    storage.create(bucket / "a", b"ours")
    assert storage.read(bucket / "a") == b"ours"
    assert faults.next == [] or fault in (Fault.LOST, Fault.BROKEN, Fault.SLOW), "it was tried again"
    faults.next = []
    with pytest.raises(FileExistsError):
        storage.create(bucket / "a", b"ours")
    with pytest.raises(FileExistsError):
        storage.create(bucket / "a", b"of others")


@pytest.mark.long
@pytest.mark.parametrize("fault", Fault)
def test_a_failed_unconditional_request_is_repeated(fault: Fault, faults: Faults, bucket: Location) -> None:
    """A request that failed with a conflict (409) is also repeated. The conflict only means that another request for
    the same object ran at the same time."""

    def put() -> None:
        draft = storage.draft(bucket / "put")
        Path(draft.path).write_bytes(b"ours")
        storage.put(draft, bucket / "put")

    attempts: dict[str, Callable[[], object]] = {
        "put": put, "replaced": lambda: storage.replace(bucket / "replaced", b"ours"),
        "copied": lambda: storage.copy(bucket / "put", bucket / "copied"),
    }  # fmt: skip
    for name, attempt in attempts.items():
        faults.next = [fault, fault]
        attempt()
        assert storage.read(bucket / name) == b"ours"
        assert faults.next == [] or fault is Fault.SLOW, "it was tried again"


def test_a_request_that_conflicts_too_often_is_an_error(
    faults: Faults, bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_PATIENCE", 0.2)
    for attempt in (storage.create, storage.replace):
        faults.next = [Fault.CONFLICT] * 100
        with pytest.raises(StoreFailed, match="the object store reported"):
            attempt(bucket / "a", b"ours")
    faults.next = []
    assert storage.head(bucket / "a") is None


def test_after_a_lost_response_a_file_of_another_writer_is_not_mistaken_for_ours(
    faults: Faults, bucket: Location
) -> None:
    """A different writer was first, and the store's refusal of our request was lost."""
    storage.create(bucket / "a", b"of others")
    faults.next = [Fault.LOST]
    with pytest.raises(FileExistsError):
        storage.create(bucket / "a", b"ours")
    assert storage.read(bucket / "a") == b"of others"


@pytest.mark.parametrize("commits", [15, pytest.param(300, marks=pytest.mark.long)])
def test_each_commit_of_a_log_is_made_once_despite_faults(commits: int, faults: Faults, bucket: Location) -> None:
    layout = Layout(bucket)
    ChangeLog(layout).create(WHO, Lsn(1), 1)
    faults.share = 0.25
    writer, number = LogWriter(layout.change_log, WHO), 1
    while number < commits:
        writer.commit(Lsn(number), Lsn(number + 1), 1, [])
        number += 1
        if number % 10 == 0:
            writer = LogWriter(layout.change_log, WHO)
    with pytest.raises(LogConflict):
        writer.commit(Lsn(1), Lsn(2), 1, [])
    faults.share = 0
    log = storage.list_after(layout.change_log / "_delta_log")
    assert sum(entry.name.endswith(".json") for entry in log) == commits
    assert ChangeLog(layout).position() == commits
    assert sum(faults.seen[fault] for fault in Fault) > commits / 4, faults.seen


def test_error_names_an_unreachable_store_refused_credentials_or_a_missing_bucket(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_PATIENCE", 0.2)
    objects._bucket.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        for attempt in (lambda: storage.create(bucket / "a", b""), lambda: storage.list_after(bucket),
                        lambda: storage.head(bucket / "a")):  # fmt: skip
            with pytest.raises(StoreFailed, match="the object store reported") as raised:
                attempt()
            assert raised.value.passing
    objects._bucket.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
        with pytest.raises(StoreFailed, match="refused the credentials of the environment") as raised:
            storage.create(bucket / "a", b"")
        assert "another-secret" not in str(raised.value)
        with pytest.raises(StoreFailed, match="refused the credentials of the environment"):
            storage.list_after(bucket)
    objects._bucket.cache_clear()
    with pytest.raises(StoreFailed, match="the bucket does not exist"):
        storage.create(Location("s3://nowhere/a"), b"")
    assert storage.list_after(bucket) == []


@pytest.mark.long
def test_a_store_that_refuses_requests_causes_no_damage(
    faults: Faults, bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store executes a number of requests, and then refuses all requests. The test begins with 0, and tries each
    number until it is large enough. A refusal must not be mistaken for a damaged file, because pgcdc would then move
    the file away, although a consistent point needs it."""
    layout = Layout(bucket)
    log = ChangeLog(layout)
    log.create(WHO, START, 3)
    writer, _ = writer_of(log)
    for number in range(4):
        writer.commit(frames_of(200 + 100 * number), [], Lsn(250 + 100 * number))
    write_checkpoint(layout.change_log, 2)
    files = sorted(entry.name for entry in storage.walk(bucket, hidden=True))
    segment = next(bucket / name for name in files if name.endswith(".parquet") and "_delta_log" not in name)
    monkeypatch.setattr(objects, "_PATIENCE", 0.05)
    objects._bucket.cache_clear()
    asked: list[Callable[[], object]] = [
        ChangeLog(layout).position, lambda: open_delta(layout.change_log), lambda: recover(layout.change_log),
        lambda: check_content(segment), lambda: read_rows(SegmentFile(segment)), lambda: read_footer(segment),
    ]  # fmt: skip
    for ask in asked:
        served = 0
        while not _answered(ask, faults, served):
            served += 1
        assert served > 0
    faults.served = None
    assert sorted(entry.name for entry in storage.walk(bucket, hidden=True)) == files


def _answered(ask: Callable[[], object], faults: Faults, served: int) -> bool:
    """Calls ``ask`` with a store that executes only ``served`` requests. Returns whether this number of requests is
    enough."""
    faults.served = served
    try:
        ask()
    except StoreFailed:
        return False
    return True


# Number of requests for a lake in an object store ---------------------------------------------------


def test_writing_a_batch_to_the_log_needs_two_put_requests(faults: Faults, bucket: Location) -> None:
    """A batch needs one PUT for the segment and one PUT for the Delta commit. A Delta commit that only moves the log's
    position has no segment, and needs one PUT."""
    log = ChangeLog(Layout(bucket))
    log.create(WHO, START, 3)
    writer, _ = writer_of(log)
    for number in range(5):
        faults.seen.clear()
        writer.commit(frames_of(200 + 100 * number), [], Lsn(250 + 100 * number))
        assert (faults.seen["PUT"], faults.seen["LIST"], faults.seen["POST"]) == (2, 0, 0)
    faults.seen.clear()
    writer.advance(Lsn(1000))
    assert (faults.seen["PUT"], faults.seen["LIST"]) == (1, 0)
    reader = ChangeLog(Layout(bucket)).open()
    faults.seen.clear()
    assert reader.position() == 1000
    assert (faults.seen["PUT"], faults.seen["LIST"]) == (0, 0)
