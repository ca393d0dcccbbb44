"""Receives one source twice: once with streaming of transactions in progress, and once without streaming. The two logs
must then be equal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.segment import FACTS, read_rows
from pgcdc_assets.log.spill import SPILL
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.store import storage
from tests.log.conftest import SECONDS, Source, eventually, until_event

Row = tuple[Any, ...]

NO_DRAIN = 1 << 40
SEGMENT_BYTES = 1 << 16
"""A server with :func:`little_memory` sends a streamed transaction in blocks of about this size. So nearly every block
becomes a segment of its own."""
_SENT = """
SELECT 1 FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid
WHERE s.slot_name = %s AND r.sent_lsn >= %s::pg_lsn
"""


@dataclass
class Reading:
    """Reads the rows of a log, except the rows of rolled-back subtransactions. A repeated call of :meth:`rows` reads
    only new files."""

    log: ChangeLog
    late: int = 0
    """How many of the files that were read were written before the end of their transaction."""
    _rows: list[Row] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)
    _described: dict[int, tuple[bytes, RelationFacts]] = field(default_factory=dict)

    def rows(self, *, facts: bool = False) -> list[Row]:
        """The rows in commit order. Each row contains the commit LSN and time of its transaction, and the Relation
        message that applies to the row. The rows do not contain ``tx_ordinal``, because rolled-back rows leave gaps in
        these numbers.

        ``facts`` adds the facts about the row's relation that the receiver read from the catalog. They depend on the
        time of this catalog read. So if the test alters a table, the facts in two logs may differ.
        """
        for segment in self.log.all_segments():
            if segment.path.name not in self._read:
                self._read.add(segment.path.name)
                self.late += segment.commit_facts is not None
                self._add(read_rows(segment.file).to_pylist())
        self._rows.sort(key=lambda row: row[0])
        return [(*row[1:-1], self._of(row[-1], facts)) for row in self._rows]

    def _add(self, rows: list[dict[str, Any]]) -> None:
        names = ("commit_lsn", "xid", "commit_ts", "origin", "lsn", "kind", "relation_id", "payload", "schema_id")
        notes = {(row["kind"], row["schema_id"]): row["payload"] for row in rows if row["kind"] in ("R", FACTS)}
        for schema_id, payload in ((schema_id, payload) for (kind, schema_id), payload in notes.items() if kind == "R"):
            told = RelationFacts.from_json(json.loads(notes[FACTS, schema_id]))
            self._described[schema_id] = payload, told.without_volatile()
        for row in rows:
            if row["kind"] not in "#=RY":
                place = row["commit_lsn"] or row["lsn"], row["tx_ordinal"] or 0, row["relation_id"] or 0
                self._rows.append((place, *(row[name] for name in names)))

    def _of(self, schema_id: int | None, facts: bool) -> Any:
        if schema_id is None:
            return None
        payload, told = self._described[schema_id]
        return (payload, told) if facts else payload


@dataclass
class Twin:
    source: Source
    reading: Reading
    options: dict[str, Any]
    receiver: ReceiverProcess | None = None

    @property
    def log(self) -> ChangeLog:
        return self.reading.log

    def start(self, **options: Any) -> ReceiverProcess:
        self.receiver = self.source.receiver(self.log, drain_bytes=NO_DRAIN, **{**self.options, **options})
        return self.receiver

    def complete_to(self, lsn: Lsn) -> None:
        """Orders the running receiver to complete the log up to this LSN, and waits until the receiver reports that the
        log is complete."""
        assert self.receiver is not None
        self.receiver.mark(lsn)
        told = [event for event in until_event(self.receiver, "complete") if event.name == "complete"]
        assert [event.lsn for event in told] == [lsn]

    def receive(self, goal: Lsn, **options: Any) -> None:
        """Receives up to the LSN ``goal``, in the test's own process."""
        self.source.receive(self.log, goal, drain_bytes=NO_DRAIN, **{**self.options, **options})

    def arrive(self, goal: Lsn) -> None:
        """Orders the running receiver to end at ``goal``, and waits until it has ended."""
        assert self.receiver is not None
        self.receiver.until(goal)
        until_event(self.receiver, "arrived")
        self.receiver.join(SECONDS)


