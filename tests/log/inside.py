"""Runs the receiver in the test's own process, so that the test can observe each LSN that the receiver confirms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.batches import Limits
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.source.connect.connection import SourceConnection, connect
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, PluginOptions
from pgcdc_assets.source.connect.silence import FOR_STREAMS, Patience
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.stream.drain import LEAST_BYTES, RANGE_LIMITS, RangeLimits
from pgcdc_assets.source.stream.subscribe import Subscription, begin, check_identity
from tests.log.conftest import PUBLICATION, Source

Confirmation = Callable[[Lsn], None]
RECEIVING: Final = Limits(batch_bytes=1 << 20, batch_seconds=0.02)


class Watched(ReplicationConnection):
    """A replication connection that calls ``confirming`` with each LSN before it confirms the LSN to the server."""

    confirming: Confirmation

    def send_status(self, write_lsn: Lsn, flush_lsn: Lsn, apply_lsn: Lsn, *, reply: bool = False) -> None:
        self.confirming(flush_lsn)
        super().send_status(write_lsn, flush_lsn, apply_lsn, reply=reply)


def watched(conn: SourceConnection, confirming: Confirmation) -> SourceConnection:
    """Changes this connection so that it calls ``confirming`` with the new LSN before it advances a slot."""
    execute = conn.execute

    def executing(query: Any, params: Any = None, **more: Any) -> Any:
        if "pg_replication_slot_advance" in str(query):
            confirming(Lsn.parse(params[1]))
        return execute(query, params, **more)

    conn.execute = executing  # type: ignore[method-assign]
    return conn


def ranges_of(size: int, **others: Any) -> RangeLimits:
    """Limits for a drain (reading the backlog with SQL functions) whose calls each read ``size`` bytes of WAL."""
    return replace(RANGE_LIMITS, smallest_range=size, largest_range=size, **others)


def receive_inside(
    source: Source, log: ChangeLog, until: Lsn | None, confirming: Confirmation, *,
    writer: type[BatchWriter] = BatchWriter, receiving: Limits = RECEIVING, drain_bytes: int = LEAST_BYTES,
    orders: Callable[[Receiver], None] = lambda receiver: None, conninfo: str | None = None,
    patience: Patience = FOR_STREAMS, limits: RangeLimits = RANGE_LIMITS, plugin: PluginOptions = FIRST_VERSION,
    **options: Any,
) -> Lsn:  # fmt: skip
    """Runs the receiver once, as the receiver's process would. The run ends at the LSN ``until``; without ``until``, it
    ends only when ``orders`` stops it. Calls ``confirming`` with each LSN before the LSN is confirmed. Returns the
    log's position at the end."""
    log.open()
    identity, timeline, position = log.identity, log.timeline, log.position()
    conninfo = conninfo or source.database.conninfo
    with connect(conninfo) as plain, Watched.open(conninfo, options=options) as stream:
        conn = watched(plain, confirming)
        stream.confirming = confirming
        found = check_identity(stream, identity, timeline, position)
        asked = Subscription(conn, identity.slot, [PUBLICATION], plugin)
        frames, floor = begin(asked, stream, position, drain_bytes=drain_bytes, limits=limits)
        relations = Relations()
        receiver = Receiver(
            frames, conn, writer(log.path, identity, found.timeline, relations), relations,
            publications=[PUBLICATION], floor=floor, limits=receiving,
            report=lambda report: None, orders=orders, patience=patience, wanted=MessageFilter(["*"]),
        )  # fmt: skip
        if until is not None:
            receiver.until(until)
        return receiver.run()


@contextmanager
def writing(source: Source, number: int) -> Iterator[None]:
    """Lets ``number`` sessions write at the same time, until the ``with`` block ends. Each session commits one small
    transaction after another."""
    stop = threading.Event()

    def write(writer: int) -> None:
        with source.database.connect() as conn:
            at = writer * 1_000_000
            while not stop.is_set():
                with conn.transaction():
                    conn.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(%s::int, %s::int) g", [at, at + 4])
                    conn.execute("UPDATE a SET v = 'y' WHERE id = %s", [at + 2])
                    conn.execute("INSERT INTO b VALUES (%s, 1.5)", [at])
                at += 5

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
