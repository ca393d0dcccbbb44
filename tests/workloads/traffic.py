"""Visitors of an application: several concurrent sessions, each with random requests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import psycopg
from psycopg import errors

from tests.fix_postgres import Database
from tests.workloads.application import Application, Request, RolledBack, Session

LONGEST_SECONDS = 30
"""The time limit of a statement. Conflicts within the application are shorter, so a slower statement means that pgcdc
blocked the source."""
EXPECTED = (
    errors.IntegrityError, errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable,
    # Errors between a migration and the deployment of the new code, or of a statement that was prepared before the
    # migration.
    errors.UndefinedColumn, errors.UndefinedTable, errors.FeatureNotSupported,
)  # fmt: skip
"""Errors that end only the request, not the application: the framework rolls back and shows an error page."""


class Traffic:
    """``burst()`` runs some requests in every session, at the same time as the caller's block."""

    def __init__(self, database: Database, application: Application, seed: int, sessions: int) -> None:
        self._database = database
        self._requests = list(application.requests)
        self._weights = list(application.requests.values())
        self._sessions = [Session(self._connected(), Random(f"{application.name} {seed} {n}")) for n in range(sessions)]

    @contextmanager
    def burst(self, requests: int) -> Iterator[None]:
        """Runs ``requests`` requests in every session. At the end of the block, waits for all requests. Raises
        unexpected errors."""
        failures: list[BaseException] = []

        def work(session: Session) -> None:
            try:
                self._work(session, requests)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(session,)) for session in self._sessions]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def one(self, request: Request) -> None:
        serve(self._sessions[0], request)

    @property
    def done(self) -> Counter[str]:
        """How often each request was completed."""
        return Counter({name: count for session in self._sessions for name, count in session.done.items()})

    @property
    def longest(self) -> tuple[float, str]:
        return max(session.longest for session in self._sessions)

    def close(self) -> None:
        for session in self._sessions:
            session.conn.close()

    def _work(self, session: Session, requests: int) -> None:
        chosen: Sequence[Request] = session.random.choices(self._requests, self._weights, k=requests)
        for request in chosen:
            serve(session, request)

    def _connected(self) -> psycopg.Connection[object]:
        conn = self._database.connect(options=f"-c statement_timeout={LONGEST_SECONDS}s -c deadlock_timeout=100ms")
        conn.prepare_threshold = 2
        return conn


def serve(session: Session, request: Request) -> None:
    """Runs one request in one transaction, and rolls it back if it fails."""
    started = time.monotonic()
    try:
        with session.conn.transaction():
            request(session)
    except (RolledBack, *EXPECTED):
        return
    finally:
        session.longest = max(session.longest, (time.monotonic() - started, request.__name__))
    session.done[request.__name__] = session.done.get(request.__name__, 0) + 1
