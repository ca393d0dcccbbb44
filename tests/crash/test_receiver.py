"""The receiver is killed in every way, at every durable step and at random times. The log must equal, byte for byte,
what the source sends to a second slot."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import LogAhead, LogConflict, LogCorrupt, PgcdcError, ReceiverDied, SlotAhead
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.messages import Event, EventName, Order, OrderName, ReceiverSettings, read_line
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.source.stream.drain import LEAST_BYTES
from pgcdc_assets.store.local import path_of
from tests.crash.faults import ANY_TIME, Faults, Kind, Tally, kill, wait_until
from tests.crash.proxy import Proxy
from tests.crash.witness import assert_same, logged, peeked
from tests.crash.workload import RECEIVER_WORK, Writers, large
from tests.fix_postgres import fresh_database

logger = logging.getLogger(__name__)

LEVEL = "at receiver level"
ROUND = 25
"""The number of crashes (cycles) with the same database and log. With more cycles, each comparison of the whole log
would take longer."""
POINTS = (
    FaultPoint.SEGMENT_STAGED, FaultPoint.SEGMENT_WRITTEN, FaultPoint.SEGMENTS_MOVED, FaultPoint.BATCH_COMMITTING,
    FaultPoint.BATCH_COMMITTED, FaultPoint.BATCH_DURABLE, FaultPoint.BATCH_CONFIRMED,
)  # fmt: skip
UNCONFIRMED = (FaultPoint.BATCH_COMMITTED, FaultPoint.BATCH_DURABLE)
"""Fault points at which the log has advanced, but its new position must not be confirmed yet."""
ALL = (*POINTS, *POINTS, *[None] * 6)
SURE = (FaultPoint.SEGMENT_WRITTEN, FaultPoint.BATCH_COMMITTING, FaultPoint.BATCH_DURABLE, FaultPoint.BATCH_CONFIRMED)
"""One fault point of each stage, which every run of the receiver reaches."""
FEW = 20
"""With fewer cycles than this, only the fault points in ``SURE`` are selected."""
KINDS = (Kind.RECEIVER, Kind.PARENT, Kind.SERVER, Kind.CUT)
SECONDS = 180.0
"""The longest wait for anything, on a busy machine."""
_MAKE = """
CREATE TABLE a (id int PRIMARY KEY, v text);
CREATE TABLE b (id int PRIMARY KEY, n numeric(12,2));
CREATE TABLE c (k int, v text);
ALTER TABLE c REPLICA IDENTITY FULL;
CREATE TABLE big (id bigserial PRIMARY KEY, payload text);
CREATE TABLE foreign_table (id int, v text);
CREATE PUBLICATION p FOR TABLE a, b, c, big;
"""


@dataclass
class Receiver:
    """The receiver process, and the parent's end of its pipe."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, settings: ReceiverSettings, output: Path, until: Lsn | None) -> Receiver:
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pgcdc_assets.log.receive.process"], stdin=subprocess.PIPE, stdout=out,
                start_new_session=True,
            )  # fmt: skip
        receiver = cls(process, output)
        assert process.stdin is not None
        order = b"" if until is None else Order(OrderName.UNTIL, until).to_line()
        process.stdin.write(settings.to_line() + order)
        process.stdin.flush()
        return receiver

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def events(self) -> list[Event | PgcdcError]:
        lines = self.output.read_bytes().split(b"\n")[:-1]
        return [read_line(line) for line in lines]

    def leave(self) -> None:
        """Close the pipe, which is what the receiver sees when its parent dies."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def finish(self) -> None:
        """Fails unless the receiver ends by itself. If its last event is an error, the error must be of a class that a
        crash can cause."""
        assert wait_until(lambda: self.ended, SECONDS), f"still runs: {self.events()[-3:]}"
        self.leave()
        events = self.events()
        assert not events or not isinstance(
            events[-1], ReceiverDied | LogConflict | LogCorrupt | SlotAhead | LogAhead
        ), events


@dataclass
class Rig:
    server: EmbeddedServer
    faults: Faults
    proxy: Proxy
    chance: random.Random
    tally: Tally
    conninfo: str
    folder: Path
    writers: Writers
    points: Sequence[FaultPoint | None] = ALL
    """Each cycle selects one of these fault points at random."""
    log: ChangeLog = field(init=False)
    slot: str = field(init=False)
    stood: int = 0
    """Number of cycles since the log last advanced."""

    def __post_init__(self) -> None:
        with self.connect() as conn:
            conn.execute(_MAKE)
            name = conn.info.dbname
            self.slot = f"s_{name}"
            for slot in (self.slot, f"twin_{name}"):
                row = conn.execute(
                    "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", [slot]
                ).fetchone()
                if slot == self.slot:
                    assert row is not None
                    self.log = ChangeLog(Layout.of(self.folder))
                    self.log.create(identity(conn, slot), Lsn.parse(row[0]), 1)

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.conninfo, autocommit=True) as conn:
            yield conn

    # One cycle --------------------------------------------------------------------------------------

    def cycle(self) -> bool:
        """Starts the receiver, crashes it and checks the log. Returns whether the crash interrupted a change of the
        log."""
        chance, faults, started = self.chance, self.faults, time.monotonic()
        point = chance.choice(self.points)
        kind = chance.choice(KINDS)
        if point is FaultPoint.SEGMENT_STAGED or chance.random() < 0.15:
            self.writers.asked.append(large)
        before = self._moved()
        if point is not None:
            faults.arm(point, 0 if point is FaultPoint.SEGMENT_STAGED else chance.randrange(2))
        receiver = self._start(self._goal() if chance.random() < 0.25 else None)
        try:
            hit = self._reach(receiver, point)
            if hit and not receiver.ended:
                self._inflict(receiver, kind, point)
            receiver_moved = self._moved() != before
        finally:
            faults.clear()
            if not receiver.ended and kind is not Kind.RECEIVER:
                wait_until(lambda: receiver.ended, SECONDS)
            kill(receiver.process.pid)
            receiver.process.wait()
        receiver.finish()
        self._look(Lsn(before[0]))
        counts = hit and (point is not None or receiver_moved)
        logger.info("%s %s %s, %.1f s", point or ANY_TIME, kind, counts, time.monotonic() - started)
        if counts:
            self.tally.add(LEVEL, point, kind)
        return counts

    def _start(self, until: Lsn | None) -> Receiver:
        settings = ReceiverSettings(
            self.proxy.conninfo(self.conninfo), str(self.folder), ("p",),
            batch_bytes=self.chance.choice([16 << 10, 1 << 20, 32 << 20]),
            batch_seconds=self.chance.choice([0.02, 0.1, 0.4]),
            drain_bytes=self.chance.choice([1, LEAST_BYTES]), messages=("*",),
        )  # fmt: skip
        return Receiver.start(settings, self.folder / "output", until)

    def _goal(self) -> Lsn:
        """Returns an endpos slightly above the current WAL position, often inside an open transaction or in WAL of
        other tables."""
        with self.connect() as conn:
            return Lsn(_lsn(conn, "pg_current_wal_insert_lsn()") + self.chance.randrange(200_000))

    def _reach(self, receiver: Receiver, point: FaultPoint | None) -> bool:
        """Wait until the receiver has stopped at the fault point. If ``point`` is None, wait for a random time. Returns
        False if the receiver has ended."""
        if point is not None:
            assert wait_until(lambda: receiver.ended or self.faults.reached(point) is not None, SECONDS), point
            if self.faults.reached(point) is None:
                return False
            self._assert_confirmed_is_durable(point)
            return True
        wait_until(lambda: receiver.ended or bool(receiver.events()), SECONDS)
        time.sleep(self.chance.uniform(0, 1.2))
        return not receiver.ended

    def _inflict(self, receiver: Receiver, kind: Kind, point: FaultPoint | None) -> None:
        if kind is Kind.RECEIVER:
            kill(receiver.process.pid)
        elif kind is Kind.PARENT:
            receiver.leave()
        elif kind is Kind.CUT:
            self._cut(receiver)
        else:
            self.server.stop(mode="immediate")
            self.faults.clear()
            wait_until(lambda: receiver.ended, SECONDS)
            self.server.start(survive=False)
        self.faults.clear()

    def _cut(self, receiver: Receiver) -> None:
        """Cut the connections until the receiver has ended. A receiver that was about to leave its connections for new
        ones does not notice the first cut."""
        self.proxy.cut()
        self.faults.clear()
        while not wait_until(lambda: receiver.ended, 1):
            self.proxy.cut()

    # Checks ------------------------------------------------------------------------------------------

    def _assert_confirmed_is_durable(self, point: FaultPoint) -> None:
        confirmed = self._confirmed()
        position = self.log.position()
        assert confirmed <= position, f"confirmed {confirmed}, but the log ends at {position}"
        if point in UNCONFIRMED:
            assert confirmed < position, f"{position} was confirmed at {point}"

    def _look(self, before: Lsn) -> None:
        confirmed, position = self._confirmed(), self.log.position()
        assert position >= before, f"the log's end moved back from {before} to {position}"
        assert confirmed <= position, f"confirmed {confirmed}, but the log ends at {position}"
        self.stood = 0 if position > before else self.stood + 1
        assert self.stood < 10, "the log has not advanced in ten cycles"

    def compare(self) -> None:
        """Compare the whole log with the bytes that a second slot receives."""
        position = self.log.position()
        with self.connect() as conn:
            # The second slot reads all flushed WAL, so it reads at least everything that is in the log.
            assert_same(
                logged(path_of(self.log.path), position), peeked(conn, f"twin_{conn.info.dbname}", "p", position)
            )

    def finish(self) -> None:
        """Checks, after a run without a crash, that no transaction is missing and every batch is complete."""
        with self.connect() as conn:
            end = Lsn(_lsn(conn, "pg_current_wal_insert_lsn()"))
        receiver = self._start(end)
        assert wait_until(lambda: receiver.ended, SECONDS)
        receiver.finish()
        last = receiver.events()[-1]
        assert isinstance(last, Event), last
        assert last.name == EventName.ARRIVED, receiver.events()
        self.compare()
        assert self.log.verify(LsnRange(self.log.start, self.log.position()))

    def _moved(self) -> tuple[int, int]:
        """The log's position, and the number of its files including the spill folder."""
        files = sum(1 for _ in path_of(self.log.path).glob("*.parquet")) + sum(
            1 for _ in path_of(self.log.path).glob("_spill/*")
        )
        return int(self.log.position()), files

    def _confirmed(self) -> Lsn:
        with self.connect() as conn:
            return Lsn(_lsn(conn, "confirmed_flush_lsn", "FROM pg_replication_slots WHERE slot_name = %s", self.slot))


