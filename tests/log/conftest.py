"""The source, slots and change logs that the tests of the receiver use."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.connections import Orders, Receiving
from pgcdc_assets.log.receive.messages import (
    FALLBACK_SECONDS,
    SEGMENT_BYTES,
    Event,
    EventName,
    Order,
    OrderName,
    ReceiverSettings,
)
from pgcdc_assets.source.connect.pluginoptions import Origins
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.source.stream.drain import LEAST_BYTES
from pgcdc_assets.store import storage
from tests.fix_postgres import Database

PUBLICATION = "p"
SECONDS = 30.0


@dataclass
class Source:
    """The source database of a test. Publication ``p`` contains the tables ``a`` and ``b``, but not ``foreign_table``.
    Creates slots and logs for the test, and runs receivers."""

    database: Database
    conn: psycopg.Connection[Any]
    folder: Path
    running: list[ReceiverProcess] = field(default_factory=list)
    bucket: Location | None = None
    """The bucket that contains the logs. None if the logs are in ``folder``."""

    def run(self, *statements: str) -> Lsn:
        """Runs each statement in a separate transaction. Use BEGIN and COMMIT for a transaction of several statements.
        Returns the WAL insert position after the statements."""
        for statement in statements:
            self.conn.execute(statement.encode())
        return self.lsn()

    def transaction(self, *statements: str) -> Lsn:
        with self.conn.transaction():
            self.run(*statements)
        return self.lsn()

    def lsn(self) -> Lsn:
        return self.scalar_lsn("pg_current_wal_insert_lsn()")

    def scalar_lsn(self, expression: str) -> Lsn:
        row = self.conn.execute(f"SELECT ({expression})::text".encode()).fetchone()
        assert row is not None
        return Lsn.parse(row[0])

    def slot(self, name: str) -> str:
        """A slot name that is unique on the server."""
        return f"{name}_{self.database.name}"

    def log(self, name: str = "s", *, copy_of: ChangeLog | None = None, two_phase: bool = False) -> ChangeLog:
        """Creates a slot, or copies the slot of the log ``copy_of``. Returns a new, empty log for this slot."""
        slot = self.slot(name)
        if copy_of is None:
            self.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)", [slot, two_phase])
        else:
            self.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [copy_of.identity.slot, slot])
        return self.log_of(slot, name)

    def log_of(self, slot: str, name: str) -> ChangeLog:
        """Creates an empty log for a slot that already exists."""
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
        ((start,),) = self.conn.execute(query, [slot]).fetchall()
        log = ChangeLog(Layout.of((self.bucket or Location.of(self.folder)) / name))
        log.create(identity(self.conn, slot), Lsn.parse(start), 1)
        return log

    def receiver(
        self, log: ChangeLog, *, batch_seconds: float = 0.2, batch_bytes: int = 32 << 20, conninfo: str | None = None,
        drain_bytes: int = LEAST_BYTES, highest: Lsn = ZERO,
        messages: Sequence[str] = ("*",), origin: str = Origins.ANY, streaming: bool = True,
        two_phase: bool = False, segment_bytes: int = SEGMENT_BYTES, fallback_seconds: float = FALLBACK_SECONDS,
    ) -> ReceiverProcess:  # fmt: skip
        """Starts a receiver process. If the process still runs at the end of the test, it is killed."""
        receiver = ReceiverProcess(ReceiverSettings(
            conninfo or self.database.conninfo, str(log.path.parent.parent), (PUBLICATION,),
            batch_bytes=batch_bytes, batch_seconds=batch_seconds, drain_bytes=drain_bytes,
            highest=highest, messages=tuple(messages), origin=origin, streaming=streaming,
            two_phase=two_phase, segment_bytes=segment_bytes, fallback_seconds=fallback_seconds,
        ))  # fmt: skip
        self.running.append(receiver)
        receiver.start()
        return receiver

    def receive(self, log: ChangeLog, until: Lsn, *, messages: Sequence[str] = ("*",), **options: Any) -> list[Event]:
        """Runs the receiver up to the LSN ``until`` in the test's own process. This is faster, because a separate
        receiver process needs a second for its imports. Returns all events of the run."""
        settings = ReceiverSettings(
            self.database.conninfo, str(Layout.of(log.path.parent.parent).root), (PUBLICATION,), 32 << 20, 0.2,
            messages=tuple(messages), leader=log.leader, **options,
        )  # fmt: skip
        events: list[Event] = []
        reading, writing = os.pipe()
        with open(reading, "rb") as orders, open(writing, "wb", buffering=0) as ordering:
            ordering.write(Order(OrderName.UNTIL, until).to_line())
            late = threading.Timer(SECONDS, lambda: ordering.write(Order(OrderName.STOP).to_line()))
            late.start()
            try:
                Receiving(settings, Orders(orders.fileno()), events.append).run()
            finally:
                late.cancel()
        assert events[-1].name == EventName.ARRIVED, events
        return events

    def slot_row(self, log: ChangeLog, column: str) -> Any:
        row = self.conn.execute(
            f"SELECT {column}::text FROM pg_replication_slots WHERE slot_name = %s".encode(), [log.identity.slot]
        ).fetchone()
        assert row is not None
        return row[0]

    def confirmed(self, log: ChangeLog) -> Lsn:
        return Lsn.parse(self.slot_row(log, "confirmed_flush_lsn"))

    @contextmanager
    def slot_set_back(self, log: ChangeLog) -> Iterator[None]:
        """After the block, the log's slot is as it was before the block. A crash of the source has the same effect,
        because PostgreSQL does not write confirmations to disk at once."""
        slot, copied = log.identity.slot, "SELECT pg_copy_logical_replication_slot(%s, %s)"
        self.conn.execute(copied, [slot, f"{slot}_old"])
        yield
        self.conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        self.conn.execute(copied, [f"{slot}_old", slot])


in_each_place = pytest.mark.parametrize(
    "place", ["folder", pytest.param("bucket", marks=[pytest.mark.long, pytest.mark.timeout(900)])], indirect=True
)
"""Runs a test with logs in a folder and, in the long set, also with logs in an object store."""


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Location | None:
    """The bucket in which the test stores its logs, or None if it stores them in a folder."""
    return request.getfixturevalue("bucket") if getattr(request, "param", "folder") == "bucket" else None


@pytest.fixture
def source(database: Database, tmp_path: Path, place: Location | None) -> Iterator[Source]:
    with source_in(database, tmp_path, place) as source:
        yield source


@contextmanager
def source_in(database: Database, folder: Path, bucket: Location | None = None) -> Iterator[Source]:
    """Creates the tables and the publication of a :class:`Source`. The logs are in ``bucket`` if it is given, otherwise
    in ``folder``. Receivers that still run at the end are killed."""
    with database.connect() as conn:
        source = Source(database, conn, folder, bucket=bucket)
        source.run(
            "CREATE TABLE a (id int PRIMARY KEY, v text)",
            "CREATE TABLE b (id int PRIMARY KEY, n numeric)",
            "CREATE TABLE foreign_table (id int, v text)",
            "CREATE PUBLICATION p FOR TABLE a, b",
        )
        yield source
        for receiver in source.running:
            receiver.kill()


def until_event(receiver: ReceiverProcess, name: str, seconds: float = SECONDS) -> list[Event]:
    """Waits until the receiver sends an event with this name. Returns all events that arrived during the wait."""
    seen: list[Event] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen += receiver.events(0.2)
        if any(event.name == name for event in seen):
            return seen
    raise AssertionError(f"no {name} event within {seconds} s, but {seen}")


def eventually(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def rows(log: ChangeLog, where: str = "kind IN ('I','U','D','T','M','C')") -> list[dict[str, Any]]:
    """The rows of the log, in order. delta-rs reads them, so the tests do not depend on pgcdc's own reader."""
    query = (
        "SELECT commit_lsn, tx_ordinal, xid, commit_ts, origin, lsn, kind, relation_id, schema_id, payload "
        f"FROM log WHERE {where} ORDER BY commit_lsn, tx_ordinal, relation_id, lsn"
    )
    table = (
        QueryBuilder()
        .register("log", DeltaTable(str(log.path), storage_options=storage.options(log.path)))
        .execute(query)
        .read_all()
    )
    return list(pa.table(table).to_pylist())


def batch_ends(log: ChangeLog) -> list[Lsn]:
    """Returns, for each row of :func:`rows` that belongs to a transaction, the end of the batch that contains the
    row."""
    batches = log.batches(log.start)
    commits = [row["commit_lsn"] for row in rows(log) if row["commit_lsn"] is not None]
    return [next(batch.end for batch in batches if batch.start <= commit < batch.end) for commit in commits]


def content(log: ChangeLog, *, but: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """The values of all rows, without the columns ``but``. These values must be the same for each division of the
    stream into batches."""
    return [tuple(value for key, value in row.items() if key not in but) for row in rows(log)]
