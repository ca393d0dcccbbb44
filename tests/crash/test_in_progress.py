"""The receiver is killed, or its connections are cut, while transactions are in progress or are written to the log.

Twins are two receivers of the same changes, one with and one without streaming. Their logs must be equal.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ReceiverDied, SourceUnavailable
from pgcdc_assets.log.spill import PREPARED
from pgcdc_assets.store.local import path_of
from tests.crash.faults import Faults, Kind, Tally, wait_until
from tests.crash.proxy import Proxy
from tests.fix_postgres import fresh_database
from tests.log.conftest import SECONDS, source_in, until_event
from tests.log.received_twice import Row, Twins, assert_same, little_memory, many, sent

LEVEL = "with transactions in progress"
POINTS = (
    FaultPoint.STREAM_SPILLED, FaultPoint.STREAM_DROPPED, FaultPoint.STREAM_RESTARTED, FaultPoint.SEGMENT_STAGED,
    FaultPoint.SEGMENT_WRITTEN, FaultPoint.SEGMENTS_MOVED, FaultPoint.BATCH_COMMITTING, FaultPoint.BATCH_COMMITTED,
    FaultPoint.BATCH_DURABLE, FaultPoint.BATCH_CONFIRMED,
)  # fmt: skip
EARLY = (FaultPoint.STREAM_SPILLED, FaultPoint.STREAM_DROPPED)
FEW = (FaultPoint.STREAM_SPILLED, FaultPoint.STREAM_RESTARTED, FaultPoint.SEGMENTS_MOVED, FaultPoint.BATCH_DURABLE)
"""The fault points of the default set: one for each stage."""
EMIT = "SELECT pg_logical_emit_message(true, 'app', '{}')"


@dataclass
class Rig:
    twins: Twins
    connections: list[psycopg.Connection]
    rounds: int = 0
    looks: list[tuple[Lsn, list[Row]]] = field(default_factory=list)
    """After each crash: the log's position, and the rows below this position."""

    def steps(self) -> Iterator[tuple[int, str]]:
        """Yields the steps of one round: the number of a connection, and its next statement. The transaction of
        connection 0 has a message that is rolled back. The transaction of connection 1 becomes larger than a batch. The
        transaction of connection 2 is rolled back after its changes were sent. Connection 3 runs all small
        transactions. The steps LOOK and LAND are waits, see :meth:`_wait`."""
        self.rounds += 1
        at = self.rounds * 10_000
        yield from ((0, "BEGIN"), (0, many(at, 300)), (1, "BEGIN"), (1, "SAVEPOINT s"), (1, many(at + 1000, 600)))
        yield from ((0, "SAVEPOINT s"), (0, many(at + 2000, 600)), (2, "BEGIN"), (2, many(at + 3000, 700)), (3, "LOOK"))
        yield from ((3, f"INSERT INTO b VALUES ({at}, 1)"), (0, "ROLLBACK TO s"), (2, "ROLLBACK"))
        yield from ((1, "ROLLBACK TO s"), (1, many(at + 4000, 600)), (1, "DELETE FROM a WHERE id % 7 = 0"), (3, "LOOK"))
        yield from ((1, "COMMIT"), (0, many(at + 5000, 300)), (3, f"INSERT INTO b VALUES ({at + 1}, 1)"), (3, "LAND"))
        yield from ((0, "SAVEPOINT t"), (0, EMIT.format("gone")), (0, many(at + 6000, 400)), (3, "LOOK"))
        yield from ((0, "ROLLBACK TO t"), (0, EMIT.format("kept")), (0, "COMMIT"), (3, "LOOK"))

    def play(self, before: Callable[[str], None], until: Callable[[], bool] = lambda: False) -> None:
        """Executes one round. ``before`` is called with the statement of each step. A wait for the server also ends
        when ``until`` returns True."""
        for number, statement in self.steps():
            before(statement)
            if statement in ("LAND", "LOOK"):
                self._wait(statement, until)
            else:
                self.connections[number].execute(statement.encode())

    def _wait(self, what: str, until: Callable[[], bool]) -> None:
        """Waits until the server has sent all WAL to the receiver (``what`` is LOOK), or until all of it is in the log
        (LAND)."""
        lsn, log = self.twins.flushed(), self.twins.streamed.log

        def there() -> bool:
            return sent(self.twins, lsn) if what == "LOOK" else log.position() >= lsn

        wait_until(lambda: there() or until(), SECONDS)

    def crashed(self) -> None:
        """Check the log after a crash, and start a new receiver."""
        log = self.twins.streamed.log
        position = log.position()
        assert self.twins.source.confirmed(log) <= position
        self.looks.append((position, self.twins.streamed.reading.rows()))
        self.twins.start()

    def check(self) -> None:
        self.twins.streamed.complete_to(self.twins.flushed())
        found = self.twins.check()
        assert sum(row[5] == "C" for row in found) == 4 * self.rounds
        for position, rows in self.looks:
            assert_same(rows, [row for row in found if row[0] < position])
        assert self.twins.streamed.receiver is not None
        self.twins.streamed.receiver.stop()
        assert self.twins.spilled == []
        assert self.twins.streamed.reading.late > 0


