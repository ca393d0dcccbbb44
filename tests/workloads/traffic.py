"""Visitors of an application: several sessions at once, each with requests of its own choice."""

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
"""Of a statement, and more than any conflict of the application with itself takes: the source was blocked."""
EXPECTED = (
    errors.IntegrityError, errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable,
    # Between a migration and the deploy of what needs it; a statement that was prepared before it.
    errors.UndefinedColumn, errors.UndefinedTable, errors.FeatureNotSupported,
)  # fmt: skip
"""What ends a request and no application: the framework answers with an error page, and rolls back."""


class Traffic:
    """``burst()`` has every session do some requests, beside whatever the caller does meanwhile."""

    def __init__(self, database: Database, application: Application, seed: int, sessions: int) -> None:
        self._database = database
        self._requests = list(application.requests)
        self._weights = list(application.requests.values())
        self._sessions = [Session(self._connected(), Random(f"{application.name} {seed} {n}")) for n in range(sessions)]

    @contextmanager
    def burst(self, requests: int) -> Iterator[None]:
        """All are done when this ends; raises what no application expects."""
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
        """How often each request was served to its end."""
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
    """One request in one transaction, which is rolled back where it fails as requests do."""
    started = time.monotonic()
    try:
        with session.conn.transaction():
            request(session)
    except (RolledBack, *EXPECTED):
        return
    finally:
        session.longest = max(session.longest, (time.monotonic() - started, request.__name__))
    session.done[request.__name__] = session.done.get(request.__name__, 0) + 1
