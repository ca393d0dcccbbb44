"""A lease: only one process at a time holds a location, which is in a file system or in an object store."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import LeaseLost
from pgcdc_assets.store import chainlease, lease, storage
from pgcdc_assets.store.lease import ProcessName
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


def test_one_process_holds_the_lease_and_other_processes_can_read_the_text_it_wrote(place: Location) -> None:
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


def test_a_renewed_lease_lasts_longer_than_its_ttl(place: Location) -> None:
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


def test_a_holder_whose_lease_expired_cannot_write_to_the_guarded_folder(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # No other process has acquired the lease, so the holder may renew the lease and write again.
        held.write("again")
        storage.create(bucket / "again", b"x")
    assert [entry.name for entry in storage.list_after(bucket)] == ["again", "while it is sure"]


def test_a_holder_cannot_write_after_another_process_has_taken_the_lease(bucket: Location) -> None:
    with lease.held(bucket / "lock", guarding=bucket) as held:
        assert held is not None
        chain = chainlease.Chain(bucket / "lock")
        last, _ = chain.look()
        assert last is not None
        chain.append(chainlease.Link(last.number + 1, text="the other", host="elsewhere"))
        storage.store_of(bucket).create(bucket / "commit", b"of the other")
        with pytest.raises(LeaseLost, match="is lost to the other on elsewhere"):
            storage.create(bucket / "commit", b"ours")
        with pytest.raises(LeaseLost):
            storage.create(bucket / "next", b"ours")
        with pytest.raises(LeaseLost):
            held.write("here")


def test_with_at_once_a_process_does_not_wait_until_a_dead_holders_lease_expires(bucket: Location) -> None:
    with holder(bucket / "lock") as other:
        other.kill()
        other.wait()
        began = time.monotonic()
        with lease.held(bucket / "lock", at_once=True) as held:
            assert held is None
        assert time.monotonic() - began < chainlease.TTL / 2


def test_a_holder_that_slept_has_lost_the_lease_even_if_the_next_link_was_deleted(bucket: Location) -> None:
    """In an object store, a lease is a chain of numbered files (links). While the holder slept, another holder appended
    so many links that the first links after the sleeping holder's last link are already deleted."""
    with lease.held(bucket / "lock", guarding=bucket) as held:
        assert held is not None
        chain = chainlease.Chain(bucket / "lock")
        last, _ = chain.look()
        assert last is not None
        for number in range(1, 2 * chainlease._KEPT):
            chain.append(chainlease.Link(last.number + number, text="the other"))
        assert not storage.exists(bucket / "lock" / f"{last.number + 1:020}")
        with pytest.raises(LeaseLost, match="is lost to the other"):
            held.write("here")
        with pytest.raises(LeaseLost):
            storage.create(bucket / "late", b"x")


@pytest.mark.long
def test_process_that_takes_over_an_expired_lease_gets_a_leader_number(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes over a lease that was not given back is called a leader. ``inherited_as`` is the leader's
    number. It is None for a process that takes a free lease."""
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


# A process has a unique name ------------------------------------------------------------------------

NAME_AND_WAIT = "from pgcdc_assets.store.lease import ProcessName; print(ProcessName.own(), flush=True); input()"


def test_a_renewal_keeps_the_text_that_another_thread_writes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chainlease, "RENEWED", 0.0)

    def last(chain: chainlease.Chain) -> chainlease.Link:
        link, _ = chain.look()
        assert link is not None
        return link

    chain = chainlease.Chain(Location.of(tmp_path / "lease"))
    held, ended = chainlease.ChainLease(chain, None), threading.Event()
    thread = threading.Thread(target=held.renew, args=(ended,))
    thread.start()
    try:
        for text in map(str, range(100)):
            held.write(text)
            written = last(chain).number
            while last(chain).number == written:
                pass
            assert last(chain).text == text
    finally:
        ended.set()
        thread.join()


def test_a_process_knows_its_own_name() -> None:
    own = ProcessName.own()
    assert (own.host, own.pid, own.is_here, own.lives()) == (socket.gethostname(), os.getpid(), True, True)
    assert ProcessName.parse(str(own)) == own
    assert re.fullmatch(r"[\w.-]+", str(own)), "Dagster takes no other text for a tag"
    with pytest.raises(ValueError, match="unpack"):
        ProcessName.parse("host.1.2")


def test_the_host_in_the_name_of_a_process_may_contain_dots() -> None:
    name = replace(ProcessName.own(), host="a.b.example.org")
    assert ProcessName.parse(str(name)) == name


def test_another_process_counts_as_alive_until_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", NAME_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        assert process.stdout is not None
        name = ProcessName.parse(process.stdout.readline().strip())
        assert (name.pid, name.lives()) == (process.pid, True)
        assert not replace(name, started=name.started - 100).lives(), "its number was given again"
        process.kill()
        process.wait()
    assert name.lives() is False
    assert name.told == f"pid {name.pid}"


def test_it_is_unknown_whether_a_process_in_another_container_is_alive() -> None:
    """The process in the container has our host name and a pid that is also used on this host."""
    unshare = shutil.which("unshare")
    command = [unshare or "", "--pid", "--fork", "--mount-proc", sys.executable, "-c", NAME_AND_WAIT]
    if unshare is None or subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody make a namespace of processes")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = ProcessName.parse(process.stdout.readline().strip())
        assert (name.host, name.pid, psutil.pid_exists(name.pid)) == (socket.gethostname(), 1, True)
        assert (name.is_here, name.lives()) == (False, None)
        assert name.told == f"pid 1 on {name.host}"
        process.communicate("\n")
