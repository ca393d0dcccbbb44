"""A lease: only one process at a time holds a location. It has the same guarantees on a file system and in an object
store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import LeaseLost
from pgcdc_assets.store import chainlease, lease, storage
from tests.waiting import wait_for

HOLDER = """
import sys, time
from pgcdc_assets.core.layout import Location
from pgcdc_assets.store import chainlease, lease
chainlease.TTL, chainlease.RENEWED, chainlease._MARGIN = float(sys.argv[2]), float(sys.argv[3]), 0.1
with lease.held(Location(sys.argv[1])) as held:
    assert held is not None
    held.write("the holder")
    print("held", flush=True)
    sys.stdin.readline()
print("given back", flush=True)
"""
TTL, RENEWED = 3.0, 0.5


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    monkeypatch.setattr(chainlease, "TTL", TTL)
    monkeypatch.setattr(chainlease, "RENEWED", RENEWED)
    monkeypatch.setattr(chainlease, "_MARGIN", 0.1)
    if request.param == "s3":
        bucket: Location = request.getfixturevalue("bucket")
        return bucket / "lock"
    return Location.of(tmp_path / "lake/lock")


@contextmanager
def holder(place: Location) -> Iterator[subprocess.Popen[str]]:
    """A separate process that holds the lease."""
    command = [sys.executable, "-c", HOLDER, place.text, str(TTL), str(RENEWED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def taken(place: Location) -> bool:
    with lease.held(place) as held:
        return held is not None


def test_one_process_holds_the_lease_and_its_text_can_be_read(place: Location) -> None:
    assert lease.text_of_holder(place) is None
    with holder(place) as other:
        assert lease.text_of_holder(place) == "the holder"
        assert not taken(place)
        print(file=other.stdin, flush=True)
        assert other.wait(20) == 0
        assert lease.text_of_holder(place) is None
    with lease.held(place) as held:
        assert held is not None
        assert lease.text_of_holder(place) == ""
        held.write("here")
        assert lease.text_of_holder(place) == "here"
        held.write("still here")
        assert lease.text_of_holder(place) == "still here"
    assert lease.text_of_holder(place) is None


def test_a_lease_is_renewed_beyond_its_time(place: Location) -> None:
    with holder(place):
        seen = []
        if place.scheme:
            chain = chainlease.Chain(place)
            first, _ = chain.look()
            assert first is not None
            wait_for(lambda: (last := chain.look()[0]) is not None and last.number > first.number + 2 * TTL / RENEWED,
                     what="twice its time")  # fmt: skip
            seen = [entry.name for entry in storage.list_after(place)]
        assert not taken(place)
        assert lease.text_of_holder(place) == "the holder"
        assert len(seen) <= 12, "old numbers go"


def test_nothing_guarded_is_written_without_a_renewed_lease(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chainlease, "TTL", 2.0)
    monkeypatch.setattr(chainlease, "RENEWED", 60.0)
    monkeypatch.setattr(chainlease, "_MARGIN", 0.0)
    with lease.held(bucket / "lock", guarding=bucket) as held:
        assert held is not None
        storage.create(bucket / "while it is sure", b"x")
        until = held._until  # type: ignore[attr-defined]
        wait_for(lambda: chainlease._now() > until, what="the end of its time")
        writes: list[Callable[[], None]] = [
            lambda: storage.create(bucket / "late", b"x"),
            lambda: storage.replace(bucket / "late", b"x"),
            lambda: storage.delete([bucket / "while it is sure"]),
            lambda: storage.delete_folder(bucket / "any"),
            lambda: storage.copy(bucket / "while it is sure", bucket / "late"),
        ]
        for write in writes:
            with pytest.raises(LeaseLost, match="was not renewed in time"):
                write()
        # No other process has acquired the lease, so the holder may continue.
        held.write("again")
        storage.create(bucket / "again", b"x")
    assert [entry.name for entry in storage.list_after(bucket)] == ["again", "while it is sure"]


def test_a_writer_that_another_process_has_overtaken_loses_the_lease(bucket: Location) -> None:
    with lease.held(bucket / "lock", guarding=bucket) as held:
        assert held is not None
        chain = chainlease.Chain(bucket / "lock")
        last, _ = chain.look()
        assert last is not None
        chain.append(chainlease.Link(last.number + 1, text="the other", host="elsewhere"))
        storage.store_of(bucket).create(bucket / "commit", b"of the other")
        with pytest.raises(LeaseLost, match="is lost, to the other on elsewhere"):
            storage.create(bucket / "commit", b"ours")
        with pytest.raises(LeaseLost):
            storage.create(bucket / "next", b"ours")
        with pytest.raises(LeaseLost):
            held.write("here")


def test_a_process_that_does_not_wait_learns_at_once_that_the_lease_is_held(bucket: Location) -> None:
    with holder(bucket / "lock") as other:
        other.kill()
        other.wait()
        began = time.monotonic()
        with lease.held(bucket / "lock", at_once=True) as held:
            assert held is None
        assert time.monotonic() - began < chainlease.TTL / 2


def test_a_holder_that_slept_through_deleted_numbers_loses_the_lease(bucket: Location) -> None:
    """While the holder slept, other holders appended so many numbers that their first numbers are already deleted."""
    with lease.held(bucket / "lock", guarding=bucket) as held:
        assert held is not None
        chain = chainlease.Chain(bucket / "lock")
        last, _ = chain.look()
        assert last is not None
        for number in range(1, 2 * chainlease._KEPT):
            chain.append(chainlease.Link(last.number + number, text="the other"))
        assert not storage.exists(bucket / "lock" / f"{last.number + 1:020}")
        with pytest.raises(LeaseLost, match="is lost, to the other"):
            held.write("here")
        with pytest.raises(LeaseLost):
            storage.create(bucket / "late", b"x")


@pytest.mark.long
def test_a_process_that_takes_over_an_expired_lease_gets_the_number_of_its_predecessor(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chainlease, "TTL", TTL)
    monkeypatch.setattr(chainlease, "RENEWED", RENEWED)
    place = bucket / "lock"
    with lease.held(place) as held:
        assert held is not None
        assert held.inherited_as is None
    with holder(place) as other:
        os.kill(other.pid, signal.SIGSTOP)
        numbers = []

        def inherited() -> bool:
            with lease.held(place) as held:
                if held is not None and held.inherited_as is not None:
                    numbers.append(held.inherited_as)
                return held is not None

        wait_for(inherited, what="the place", seconds=60)
        assert numbers
        os.kill(other.pid, signal.SIGCONT)
