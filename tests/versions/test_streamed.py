"""Transactions in progress on every supported version: what their blocks make is what version 1 sends at their commit.

Rows, order, positions, origins, and the Relation message in force for each row.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import SourceFailed
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, Origins, PluginOptions
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.fix_postgres import Database, fresh_database
from tests.versions.streaming import FOREIGN, IMMEDIATE_SINCE, PUBLICATION, Reading, Stream, streaming

pytestmark = pytest.mark.versions(14, 18, long=(15, 16, 17))

NEVER_STREAMED_SINCE = 18
"""What was rolled back before it was decoded is not streamed, but its subtransactions' aborts are sent."""

DDL = f"""
CREATE TABLE {FOREIGN} (i int);
CREATE TABLE a (id int PRIMARY KEY, v text);
CREATE TABLE b (id int PRIMARY KEY, n numeric);
CREATE TYPE mood AS ENUM ('ok');
CREATE TABLE c (id int PRIMARY KEY, m mood);
CREATE TABLE bag (id int, v text); ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE toast (id int PRIMARY KEY, n int, v text); ALTER TABLE toast ALTER v SET STORAGE EXTERNAL;
CREATE PUBLICATION {PUBLICATION} FOR TABLE a, b, c, bag, toast;
"""


@pytest.fixture
def database(version_server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(version_server) as database, database.connect() as conn:
        conn.execute(DDL.encode())
        yield database


def many(first: int, count: int = 400) -> str:
    """More than fits into the memory of the connection that decodes."""
    return f"INSERT INTO a (id, v) SELECT g, repeat('x', 200) FROM generate_series({first}, {first + count - 1}) g"


def run(stream: Stream, conn: psycopg.Connection, *steps: str) -> None:
    """Statements; at ``/`` the stream catches up."""
    for step in steps:
        if step == "/":
            stream.catch_up()
        else:
            conn.execute(step.encode())


def check(stream: Stream) -> Reading:
    found, expected = stream.catch_up(), stream.whole()
    assert found.loose == expected.loose
    assert len(found.transactions) == len(expected.transactions)
    for one, other in zip(found.transactions, expected.transactions, strict=True):
        assert one == other
    assert len(found.held) == len(found.prepared) == 0
    return found


@pytest.mark.parametrize("immediate", [False, True], ids=["full", "immediate"])
def test_savepoints(database: Database, immediate: bool) -> None:
    """Released, rolled back, within each other, after large parts of them were sent."""
    with streaming(database, immediate=immediate) as stream, database.connect() as conn:
        run(stream, conn, "BEGIN", many(1), "/", "SAVEPOINT s", "INSERT INTO b VALUES (1, 1)", many(1001),
            "SAVEPOINT t", many(2001), "/", "RELEASE t", "INSERT INTO c VALUES (1, 'ok')", "SAVEPOINT u", many(3001),
            "ROLLBACK TO u", many(4001), "/", "ROLLBACK TO s", "INSERT INTO b VALUES (2, 2)", "SAVEPOINT v",
            "SAVEPOINT w", many(5001), "RELEASE w", "INSERT INTO c VALUES (2, 'ok')", "/", "RELEASE v",
            "UPDATE a SET v = 'new' WHERE id % 100 = 1", "DELETE FROM a WHERE id % 100 = 2", "COMMIT",
            "INSERT INTO a VALUES (-1, 'behind it')")  # fmt: skip
        found = check(stream)
    assert {"S", "E", "A", "c"} <= found.seen
    assert [len(transaction.changes) > 800 for transaction in found.transactions] == [True, False]
    assert found.ambiguous == set()


def test_transactions_beside_each_other(database: Database) -> None:
    """Blocks of large ones in progress, small ones between them, in the order of their commits."""
    with streaming(database) as stream, ExitStack() as stack:
        first, second, third = (stack.enter_context(database.connect()) for _ in range(3))
        run(stream, first, "BEGIN", many(1))
        run(stream, second, "BEGIN", "SAVEPOINT s", many(10_001), "/")
        run(stream, third, "INSERT INTO b VALUES (1, 1)")
        run(stream, first, "SAVEPOINT s", many(1001), "/")
        assert len(stream.read.held) == 2
        run(stream, second, "ROLLBACK TO s", many(20_001), "/", "COMMIT")
        run(stream, third, "INSERT INTO b VALUES (2, 2)", "BEGIN", "INSERT INTO b VALUES (3, 3)")
        run(stream, first, "UPDATE a SET v = v || 'y' WHERE id % 2 = 0", "/", "COMMIT")
        run(stream, third, "COMMIT")
        found = check(stream)
    assert [len(transaction.changes) for transaction in found.transactions] == [1, 400, 1, 1400, 1]


def test_rollbacks(database: Database) -> None:
    """Of all that was sent, and of what was never sent: nothing is left."""
    whole = ["BEGIN", "SAVEPOINT s", many(1), "SAVEPOINT t", many(1001), "RELEASE t", "RELEASE s", many(2001)]
    with streaming(database) as stream, database.connect() as conn:
        run(stream, conn, *whole, "/")
        assert len(stream.read.held) == 1
        run(stream, conn, "ROLLBACK", "/")
        assert len(stream.read.held) == stream.read.held.unknown_aborts == 0
        stream.leave()
        run(stream, conn, *whole, "ROLLBACK", "INSERT INTO b VALUES (1, 1)")
        stream.begin()
        found = check(stream)
    assert [len(transaction.changes) for transaction in found.transactions] == [1]
    assert (found.held.unknown_aborts > 0) == (database.server.version >= NEVER_STREAMED_SINCE)


@pytest.mark.parametrize("immediate", [False, True], ids=["full", "immediate"])
def test_structure_within(database: Database, immediate: bool) -> None:
    """Columns that come and go with a savepoint, of tables that others write meanwhile and afterwards."""
    with streaming(database, immediate=immediate) as stream, ExitStack() as stack:
        conn, other = (stack.enter_context(database.connect()) for _ in range(2))
        run(stream, conn, "INSERT INTO a VALUES (-1, 'before')", "INSERT INTO b VALUES (-1, 0)", "BEGIN", many(1), "/",
            "ALTER TABLE a ADD w int", many(1001), "/", "SAVEPOINT s", "ALTER TABLE a ADD x int DEFAULT 7",
            many(2001), "/")  # fmt: skip
        run(stream, other, "INSERT INTO b VALUES (1, 1)")
        run(stream, conn, "ROLLBACK TO s", many(3001), "/", "SAVEPOINT t", "ALTER TABLE b ADD y text",
            "INSERT INTO b VALUES (2, 2, 'y')", "/", "RELEASE t", "TRUNCATE b, c", "INSERT INTO c VALUES (1, 'ok')",
            "ALTER TABLE toast RENAME n TO m", "INSERT INTO toast VALUES (1, 1, '')", "COMMIT")  # fmt: skip
        run(stream, other, "INSERT INTO a VALUES (-2, 'behind it', 2)", "INSERT INTO b VALUES (3, 3, 'z')",
            "INSERT INTO toast VALUES (2, 2, '')")  # fmt: skip
        run(stream, conn, "BEGIN", "ALTER TABLE a DROP v", "INSERT INTO a SELECT g FROM generate_series(7001, 8000) g",
            "/", "ROLLBACK")  # fmt: skip
        run(stream, other, "INSERT INTO a VALUES (-3, 'and on', 3)")
        found = check(stream)
    relations = {change.relations[0] for t in found.transactions for change in t.changes if change.payload[:1] == b"I"}
    assert len([relation for relation in relations if b"\0a\0" in relation]) == 2
    assert {"T", "Y"} <= found.seen


def test_large_values_and_identities(database: Database) -> None:
    """Values out of line, which come in parts; old rows, whole and as keys; rows of one WAL record."""
    big = "(SELECT string_agg(md5((id * 1000 + g)::text), '') FROM generate_series(1, 300) g)"
    with streaming(database) as stream, database.connect() as conn:
        run(stream, conn, "BEGIN", f"INSERT INTO toast SELECT id, 0, {big} FROM generate_series(1, 40) id", "/",
            "INSERT INTO bag SELECT g % 5, repeat('v', 300) FROM generate_series(1, 400) g", "SAVEPOINT s",
            "UPDATE toast SET n = n + 1", "UPDATE toast SET id = -id WHERE id < 9", "/", "UPDATE bag SET id = id + 1",
            f"UPDATE toast SET v = {big} WHERE id > 30", "/", "DELETE FROM bag WHERE id = 3", "RELEASE s")  # fmt: skip
        with conn.cursor().copy("COPY a FROM STDIN") as copy:
            for number in range(1500):
                copy.write_row((number, "copied"))
        run(stream, conn, "/", "COMMIT")
        found = check(stream)
    kinds = {change.payload[:1] + change.payload[5:6] for change in found.transactions[0].changes}
    assert kinds == {b"IN", b"UN", b"UK", b"UO", b"DO"}


def test_messages(database: Database) -> None:
    """In their transaction's place, and where they stand. One that may have been rolled back is told to be unsure."""
    emit = "SELECT pg_logical_emit_message({}, 'prefix', '{}')"
    with streaming(database) as stream, database.connect() as conn:
        run(stream, conn, emit.format(False, "first"), emit.format(True, "alone"), "BEGIN", many(1),
            emit.format(True, "top"), "SAVEPOINT s", emit.format(True, "kept"), many(1001), emit.format(False, "loose"),
            "/", "RELEASE s", emit.format(True, "last"), "COMMIT", "/")  # fmt: skip
        found = check(stream)
        assert len(found.loose) == 2
        assert found.ambiguous == set()
        assert sum(change.payload[:1] == b"M" for t in found.transactions for change in t.changes) == 4
        run(stream, conn, "BEGIN", many(5001), "SAVEPOINT s", emit.format(True, "gone"), many(6001), "/",
            "ROLLBACK TO s", emit.format(True, "kept"), many(7001), "/", "COMMIT")  # fmt: skip
        found, expected = stream.catch_up(), stream.whole()
    streamed, whole = found.transactions[-1], expected.transactions[-1]
    assert found.ambiguous == {streamed.xid}
    lost = [change for change in streamed.changes if change not in whole.changes]
    assert [change.payload[-4:] for change in lost] == [b"gone"]
    assert [change for change in streamed.changes if change not in lost] == list(whole.changes)


def test_what_is_unsure_comes_again_by_version_1(database: Database) -> None:
    """From the boundary in front of it, where nothing was confirmed: what committed before does not come again, what is
    still open comes whole."""
    emit = "SELECT pg_logical_emit_message(true, 'prefix', '{}')"
    with streaming(database) as stream, database.connect() as conn, database.connect() as other:
        run(stream, conn, "BEGIN", many(1), "SAVEPOINT s", emit.format("gone"), many(1001), "/", "ROLLBACK TO s",
            emit.format("kept"))  # fmt: skip
        run(stream, other, "INSERT INTO b VALUES (1, 1)", "BEGIN", many(5001), "/")
        run(stream, conn, "COMMIT", "/")
        unsure = stream.read.transactions[-1]
        assert stream.read.ambiguous == {unsure.xid}
        stream.close()
        stream.begin(FIRST_VERSION, unsure.commit_lsn)
        run(stream, other, "COMMIT")
        found, expected = stream.catch_up(), stream.whole()
    assert found.transactions == expected.transactions[1:]
    assert [len(transaction.changes) for transaction in found.transactions] == [401, 400]


def test_origins(database: Database) -> None:
    name = f"o_{database.name}"
    with streaming(database) as stream, database.connect() as conn:
        conn.execute("SELECT pg_replication_origin_create(%s)", [name])
        conn.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
        setup = "SELECT pg_replication_origin_xact_setup('0/AAAA', '2020-01-01 00:00:01+00')"
        run(stream, conn, "BEGIN", setup, many(1), "/", "SAVEPOINT s", many(1001), "/", "ROLLBACK TO s", many(2001),
            "COMMIT", "SELECT pg_replication_origin_session_reset()", many(3001))  # fmt: skip
        found = check(stream)
        conn.execute("SELECT pg_replication_origin_drop(%s)", [name])
    assert [transaction.origin for transaction in found.transactions] == [name, None]


def test_prepared_ones_come_at_their_commit(database: Database) -> None:
    """Without two_phase, though their content was streamed before."""
    gid = f"g_{database.name}"
    with streaming(database) as stream, database.connect() as conn:
        for first, end in ((1, "COMMIT"), (5001, "ROLLBACK")):
            run(stream, conn, "BEGIN", many(first), "SAVEPOINT s", "INSERT INTO b VALUES (1, 1)", "/", "ROLLBACK TO s",
                f"PREPARE TRANSACTION '{gid}'", "/", f"{end} PREPARED '{gid}'")  # fmt: skip
        found = check(stream)
    assert [len(transaction.changes) for transaction in found.transactions] == [400]


@pytest.mark.versions(15, 18, long=(16, 17))
def test_two_phase(database: Database) -> None:
    """Content at PREPARE, under a gid that is used again, streamed and whole; it belongs where it commits."""
    gid = f"g_{database.name}"
    with streaming(database, two_phase=True) as stream, ExitStack() as stack:
        conn, other = (stack.enter_context(database.connect()) for _ in range(2))
        for number, end in enumerate(["COMMIT", "ROLLBACK", "COMMIT"]):
            run(stream, conn, "BEGIN", many(1 + 5000 * number), "SAVEPOINT s", "INSERT INTO b VALUES (1, 1)",
                many(1001 + 5000 * number), "/", "ROLLBACK TO s", f"PREPARE TRANSACTION '{gid}'", "/")  # fmt: skip
            assert [pending.key.gid for pending in stream.read.prepared] == [gid]
            run(stream, other, f"INSERT INTO b VALUES ({number + 10}, 1)")
            run(stream, conn, f"{end} PREPARED '{gid}'", "BEGIN", f"INSERT INTO c VALUES ({number}, 'ok')",
                f"PREPARE TRANSACTION '{gid}'", "/", f"{end} PREPARED '{gid}'", "/")  # fmt: skip
        found = check(stream)
    assert {"p", "b", "P", "K", "r", "S", "A"} <= found.seen
    assert "c" not in found.seen
    assert [len(transaction.changes) for transaction in found.transactions] == [1, 400, 1, 1, 1, 400, 1]


def test_a_reconnect_brings_it_again_from_its_start(database: Database) -> None:
    """Confirmed or not, and cut in whatever way: nothing that came on the connection before it counts."""
    with streaming(database) as stream, database.connect() as conn:
        run(stream, conn, "BEGIN", many(1), "SAVEPOINT s", many(1001), "/", "ROLLBACK TO s", many(2001), "/")
        assert len(stream.read.held) == 1
        stream.leave()
        stream.begin()
        run(stream, conn, many(3001), "/", "COMMIT")
        found = check(stream)
    assert [len(transaction.changes) for transaction in found.transactions] == [1200]


TABLES = ("a", "b", "bag", "toast")


class Sessions:
    """Steps of several sessions at random. No two write the same rows, and a table is altered by one of them alone."""

    def __init__(self, database: Database, stream: Stream, connections: list[psycopg.Connection], seed: int) -> None:
        self._stream = stream
        self._connections = connections
        self._random = random.Random(seed)
        self._depth = [-1] * len(connections)
        """Savepoints that are open; -1 outside of a transaction."""
        self._next = 0
        for number in range(len(connections)):
            connections[0].execute(f"CREATE TABLE own{number} (id int PRIMARY KEY, v text)".encode())
            connections[0].execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE own{number}".encode())

    def step(self) -> None:
        number = self._random.randrange(len(self._connections))
        conn, depth = self._connections[number], self._depth[number]
        if depth < 0:
            if self._random.random() < 0.3:
                conn.execute(self._write(number, 5).encode())
            else:
                conn.execute("BEGIN")
                self._depth[number] = 0
            return
        chosen = self._random.random()
        if chosen < 0.55:
            conn.execute(self._write(number, self._random.choice([1, 20, 400])).encode())
        elif chosen < 0.70 and depth < 4:
            self._depth[number] += 1
            conn.execute(f"SAVEPOINT s{self._depth[number]}".encode())
        elif chosen < 0.76 and depth:
            conn.execute(f"RELEASE s{depth}".encode())
            self._depth[number] -= 1
        elif chosen < 0.86 and depth:
            back = self._random.randint(1, depth)
            conn.execute(f"ROLLBACK TO s{back}".encode())
            self._depth[number] = back
        elif chosen < 0.92:
            self._stream.catch_up()
        elif chosen < 0.99:
            self.end(number, "ROLLBACK" if chosen > 0.97 else "COMMIT")

    def finish(self) -> None:
        for number in range(len(self._connections)):
            self.end(number, "COMMIT")

    def end(self, number: int, how: str) -> None:
        if self._depth[number] >= 0:
            self._connections[number].execute(how.encode())
            self._depth[number] = -1

    def _write(self, number: int, count: int) -> str:
        first, self._next = self._next + 1, self._next + count
        rows = f"generate_series({first}, {self._next}) g"
        own = f"own{number}"
        return self._random.choice([
            f"INSERT INTO a SELECT g, repeat('x', 200) FROM {rows}",
            f"INSERT INTO b SELECT g, g FROM {rows}",
            f"INSERT INTO bag SELECT g, repeat('y', 200) FROM {rows}",
            f"INSERT INTO toast SELECT g, g, repeat(md5(g::text), 100) FROM {rows}",
            f"INSERT INTO {own} SELECT g, repeat('z', 200) FROM {rows}",
            f"INSERT INTO {own} SELECT g, repeat('z', 200) FROM {rows}; UPDATE {own} SET v = 'u' WHERE id % 7 = 0",
            f"DELETE FROM {own} WHERE id % 5 = {first % 5}",
            f"TRUNCATE {own}",
            f"ALTER TABLE {own} ADD c{first} int",
        ])  # fmt: skip


def test_what_cannot_be_decoded_in_progress_can_be_whole(database: Database) -> None:
    """All versions fail at some transactions with a savepoint that changed the catalog and was rolled back: they look
    for a table as it was in it. They do so after each connect. By version 1 the same transaction comes.
    """
    own = "INSERT INTO own (id, v) SELECT g, repeat('x', 200) FROM generate_series({0} + 1, {0} + 400) g"
    with database.connect() as conn:
        conn.execute(f"CREATE TABLE own (id int PRIMARY KEY, v text); ALTER PUBLICATION {PUBLICATION} ADD TABLE own")
        with streaming(database) as stream:
            run(stream, conn, "BEGIN", "SAVEPOINT s", "TRUNCATE own", own.format(1000), "ROLLBACK TO s",
                own.format(2000), "ALTER TABLE own ADD w int", own.format(3000))  # fmt: skip
            for _ in range(2):
                with pytest.raises(SourceFailed, match="could not map"):
                    stream.catch_up()
                stream.begin()
            conn.execute("COMMIT")
            found = stream.whole()
    assert [len(transaction.changes) for transaction in found.transactions] == [800]


@pytest.mark.versions(14, 15, 16, 17, 18)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))], ids=lambda seed: f"seed{seed}"
)
def test_sessions_at_random(database: Database, seed: int) -> None:
    with streaming(database, immediate=seed % 2 == 0) as stream, ExitStack() as stack:
        connections = [stack.enter_context(database.connect()) for _ in range(3)]
        sessions = Sessions(database, stream, connections, seed)
        try:
            for _ in range(150 if seed == 1 else 600):
                sessions.step()
            sessions.finish()
            found = check(stream)
        except SourceFailed as error:
            # The server knows no further: see above. Nothing that it sent is wrong.
            if seed == 1 or not re.search("could not map|could not open relation|catalog is missing", str(error)):
                raise
            sessions.finish()
            sent, whole = stream.read.transactions, stream.whole().transactions
            assert sent == whole[: len(sent)]
            return
    assert {"S", "c"} <= found.seen


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_each_version_takes_what_it_is_asked_for(database: Database) -> None:
    """And, before 16, nothing more: its errors would end each start."""
    version = database.server.version
    asked = [PluginOptions.of(version, streaming=True), PluginOptions.of(version, origins=Origins.NONE)]
    asked += [PluginOptions.of(version, streaming=True, two_phase=True)] if version > 14 else []
    for options in asked:
        _start(database, options)
    if version < IMMEDIATE_SINCE:
        for options in (PluginOptions.of(16, streaming=True), PluginOptions.of(16, origins=Origins.NONE)):
            with pytest.raises(SourceFailed):
                _start(database, options)


def _start(database: Database, options: PluginOptions) -> None:
    """With a slot of its own: one of a session that was just left may be there for a moment yet."""
    with ReplicationConnection.open(database.conninfo) as walsender:
        slot = walsender.create_slot(f"t_{database.name}_{secrets.token_hex(4)}", temporary=True)
        walsender.start(slot.name, slot.consistent_point, [PUBLICATION], options)
        walsender.end_stream()
