"""The receiver is killed at each step of storing a prepared transaction, and of moving it into the log after COMMIT
PREPARED."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ReceiverDied
from pgcdc_assets.log.spill import PREPARED
from pgcdc_assets.store.local import path_of
from tests.crash.faults import Faults, Kind, wait_until
from tests.crash.tally import Tally
from tests.fix_postgres import fresh_database
from tests.log.conftest import SECONDS, source_in, until_event
from tests.log.received_twice import Twins, little_memory, many

LEVEL = "with prepared transactions"
KEEPING = (FaultPoint.STREAM_SPILLED, FaultPoint.PREPARED_KEPT, FaultPoint.BATCH_COMMITTED, FaultPoint.BATCH_DURABLE)
TAKING = (
    FaultPoint.SEGMENT_WRITTEN, FaultPoint.PREPARED_COMMITTING, FaultPoint.SEGMENTS_MOVED, FaultPoint.BATCH_COMMITTING,
    FaultPoint.BATCH_COMMITTED, FaultPoint.BATCH_DURABLE, FaultPoint.PREPARED_DROPPED, FaultPoint.BATCH_CONFIRMED,
)  # fmt: skip


OWN = (FaultPoint.PREPARED_KEPT, FaultPoint.PREPARED_COMMITTING, FaultPoint.PREPARED_DROPPED)
"""Fault points that only prepared transactions reach. The default set tests only one of them."""


def case(point: FaultPoint, when: str) -> Any:
    often = point in OWN or (point, when) == (FaultPoint.BATCH_COMMITTED, "taking")
    return pytest.param(point, when, marks=() if often else pytest.mark.long)


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
    tally.add(LEVEL, point, Kind.RECEIVER)
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
    # If the source writes nothing, the server may take half a minute to report its position.
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
