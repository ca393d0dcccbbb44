"""Measures large transactions (workload W6). Their changes are received before the commit (streamed), or after it.

One transaction during a running sync shows how long after its COMMIT it is readable. Two concurrent transactions show
how much WAL the slot keeps.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession

from bench.latency import Mark, first, following, log_commits, publications, published, waited
from bench.project import engine, project
from bench.record import Record, Run
from bench.source import PUBLICATION, database, make_slot, run
from bench.streams import NEVER, SECONDS, empty_log
from bench.usage import usage
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.store.local import path_of

WORKLOAD = "W6"
RETAINED = "W6 WAL"
"""The name of the measurements of WAL that the slot keeps. They are no rates, and are compared with no floor."""
FLOOR = "pg_recvlogical to nothing, live"
STREAMED_FLOOR = f"{FLOOR}, streaming"
"""The time from COMMIT until the server has sent the rest of a streamed transaction. The client drops all data, and no
other process uses the machine, so no client can be faster."""
ROWS = 2_000_000
STATEMENTS = 100
WORK_MEM_KB = 64 << 10
"""The server's default of logical_decoding_work_mem. It is scaled with the size of the transactions, so that a small
transaction is streamed, too."""
LITTLE = 64_000_000
"""The slot counts as having released its WAL when it keeps fewer bytes than this. Scaled with the transactions."""
_LEAST_WORK_MEM_KB = 64
_LOOK_SECONDS = 0.1
_BEAT_SECONDS = 0.25
"""Seconds between two small transactions. After each of them, a record of running transactions is written, because a
slot releases WAL only after such a record. By itself the server writes it every 15 seconds, which would hide what is
measured."""
_INSERT = "INSERT INTO small SELECT g, g %% 1000, md5(g::text) FROM generate_series(%s::int, %s::int) g"
_SENT = """
SELECT coalesce(r.sent_lsn >= %s::pg_lsn, false) FROM pg_replication_slots s
JOIN pg_stat_replication r ON r.pid = s.active_pid WHERE s.slot_name = %s
"""
_ACTIVE = "SELECT active FROM pg_replication_slots WHERE slot_name ="
_KEPT = "SELECT (pg_current_wal_lsn() - restart_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s"


@dataclass
class InProgress:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    @property
    def rows(self) -> int:
        return int(ROWS * self.record.scale)

    def turns(self, repeat: int) -> None:
        """Measure ``repeat`` times. The order rotates, so that no measurement is always the first."""
        for number in range(repeat):
            ways = [
                lambda number=number: self._floor(number, streaming=False),
                lambda number=number: self._floor(number, streaming=True),
                lambda number=number: self._readable(number, "auto"),
                lambda number=number: self._readable(number, "off"),
            ]
            for step in range(len(ways)):
                ways[(step + number) % len(ways)]()
            both = [True, False] if number % 2 else [False, True]
            for streaming in both:
                self._retained(number, streaming)

    @contextmanager
    def _source(self, name: str) -> Iterator[str]:
        memory = max(_LEAST_WORK_MEM_KB, int(WORK_MEM_KB * self.record.scale))
        with database(self.server, name, ("small",)) as conninfo:
            run(conninfo, f'ALTER DATABASE "{name}" SET logical_decoding_work_mem = {memory}')
            yield conninfo

    # One transaction, live ------------------------------------------------------------------------

    def _readable(self, number: int, streaming: str) -> None:
        """Measure the time from COMMIT to the consistent point that contains the transaction, during a sync in follow
        mode. Spark is warm."""
        name = f"w6_{streaming}_{number}"
        with self._source(name) as conninfo, project(self.folder / name, conninfo, name, streaming=streaming) as given:
            ours = engine(given, self.spark)
            ours.sync(Bounds())
            with usage(self.server) as used, following(ours, Bounds(follow=True)):
                published(given, _warmed(conninfo))
                mark, load = self._transaction(conninfo)
                published(given, mark.lsn, SECONDS)
            more = {"load s": load, "into the log s": first(log_commits(given), mark) - mark.at,
                    "streamed MB": _streamed(conninfo, name)}  # fmt: skip
            seconds = first(publications(given), mark) - mark.at
        what = f"commit → readable, streaming {streaming}"
        self.record.add(Run(WORKLOAD, what, seconds, self.rows, 0, used.cpu, used.peak, more))

    def _floor(self, number: int, *, streaming: bool) -> None:
        """Measure the time from COMMIT until the server has sent everything to a client that drops it. The client asks
        for protocol 1, or for streaming as our receiver does."""
        name = f"w6_floor_{number}_{streaming:d}"
        with self._source(name) as conninfo:
            slot = _published_slot(conninfo, name)
            with usage(self.server) as used, _dropped(self.server, conninfo, slot, streaming=streaming):
                _sent(conninfo, slot, _warmed(conninfo))
                mark, load = self._transaction(conninfo)
                seconds = _sent(conninfo, slot, mark.lsn) - mark.at
        what = STREAMED_FLOOR if streaming else FLOOR
        self.record.add(Run(WORKLOAD, what, seconds, self.rows, 0, used.cpu, used.peak, {"load s": load}))

    def _transaction(self, conninfo: str) -> tuple[Mark, float]:
        """Write one large transaction. Returns its mark, and the seconds from its start to its COMMIT."""
        started = time.monotonic()
        with closing(psycopg.connect(conninfo)) as conn:
            conn.execute(_INSERT, (1, self.rows))
            load = time.monotonic() - started
            conn.commit()
            committed = time.time()
        return Mark(committed, _position(conninfo)), load

    # Two concurrent transactions -------------------------------------------------------------------

    def _retained(self, number: int, streaming: bool) -> None:
        """Measure how much WAL the slot keeps while two transactions are written and received, and how long after the
        later COMMIT the slot releases it."""
        version = "4, streaming" if streaming else "1"
        name = f"w6_wal_{number}_{int(streaming)}"
        little = LITTLE * self.record.scale
        with self._source(name) as conninfo:
            slot = _published_slot(conninfo, f"{name}_s")
            layout = Layout.of(self.folder / name)
            empty_log(layout, conninfo, slot)
            receiver = ReceiverProcess(ReceiverSettings(
                conninfo, str(layout.root), (PUBLICATION,), 32 << 20, 1, NEVER, streaming=streaming
            ))  # fmt: skip
            with usage(self.server) as used, _receiving(receiver), _Looks(conninfo, slot) as looks:
                committed = self._two(conninfo)
                waited(lambda: looks.below(little, committed) is not None, f"the slot {slot} lets no WAL go", SECONDS)
            streamed = _streamed(conninfo, slot)
        shutil.rmtree(path_of(layout.root))
        let_go = looks.below(little, committed)
        assert let_go is not None
        curve = [(round(at - committed, 3), kept) for at, kept in looks.found]
        most = max(kept for _, kept in looks.found)
        self.record.add(Run(RETAINED, f"slot, protocol {version}", let_go - committed, 2 * self.rows, 0, used.cpu,
                            used.peak, {"most MB": most / 1e6, "streamed MB": streamed}, curve))  # fmt: skip

    def _two(self, conninfo: str) -> float:
        """Write two concurrent transactions. Returns the time of the later COMMIT."""
        with ThreadPoolExecutor(2) as threads:
            return max(threads.map(lambda half: self._statements(conninfo, half * self.rows), (0, 1)))

    def _statements(self, conninfo: str, start: int) -> float:
        bounds = [start + self.rows * step // STATEMENTS for step in range(STATEMENTS + 1)]
        with closing(psycopg.connect(conninfo)) as conn:
            for low, high in pairwise(bounds):
                conn.execute(_INSERT, (low + 1, high))
            conn.commit()
        return time.monotonic()


@dataclass
class _Looks:
    """During the block, reads repeatedly how much WAL a slot keeps, and writes a small transaction every quarter of a
    second."""

    conninfo: str
    slot: str
    found: list[tuple[float, int]] = field(default_factory=list)
    """The time (monotonic) of each reading, and the bytes of WAL that the slot kept."""
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> _Looks:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        waited(lambda: bool(self.found), f"slot {self.slot} could not be looked at")
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def below(self, size: float, after: float) -> float | None:
        """The time of the first reading after ``after`` at which the slot kept less than ``size`` bytes."""
        return next((at for at, kept in list(self.found) if at > after and kept < size), None)

    def _look(self) -> None:
        beat, number = 0.0, 0
        with psycopg.connect(self.conninfo, autocommit=True) as conn:
            while not self._over.wait(_LOOK_SECONDS):
                if time.monotonic() - beat >= _BEAT_SECONDS:
                    beat, number = time.monotonic(), number - 1
                    conn.execute("INSERT INTO small VALUES (%s)", [number])
                    conn.execute("SELECT pg_log_standby_snapshot()")
                ((kept,),) = conn.execute(_KEPT, [self.slot]).fetchall()
                self.found.append((time.monotonic(), int(kept)))


def _published_slot(conninfo: str, name: str) -> str:
    run(conninfo, f"CREATE PUBLICATION {PUBLICATION} FOR TABLE small")
    return make_slot(conninfo, name)


@contextmanager
def _receiving(receiver: ReceiverProcess) -> Iterator[None]:
    """Run the receiver during the block, which begins when the receiver has asked for the stream."""
    receiver.start()
    try:
        waited(lambda: any(event.name == "started" for event in receiver.events(0)), "the receiver did not start")
        yield
    finally:
        receiver.stop()


@contextmanager
def _dropped(server: EmbeddedServer, conninfo: str, slot: str, *, streaming: bool) -> Iterator[None]:
    """Have ``pg_recvlogical`` read the slot and drop the data during the block."""
    asked = ["-o", "proto_version=4", "-o", "streaming=parallel"] if streaming else ["-o", "proto_version=1"]
    command = [str(server.bin / "pg_recvlogical"), "-d", conninfo, "-S", slot, "--start", "--no-loop", "-f",
               "/dev/null", *asked, "-o", f"publication_names={PUBLICATION}"]  # fmt: skip
    # The value that the receiver sets, unless the source's own setting is smaller.
    options = os.environ.get("PGOPTIONS", "") + (" -c logical_decoding_work_mem=16MB" if streaming else "")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "PGOPTIONS": options}) as process:
        try:
            yield
        finally:
            process.terminate()
            # A slot in use cannot be dropped with its database.
            waited(lambda: (False,) in run(conninfo, f"{_ACTIVE} '{slot}'"), f"slot {slot} is not let go")


def _sent(conninfo: str, slot: str, lsn: Lsn) -> float:
    """Wait until the server has sent everything below this LSN. Returns the time."""
    with psycopg.connect(conninfo, autocommit=True) as conn:
        deadline = time.monotonic() + SECONDS
        while conn.execute(_SENT, [str(lsn), slot]).fetchone() != (True,):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not send what lies below {lsn}")
            time.sleep(0.02)
        return time.time()


def _streamed(conninfo: str, slot: str) -> float:
    """MB that were decoded before their transaction's commit, according to pg_stat_replication_slots."""
    query = f"SELECT stream_bytes FROM pg_stat_replication_slots WHERE slot_name = '{slot}'"
    return float(run(conninfo, query)[0][0]) / 1e6


def _warmed(conninfo: str) -> Lsn:
    """Write one row before the large transaction. Returns an LSN above it: a client that has reached this LSN has
    started."""
    run(conninfo, "INSERT INTO small VALUES (0)")
    return _position(conninfo)


def _position(conninfo: str) -> Lsn:
    return Lsn.parse(str(run(conninfo, "SELECT pg_current_wal_insert_lsn()")[0][0]))