def _lsn(conn: psycopg.Connection[Any], expression: str, of: str = "", *values: str) -> int:
    row = conn.execute(f"SELECT ({expression})::text {of}".encode(), values).fetchone()
    assert row is not None
    return int(Lsn.parse(row[0]))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.takes(40)
def test_receiver_killed_at_every_step_and_at_any_time_loses_and_repeats_nothing(
    crash_server: EmbeddedServer, faults: Faults, chance: random.Random, cycles: int, tally: Tally, tmp_path: Path
) -> None:
    left = cycles
    while left > 0:
        left -= _round(crash_server, faults, chance, min(left, ROUND), tally, tmp_path / f"lake{left}")


def _round(
    server: EmbeddedServer, faults: Faults, chance: random.Random, cycles: int, tally: Tally, folder: Path
) -> int:
    folder.mkdir()
    with fresh_database(server) as database, Proxy(server.socket_folder) as proxy:
        writers = Writers(database.conninfo, RECEIVER_WORK, chance, most_pause=0.03 if cycles >= FEW else 0.1)
        points = SURE if cycles < FEW else ALL
        rig = Rig(server, faults, proxy, chance, tally, database.conninfo, folder, writers, points)
        counted = tried = 0
        with writers.writing():
            while counted < cycles:
                tried += 1
                assert tried < 4 * cycles + 10, "most crashes interrupted no change"
                counted += rig.cycle()
                if cycles >= FEW and counted == cycles // 2:
                    rig.compare()
        rig.finish()
    return counted
