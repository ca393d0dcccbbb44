"""Writes to the sample shop as its customers would: concurrent transactions at a given rate."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import psycopg

from pgcdc_assets.demo.shop import WEIGHTS, Conn, Shop

_CONNECTIONS = 4
_ROLLED_BACK = 0.05
"""The share of transactions that the generator rolls back on purpose."""
_LARGE_AFTER, _LARGE_EVERY, _LARGE_ROWS = 3.0, 60.0, 20_000
_TRUNCATE_AFTER, _TRUNCATE_EVERY = 5.0, 15.0
"""Seconds before the first TRUNCATE, and between two of them. They are short, so that even a short demo contains a
TRUNCATE."""
_TRUNCATE_OFTEN, _TRUNCATE_LATER = 60.0, 60.0
"""Seconds after which TRUNCATE becomes rare, and seconds between two of them after that. A copy or a comparison of the
table starts again after each TRUNCATE. On a slow machine, this takes longer than _TRUNCATE_EVERY, so it would never end
if TRUNCATE stayed frequent."""

_LOSSES = (
    psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable, psycopg.errors.UniqueViolation,
    psycopg.errors.ForeignKeyViolation, psycopg.errors.SerializationFailure,
)  # fmt: skip
"""Errors that concurrent writers cause for each other. The session rolls back and begins its next transaction."""


class Generator:
    """Runs ``rate`` transactions per second, in a few sessions, until it is stopped. Each session has its own random
    numbers with a fixed seed. So two runs do similar things, but in a different order, because the order depends on how
    the sessions interleave."""

    def __init__(self, conninfo: str, rate: float) -> None:
        if rate <= 0:
            raise ValueError("rate must be positive")
        self._conninfo = conninfo
        self._rate = rate
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.transactions = 0
        """Committed transactions."""

    def stop(self) -> None:
        """Makes :meth:`run` return after the transactions in progress. May be called from any thread."""
        self._stop.set()

    def run(self) -> None:
        """Writes to the shop until :meth:`stop` is called or a session fails. Raises the first error of a session."""
        sessions = [
            threading.Thread(target=self._session, args=(number,), name=f"shop-{number}", daemon=True)
            for number in range(_CONNECTIONS)
        ]
        for session in sessions:
            session.start()
        self._stop.wait()
        for session in sessions:
            session.join()
        if self._error is not None:
            raise self._error

    def _session(self, number: int) -> None:
        try:
            with psycopg.connect(
                self._conninfo, application_name=f"shop-{number}", autocommit=True,
                # TRUNCATE must not wait long for its lock, because all other sessions would queue behind it.
                options="-c lock_timeout=500ms -c search_path=public",
            ) as conn:  # fmt: skip
                self._work(conn, random.Random(f"1:{number}"), number)
        except BaseException as error:  # noqa: BLE001 (raised again by run)
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _work(self, conn: Conn, rng: random.Random, number: int) -> None:
        shop = Shop(rng)
        weights = [weight for weight, _ in WEIGHTS]
        started = due = time.monotonic()
        large, truncate = started + _LARGE_AFTER, started + _TRUNCATE_AFTER
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += rng.expovariate(self._rate / _CONNECTIONS)
            now = time.monotonic()
            if number == 0 and now > large:
                large = now + _LARGE_EVERY
                self._transaction(conn, rng, partial(shop.import_events, rows=_LARGE_ROWS), keep=True)
            elif number == _CONNECTIONS - 1 and now > truncate:
                truncate = now + (_TRUNCATE_EVERY if now < started + _TRUNCATE_OFTEN else _TRUNCATE_LATER)
                self._transaction(conn, rng, shop.empty_carts, keep=True)
            else:
                action = rng.choices(WEIGHTS, weights)[0][1]
                self._transaction(conn, rng, partial(action, shop))

    def _transaction(self, conn: Conn, rng: random.Random, work: Callable[[Conn], None], *, keep: bool = False) -> None:
        committed = False
        try:
            with conn.transaction() as scope:
                work(conn)
                if not keep and rng.random() < _ROLLED_BACK:
                    raise psycopg.Rollback(scope)
                committed = True
        except _LOSSES:
            committed = False
        with self._lock:
            self.transactions += committed