@pytest.fixture
def rig(crash_server: EmbeddedServer, tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        database = stack.enter_context(fresh_database(crash_server))
        source = stack.enter_context(source_in(database, tmp_path))
        others = [stack.enter_context(database.connect()) for _ in range(4)]
        little_memory(source)
        yield Rig(Twins.of(source), others)


@pytest.mark.timeout(600)
@pytest.mark.takes(40)
@pytest.mark.parametrize("points", [FEW, pytest.param(POINTS, marks=pytest.mark.long)], ids=["few", "all"])
def test_receiver_killed_while_transactions_are_in_progress_loses_and_repeats_nothing(
    rig: Rig, faults: Faults, chance: random.Random, tally: Tally, points: tuple[FaultPoint, ...]
) -> None:
    """The fault point is armed at the start of a round, or before the first commit of a transaction that is in
    progress. The receiver is killed when it reaches the fault point."""
    rig.twins.start()
    for point in points:
        for _ in range(3):
            at = "BEGIN" if point in EARLY or chance.random() < 0.2 else "COMMIT"
            if _killed_in_a_round(rig, faults, point, at):
                tally.add(LEVEL, point, Kind.RECEIVER)
                break
        else:
            pytest.fail(f"{point} was never reached")
    rig.check()


def _killed_in_a_round(rig: Rig, faults: Faults, point: FaultPoint, at: str) -> bool:
    armed = killed = False

    def reached() -> bool:
        return not killed and faults.reached(point) is not None

    def kill(statement: str) -> None:
        nonlocal armed, killed
        if statement == at and not armed:
            faults.arm(point)
            armed = True
        if reached():
            receiver = rig.twins.streamed.receiver
            assert receiver is not None
            assert receiver.pid is not None
            os.kill(receiver.pid, signal.SIGKILL)
            with pytest.raises(ReceiverDied):
                until_event(receiver, "arrived")
            faults.clear()
            killed = True
            rig.crashed()

    rig.play(kill, reached)
    # Wait, because the last batch may be closed only some time after the last step.
    wait_until(reached, 0.0 if killed else 1.0)
    kill("")
    faults.clear()
    return killed


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.takes(20)
def test_receiver_whose_connection_is_cut_at_any_time_loses_and_repeats_nothing(
    rig: Rig, crash_server: EmbeddedServer, chance: random.Random, tally: Tally, cycles: int,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Either the server ends its walsender, or the proxy cuts the connection, often in the middle of a block of a
    streamed transaction."""
    source = rig.twins.source
    with Proxy(crash_server.socket_folder) as proxy:
        rig.twins.streamed.options["conninfo"] = proxy.conninfo(source.database.conninfo)
        rig.twins.start()
        for _ in range(max(cycles // 3, 2)):
            left = chance.randrange(20)

            def cut(statement: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    time.sleep(chance.uniform(0, 0.2))
                    _cut(rig, proxy if chance.random() < 0.5 else None)
                    tally.add(LEVEL, None, Kind.CUT)
                    rig.crashed()

            rig.play(cut)
        rig.check()
    assert "sent only after their commit" not in capfd.readouterr().err


def _cut(rig: Rig, proxy: Proxy | None) -> None:
    """Cut the connection repeatedly until the receiver reports the loss and ends. A cut has no effect while the
    receiver is between two connections."""
    source, receiver, slot = rig.twins.source, rig.twins.streamed.receiver, rig.twins.streamed.log.identity.slot
    assert receiver is not None

    def lost() -> bool:
        if proxy is not None:
            proxy.cut()
        else:
            source.conn.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", [slot]
            )
        return wait_until(lambda: not receiver.alive, 1.0)

    assert wait_until(lost, SECONDS)
    with pytest.raises(SourceUnavailable):
        until_event(receiver, "arrived")


# The receiver is killed at each step of storing a prepared transaction, and of moving it into the log after COMMIT
# PREPARED

LEVEL_PREPARED = "with prepared transactions"
KEEPING = (FaultPoint.STREAM_SPILLED, FaultPoint.PREPARED_KEPT, FaultPoint.BATCH_COMMITTED, FaultPoint.BATCH_DURABLE)
TAKING = (
    FaultPoint.SEGMENT_WRITTEN, FaultPoint.PREPARED_COMMITTING, FaultPoint.SEGMENTS_MOVED, FaultPoint.BATCH_COMMITTING,
    FaultPoint.BATCH_COMMITTED, FaultPoint.BATCH_DURABLE, FaultPoint.PREPARED_DROPPED, FaultPoint.BATCH_CONFIRMED,
)  # fmt: skip


def case(point: FaultPoint, when: str) -> Any:
    name = {"keeping": "PREPARE", "taking": "COMMIT PREPARED", "rollback": "ROLLBACK PREPARED"}[when]
    return pytest.param(point, when, id=f"{point}-{name}")


@pytest.fixture
def twins(crash_server: EmbeddedServer, tmp_path: Path) -> Iterator[Twins]:
    with fresh_database(crash_server) as database, source_in(database, tmp_path) as source:
        little_memory(source)
        yield Twins.of(source, two_phase=True)


def killed_at(point: FaultPoint, twins: Twins, faults: Faults, tally: Tally) -> None:
    receiver = twins.streamed.receiver
    assert receiver is not None
    assert wait_until(lambda: faults.reached(point) is not None, SECONDS)
    assert receiver.pid is not None
    os.kill(receiver.pid, signal.SIGKILL)
    with pytest.raises(ReceiverDied):
        until_event(receiver, "arrived")
    faults.clear()
    log = twins.streamed.log
    assert twins.source.confirmed(log) <= log.position()
    tally.add(LEVEL_PREPARED, point, Kind.RECEIVER)
    twins.start()


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "when"),
    [*(case(point, "keeping") for point in KEEPING), *(case(point, "taking") for point in TAKING),
     case(FaultPoint.PREPARED_DROPPED, "rollback")],
)  # fmt: skip
def test_receiver_killed_at_each_step_of_a_prepared_transaction_loses_nothing(
    twins: Twins, faults: Faults, tally: Tally, point: FaultPoint, when: str
) -> None:
    source, gid = twins.source, f"{twins.source.database.name} g"
    twins.start()
    source.run("INSERT INTO b VALUES (1, 1)")
    twins.streamed.complete_to(twins.flushed())
    if when == "keeping":
        faults.arm(point)
    prepared = source.run("BEGIN", many(1, 300), "SAVEPOINT s", many(1001, 300), "ROLLBACK TO s", many(2001, 100),
                          f"PREPARE TRANSACTION '{gid}'")  # fmt: skip
    if when == "keeping":
        killed_at(point, twins, faults, tally)
    # ``flushed`` writes another transaction, because the server may take half a minute to report its position if
    # nothing is written.
    twins.streamed.complete_to(twins.flushed())
    assert wait_until(lambda: source.confirmed(twins.streamed.log) >= prepared, SECONDS)
    if when != "keeping":
        faults.arm(point)
    source.run(f"{'ROLLBACK' if when == 'rollback' else 'COMMIT'} PREPARED '{gid}'", "INSERT INTO b VALUES (2, 2)")
    if when != "keeping":
        killed_at(point, twins, faults, tally)
    twins.streamed.complete_to(twins.flushed())
    found = twins.check(facts=True)
    assert "".join(row[5] for row in found) == "IC" + ("I" * 400 + "C") * (when != "rollback") + "IC"
    assert twins.streamed.receiver is not None
    twins.streamed.receiver.stop()
    folder = path_of(twins.streamed.log.path / PREPARED)
    assert list(folder.iterdir()) == []