@dataclass
class Twins:
    """Two logs of the same source. ``streamed`` is received with streaming, unless the options say otherwise. ``whole``
    is received without streaming."""

    source: Source
    streamed: Twin
    whole: Twin

    @classmethod
    def of(cls, source: Source, **options: Any) -> Twins:
        one = Reading(source.log(two_phase=options.get("two_phase", False)))
        other = Reading(source.log("whole"))
        given = {"segment_bytes": SEGMENT_BYTES, "streaming": True, **options}
        return cls(source, Twin(source, one, given), Twin(source, other, {"streaming": False}))

    def start(self, **options: Any) -> ReceiverProcess:
        receiver = self.streamed.start(**options)
        until_event(receiver, "started")
        return receiver

    def flushed(self) -> Lsn:
        """Commits a small transaction, which also flushes the WAL of open transactions. Returns the WAL position."""
        return self.source.run("INSERT INTO foreign_table VALUES (1)")

    def catch_up(self) -> None:
        """Waits until the server has decoded all WAL and sent it to the receiver of ``streamed``."""
        lsn = self.flushed()
        eventually(lambda: sent(self, lsn))

    def check(self, *, facts: bool = False, upto: Lsn | None = None) -> list[Row]:
        """Checks that both logs are valid and equal. First receives the log ``whole``, unless the test started a
        receiver process for it. Returns the rows."""
        if self.whole.receiver is None:
            self.whole.receive(upto or self.flushed())
        found, expected = (twin.reading.rows(facts=facts) for twin in (self.streamed, self.whole))
        if upto is not None:
            expected = [row for row in expected if (row[0] or row[4]) < upto]
        assert_same(found, expected)
        for twin in (self.streamed, self.whole):
            twin.log.verify(LsnRange(twin.log.start, twin.log.position()))
        assert self.whole.reading.late == 0
        return found

    @property
    def spilled(self) -> list[str]:
        """Names of the files that contain parts of transactions in progress, and belong to no batch yet."""
        place = self.streamed.log.path / SPILL
        return sorted(path.name for path in Path(storage.store_of(place).scratch(place)).iterdir())

    def until_spooled(self, files: int = 1) -> None:
        eventually(lambda: len(self.spilled) >= files)


def sent(twins: Twins, lsn: Lsn) -> bool:
    """Whether the server has sent everything below this LSN to the receiver of the streamed slot."""
    asked = [twins.streamed.log.identity.slot, str(lsn)]
    return bool(twins.source.conn.execute(_SENT, asked).fetchone())


def assert_same(found: list[Row], expected: list[Row]) -> None:
    """Asserts that the rows are equal. Reports only the first difference, because pytest needs minutes to compare and
    show thousands of rows."""
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            differ = ", ".join(str(pair)[:300] for pair in zip(one, other, strict=True) if pair[0] != pair[1])
            raise AssertionError(f"row {number} of {len(found)}, {len(expected)}: {differ}")
    assert len(found) == len(expected)


def little_memory(source: Source, *, immediate: bool = False) -> None:
    """Makes the server stream each transaction that needs more than 64 kB of decoding memory. With ``immediate``, the
    server streams each change at once. The setting applies to connections that are opened later."""
    name, value = ("debug_logical_replication_streaming", "immediate") if immediate else (
        "logical_decoding_work_mem", "64kB")  # fmt: skip
    source.run(f"ALTER DATABASE {source.database.name} SET {name} = '{value}'")


def many(first: int, count: int = 400, table: str = "a") -> str:
    """A statement that inserts ``count`` rows of 1.8 kB. 400 rows need more than the server's decoding memory
    (:func:`little_memory`), but less than the 1 MiB that the receiver processes at once."""
    rows = f"generate_series({first}, {first + count - 1}) g"
    return f"INSERT INTO {table} (id, v) SELECT g, repeat('x', 1800) FROM {rows}"


def gid(source: Source, name: str = "g") -> str:
    """A gid that is unique on the server, because gids belong to the server and not to the database. Its apostrophe is
    doubled for use in an SQL literal."""
    return f"{source.database.name} it's {name}".replace("'", "''")


def prepare(source: Source, *statements: str, name: str = "g") -> Lsn:
    return source.run("BEGIN", *statements, f"PREPARE TRANSACTION '{gid(source, name)}'")


def end(source: Source, how: str = "COMMIT", name: str = "g") -> Lsn:
    return source.run(f"{how} PREPARED '{gid(source, name)}'")


def kinds(rows: list[Row]) -> str:
    return "".join(row[5] for row in rows)


def durable(twins: Twins, lsn: Lsn) -> None:
    assert twins.streamed.receiver is not None
    recorded(twins.source, twins.streamed.log, twins.streamed.receiver, lsn)


def recorded(source: Source, log: ChangeLog, receiver: ReceiverProcess, lsn: Lsn) -> None:
    """Orders the receiver to complete the log up to ``lsn``, and waits until the receiver has confirmed this LSN.
    Without the order, the receiver might stay below ``lsn``: the server's own WAL records may precede ``lsn``, and the
    server sends nothing for them."""
    receiver.mark(lsn)
    until_event(receiver, "complete")
    eventually(lambda: source.confirmed(log) >= lsn)


def restart(twins: Twins) -> ReceiverProcess:
    assert twins.streamed.receiver is not None
    twins.streamed.receiver.kill()
    return twins.start()
