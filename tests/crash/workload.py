"""Concurrent writers that survive the source's crashes, and the random transactions that they run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

Script = Sequence[str]
"""Statements in order. A statement that fails ends the script and rolls back its transaction."""
Draw = Callable[[random.Random], Script]

_IDS = 400
"""Few keys, so that transactions conflict: they wait for each other, deadlock, and delete each other's rows."""
_KEY_STEP = 100_000


def _id(chance: random.Random) -> int:
    return chance.randrange(_IDS)


def small(chance: random.Random) -> Script:
    """A script that inserts, updates and deletes rows of several tables."""
    at = _id(chance)
    return chance.sample(
        [
            f"INSERT INTO a VALUES ({at}, 'new {chance.random()}') ON CONFLICT (id) DO UPDATE SET v = excluded.v",
            f"INSERT INTO a SELECT g, 'many' FROM generate_series({at}, {at + 5}) g ON CONFLICT (id) DO NOTHING",
            f"INSERT INTO b VALUES ({at}, {chance.randrange(9999)} / 100.0) ON CONFLICT (id) DO UPDATE SET n = b.n + 1",
            f"INSERT INTO c VALUES ({at % 20}, 'copy'), ({at % 20}, 'copy'), ({at % 20}, NULL)",
            f"UPDATE a SET v = v || '.' WHERE id BETWEEN {at} AND {at + 3}",
            f"UPDATE c SET v = 'set' WHERE k = {at % 20}",
            f"DELETE FROM b WHERE id BETWEEN {at} AND {at + 2}",
            f"DELETE FROM c WHERE k = {at % 20}",
        ],
        chance.randint(1, 4),
    )


def in_transaction(body: Draw) -> Draw:
    """A script with a transaction that has subtransactions. Some subtransactions are rolled back, and sometimes the
    whole transaction."""

    def draw(chance: random.Random) -> Script:
        inner: list[str] = []
        for number in range(chance.randint(1, 3)):
            end = chance.choice(["ROLLBACK TO", "RELEASE"])
            inner += [f"SAVEPOINT s{number}", *body(chance), f"{end} s{number}"]
        end = chance.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"])
        return ["BEGIN", *body(chance), *inner, *body(chance), end]

    return draw


def prepared(body: Draw) -> Draw:
    """A script with a prepared transaction that ends after other transactions."""

    def draw(chance: random.Random) -> Script:
        gid = f"g{chance.getrandbits(64):x}"
        end = chance.choice(["COMMIT", "COMMIT", "ROLLBACK"])
        return ["BEGIN", *body(chance), f"PREPARE TRANSACTION '{gid}'", *body(chance), f"{end} PREPARED '{gid}'"]

    return draw


def key_change(chance: random.Random) -> Script:
    at = _id(chance)
    if chance.random() < 0.5:
        return [f"UPDATE a SET id = id + {_KEY_STEP} WHERE id = {at}"]
    swapped = f"UPDATE a SET id = CASE id WHEN -{at} THEN {at + 1} ELSE {at} END WHERE id IN (-{at}, -{at + 1})"
    return ["BEGIN", f"UPDATE a SET id = -id WHERE id IN ({at}, {at + 1}) AND id > 0", swapped, "COMMIT"]


def truncate(chance: random.Random) -> Script:
    emptied = chance.choice(["a", "b", "c", "a, b", "a, b, c RESTART IDENTITY CASCADE"])
    at = _id(chance)
    return ["BEGIN", f"INSERT INTO a VALUES ({at}, 'before') ON CONFLICT (id) DO NOTHING", f"TRUNCATE {emptied}",
            f"INSERT INTO a VALUES ({at}, 'after') ON CONFLICT (id) DO NOTHING", "COMMIT"]  # fmt: skip


def foreign(chance: random.Random) -> Script:
    """A script whose WAL has no published change: an unpublished table, an empty transaction, or a transaction that is
    rolled back."""
    return chance.choice(
        [
            ["INSERT INTO foreign_table SELECT g, repeat('x', 200) FROM generate_series(1, 300) g"],
            ["SELECT pg_current_xact_id()"],
            ["BEGIN", "INSERT INTO a SELECT g, 'never' FROM generate_series(5000, 5400) g", "ROLLBACK"],
        ]
    )


def message(chance: random.Random) -> Script:
    transactional = chance.choice(["true", "false"])
    emitted = f"SELECT pg_logical_emit_message({transactional}, 'test', 'm{_id(chance)}')"
    return ["BEGIN", *small(chance), emitted, "COMMIT"]


def large(chance: random.Random) -> Script:
    """A script with a transaction larger than the receiver's memory limit, so that the receiver spills it to disk. Its
    WAL is small, because the values compress well."""
    rows = chance.randint(2200, 3000)
    return [f"INSERT INTO big (payload) SELECT repeat(md5(g::text), 280) FROM generate_series(1, {rows}) g"]


RECEIVER_WORK: Sequence[tuple[Draw, int]] = (
    (small, 8), (in_transaction(small), 8), (prepared(small), 2), (key_change, 3), (truncate, 1), (foreign, 3),
    (message, 2),
)  # fmt: skip


@dataclass
class Writers:
    """Threads that run random scripts during the block of ``writing``."""

    conninfo: str
    work: Sequence[tuple[Draw, int]]
    chance: random.Random
    threads: int = 3
    most_pause: float = 0.03
    """Seconds between statements, at most."""
    asked: list[Draw] = field(default_factory=list)
    """Scripts that the next free writer runs instead of a random script."""
    done: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._stop.clear()
        seeds = [self.chance.getrandbits(64) for _ in range(self.threads)]
        threads = [threading.Thread(target=self._write, args=(random.Random(seed),), daemon=True) for seed in seeds]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a writer hangs"
        settle(self.conninfo)

    def _write(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            # The source may be down. The writer then connects again.
            with suppress(psycopg.OperationalError), psycopg.connect(self.conninfo, autocommit=True) as conn:
                # The timeout also ends a wait for a prepared transaction, which PostgreSQL does not detect as a
                # deadlock.
                conn.execute("SET lock_timeout = '300ms'")
                settle(self.conninfo)
                while not self._stop.is_set():
                    self._one(conn, chance)
            self._stop.wait(0.05)

    def _one(self, conn: psycopg.Connection, chance: random.Random) -> None:
        try:
            draw = self.asked.pop()
        except IndexError:
            (draw,) = chance.choices([draw for draw, _ in self.work], [weight for _, weight in self.work])
        script = draw(chance)
        try:
            for statement in script:
                conn.execute(statement.encode())
                self._stop.wait(chance.uniform(0, self.most_pause))
            self.done += 1
        except psycopg.Error:
            # The script's statement failed, for example because of a deadlock or a duplicate key. If the cause was a
            # lost connection, this ROLLBACK fails, too.
            conn.execute("ROLLBACK")
            if "PREPARED" in script[-1]:
                with suppress(psycopg.errors.UndefinedObject):
                    conn.execute(script[-1].encode())


def settle(conninfo: str) -> None:
    """End the prepared transactions that a crash left, because no writer will end them."""
    with psycopg.connect(conninfo, autocommit=True) as conn:
        left = conn.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
        for number, (gid,) in enumerate(sorted(left)):
            end = "COMMIT PREPARED {}" if number % 2 else "ROLLBACK PREPARED {}"
            # Another writer may be ending the same transaction.
            with suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState):
                conn.execute(sql.SQL(end).format(sql.Literal(gid)))
