"""Limits how long the source may send nothing, and checks whether the source is still working.

A pooler, a load balancer or a tunnel may stop forwarding bytes although its TCP connections stay alive. TCP keepalives
do not notice this. So each wait for the server counts the seconds in which nothing arrives, like PostgreSQL's own
receiver (wal_receiver_timeout). During a stream, we ask the server for a reply. During a query we cannot ask, so
another connection checks whether the query's session is active. While it is active, for example because it waits for a
lock, we keep waiting, and the wait is logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo

from pgcdc_assets.errors import SourceUnavailable

TELL_SECONDS: Final = 10.0
"""Seconds between two reports of the same wait."""
CHECK_SECONDS: Final = 5
"""Time limit in seconds for the connection of a check, and again for its query. A live server answers at once."""

_CHECK: Final = """
SELECT a.state = 'active' AND coalesce(a.wait_event_type, '') NOT IN ('Client', 'Activity'), a.wait_event_type,
       ARRAY(SELECT 'pid ' || b.pid || coalesce(' (' || nullif(b.application_name, '') || ')', '')
             FROM pg_catalog.pg_stat_activity b
             WHERE a.wait_event_type = 'Lock' AND b.pid = ANY(pg_catalog.pg_blocking_pids(a.pid)) ORDER BY b.pid)
FROM pg_catalog.pg_stat_activity a WHERE a.pid = %s AND a.application_name = %s
"""
_REFUSES: Final = "FATAL:"
"""Part of libpq's text if the server itself, and not the network, refused the connection of a check."""


@dataclass(frozen=True)
class Patience:
    """Limits, in seconds without any bytes from the server. After ``ask`` seconds, and then every ``again`` seconds, we
    check whether the server still works for us. After ``silent`` seconds, the connection is treated as lost."""

    ask: float
    silent: float
    again: float = TELL_SECONDS


FOR_STREAMS: Final = Patience(30, 60)
"""We ask the server for a reply after half of wal_receiver_timeout's default, and treat the connection as lost after
the whole default. An idle walsender answers a request at once."""
FOR_QUERIES: Final = Patience(10, 60)


class Silence:
    """Counts the seconds in which the caller listened and nothing arrived. Seconds in which the caller was busy do not
    count.

    After ``patience.ask`` seconds, calls ``at_work``, which returns whether the server is working for us. If it is, the
    count begins again. If the function ``ask`` is given, which requests a reply from the server, it is called first.
    ``at_work`` is then called only if no reply has arrived at the next check.
    """

    _LONGEST = 1.0
    """The most seconds that are counted between two calls of :meth:`listened`. If more time has passed, the caller was
    busy."""

    def __init__(
        self, patience: Patience, endpoint: str, at_work: Callable[[], bool], ask: Callable[[], None] | None = None
    ) -> None:
        self._patience = patience
        self._endpoint = endpoint
        self._at_work = at_work
        self._ask = ask
        self._asked = False
        self.heard()

    def heard(self) -> None:
        """Resets the count. Call it when bytes have arrived."""
        self._seconds, self._due, self._asked = 0.0, self._patience.ask, False
        self._at = time.monotonic()

    def listened(self) -> None:
        """Adds the time since the last call to the count. Call it when nothing has arrived. Raises SourceUnavailable
        after ``patience.silent`` seconds."""
        now = time.monotonic()
        self._seconds += min(now - self._at, self._LONGEST)
        self._at = now
        if self._seconds >= self._patience.silent:
            raise SourceUnavailable(
                f"has sent nothing for {self._patience.silent:g} s: the server or the network does not respond",
                thing=self._endpoint, do="run the command again: it continues where it stopped",
            )  # fmt: skip
        if self._seconds >= self._due:
            at_work = self._check()
            spent, self._at = time.monotonic() - now, time.monotonic()
            # If the server is working, the count starts again from zero.
            self._seconds = 0.0 if at_work else self._seconds + spent
            self._due = self._seconds + self._patience.again

    def _check(self) -> bool:
        if self._ask is None:
            return self._at_work()
        self._ask()
        asked, self._asked = self._asked, True
        return asked and self._at_work()


class _Observer(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose queries have a time limit."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, CHECK_SECONDS)


@dataclass(frozen=True)
class Session:
    """What another connection needs to check what a session of ours does on the server."""

    conninfo: str = field(repr=False)
    """The conninfo, which may contain a password."""
    pid: int
    application_name: str

    def work(self) -> str | None:
        """Describes what the session does, as the end of the sentence "pgcdc's session ...". None if the session is
        idle, or if the server cannot be reached."""
        try:
            conninfo = make_conninfo(self.conninfo, connect_timeout=CHECK_SECONDS, replication="false")
            with _Observer.connect(conninfo, autocommit=True) as conn:
                row = conn.execute(_CHECK, [self.pid, self.application_name]).fetchone()
        except psycopg.Error as error:
            # A server that refuses a connection is alive.
            return "cannot be checked: the server refuses connections" if _REFUSES in str(error) else None
        if row is None or not row[0]:
            return None
        _, kind, blockers = row
        return f"waits for a lock held by {', '.join(blockers)}" if blockers else f"is busy ({kind or 'CPU'})"
