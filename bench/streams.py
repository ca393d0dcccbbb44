"""Measures how fast pg_recvlogical, our receiver, a whole sync, and a native subscription process the same backlog."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession

from bench.project import engine, project
from bench.record import Record, Run
from bench.source import PUBLICATION, Workload, database, flushed, make_slot, program, run
from bench.usage import usage
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.store import storage

FLOOR = "pg_recvlogical to nothing"
CROWDED = "pg_recvlogical, a core busy"
"""The floor while another process keeps one core busy. A sync can be compared with it, because there another process
works on the received data, too."""
SLOTS = ("floor", "crowded", "stream", "whole", "drain", "native")
NEVER = 1 << 60
SECONDS = 900


@dataclass
class Streams:
    server: EmbeddedServer
    target: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    def turn(self, workload: Workload, number: int) -> None:
        """Measure everything once. The order rotates with ``number``, so that no measurement is always the first."""
        name = f"{workload.name.lower()}_{number}"
        with (
            database(self.server, name, workload.tables) as conninfo,
            project(self.folder / name, conninfo, f"{name}_main") as settings,
        ):
            engine(settings, self.spark).sync(Bounds())
            slots = {kind: make_slot(conninfo, f"{name}_{kind}") for kind in SLOTS}
            with self._subscriber(workload, name) as subscriber:
                rows = workload.load(self.server, conninfo, self.record.scale)
                end = flushed(conninfo)
                ways = [
                    lambda: self._floor(workload, conninfo, slots["floor"], end, rows),
                    lambda: self._crowded(workload, conninfo, slots["crowded"], end, rows),
                    lambda: self._receive(workload, conninfo, slots["stream"], end, rows, NEVER),
                    lambda: self._receive(workload, conninfo, slots["whole"], end, rows, NEVER, streaming=False),
                    lambda: self._receive(workload, conninfo, slots["drain"], end, rows, 1),
                    lambda: self._end_to_end(workload, settings, end, rows),
                    lambda: self._native(workload, conninfo, subscriber, slots["native"], end, rows),
                ]
                for step in range(len(ways)):
                    ways[(step + number) % len(ways)]()

    def _crowded(self, workload: Workload, conninfo: str, slot: str, end: Lsn, rows: int) -> None:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                self._floor(workload, conninfo, slot, end, rows, CROWDED)
            finally:
                busy.kill()

    def _floor(self, workload: Workload, conninfo: str, slot: str, end: Lsn, rows: int, what: str = FLOOR) -> None:
        with usage(self.server) as used:
            seconds = program(
                self.server, "pg_recvlogical", "-d", conninfo, "-S", slot, "--start", "--no-loop", f"--endpos={end}",
                "-f", "/dev/null", "-o", "proto_version=1", "-o", "messages=true",
                "-o", f"publication_names={PUBLICATION}",
            )  # fmt: skip
        self.record.add(Run(workload.name, what, seconds, rows, 0, used.cpu, used.peak))

    def _receive(
        self, workload: Workload, conninfo: str, slot: str, end: Lsn, rows: int, drain_bytes: int, *,
        streaming: bool = True,
    ) -> None:  # fmt: skip
        """Measure our receiver with a separate log, from the ``started`` event (the stream is requested) to the last
        Delta commit. ``streaming``: whether it also requests transactions in progress."""
        what = "receive, SQL functions" if drain_bytes == 1 else "receive, stream"
        what += "" if streaming else ", streaming off"
        found = receive(self.server, workload.name, conninfo, Layout.of(Path.cwd() / slot), slot, end, drain_bytes,
                        streaming=streaming)  # fmt: skip
        self.record.add(replace(found, what=what, rows=rows))

    def _end_to_end(self, workload: Workload, settings: Settings, end: Lsn, rows: int) -> None:
        """Measure a whole sync, from its call to its last consistent point. Spark is warm."""
        clock = Clock()
        ours = engine(settings, self.spark, clock)
        with usage(self.server) as used:
            started = time.time()
            ours.sync(Bounds(until=end))
            returned = time.time() - started
        newest = ConsistentPoints(settings.layout).newest()
        assert newest is not None
        self.record.add(Run(workload.name, "end to end", newest.at.timestamp() - started, rows, 0, used.cpu, used.peak,
                            {"to return s": returned, "into the log s": clock.landed - started}))  # fmt: skip

    # The native subscription ------------------------------------------------------------------------

    @contextmanager
    def _subscriber(self, workload: Workload, name: str) -> Iterator[str]:
        with database(self.target, f"{name}_target", workload.tables) as conninfo:
            yield conninfo

    def _native(self, workload: Workload, conninfo: str, subscriber: str, slot: str, end: Lsn, rows: int) -> None:
        with usage(self.server, self.target) as used:
            started = time.monotonic()
            options = f"slot_name = '{slot}', create_slot = false, copy_data = false, synchronous_commit = off"
            made = f"CREATE SUBSCRIPTION {slot} CONNECTION '{conninfo}' PUBLICATION {PUBLICATION} WITH ({options})"
            run(subscriber, made)
            reached = f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots WHERE slot_name = '{slot}'"
            applied = f"SELECT replay_lsn >= '{end}' FROM pg_stat_replication WHERE application_name = '{slot}'"
            while (True,) not in run(conninfo, applied) and (True,) not in run(conninfo, reached):
                time.sleep(0.05)
            seconds = time.monotonic() - started
        run(subscriber, f"ALTER SUBSCRIPTION {slot} DISABLE", f"ALTER SUBSCRIPTION {slot} SET (slot_name = NONE)",
            f"DROP SUBSCRIPTION {slot}")  # fmt: skip
        self.record.add(Run(workload.name, "native subscription", seconds, rows, 0, used.cpu, used.peak))


def receive(
    server: EmbeddedServer, workload: str, conninfo: str, layout: Layout, slot: str, end: Lsn, drain_bytes: int, *,
    streaming: bool = True,
) -> Run:  # fmt: skip
    """Measure our receiver with a separate log, which is then deleted."""
    log = empty_log(layout, conninfo, slot)
    receiver = ReceiverProcess(ReceiverSettings(
        conninfo, str(layout.root), (PUBLICATION,), 32 << 20, 1, drain_bytes, streaming=streaming
    ))  # fmt: skip
    with usage(server) as used:
        spawned = time.monotonic()
        receiver.start()
        receiver.until(end)
        started = _until(receiver, "started")
        seconds = _until(receiver, "arrived") - started
        receiver.join(SECONDS)
    size = sum(batch.bytes for batch in ChangeLog(layout).open().batches(log.start))
    storage.delete_folder(layout.root)
    return Run(workload, "receive", seconds, 0, size, used.cpu, used.peak, {"start-up s": started - spawned})


class Clock(Silent):
    """Records when the receiver had everything in the log."""

    landed = 0.0

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        if stage == "receive":
            self.landed = time.time()


def empty_log(layout: Layout, conninfo: str, slot: str) -> ChangeLog:
    """A new log that begins at the slot's confirmed position."""
    log = ChangeLog(layout)
    with psycopg.connect(conninfo, autocommit=True) as conn:
        found = conn.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", [slot])
        log.create(identity(conn, slot), Lsn.parse(found.fetchall()[0][0]), 1)
    return log


def _until(receiver: ReceiverProcess, name: str) -> float:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if any(event.name == name for event in receiver.events(0.02)):
            return time.monotonic()
    raise TimeoutError(f"no {name} event within {SECONDS} s")
