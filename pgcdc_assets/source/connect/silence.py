"""Limits how long the source may say nothing, and finds out whether it is still at work.

A path can be dead and keep its TCP connections alive: a pooler, a load balancer or a tunnel that passes no more bytes
on. Then no error ever comes, and TCP's keepalives notice nothing. So whoever waits for the server counts how long
nothing has come, as PostgreSQL's own receiver does (wal_receiver_timeout). A stream can be asked for a reply. A query
cannot: another connection looks whether its session is at work, so that a wait for a lock may last, and is reported.
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
"""Seconds between two messages that say whom a wait is for."""
LOOK_SECONDS: Final = 5
"""Time limit for the connection of a look, and again for its query. A live server answers at once."""

_LOOK: Final = """
SELECT a.state = 'active' AND coalesce(a.wait_event_type, '') NOT IN ('Client', 'Activity'), a.wait_event_type,
       ARRAY(SELECT 'pid ' || b.pid || coalesce(' (' || nullif(b.application_name, '') || ')', '')
             FROM pg_catalog.pg_stat_activity b
             WHERE a.wait_event_type = 'Lock' AND b.pid = ANY(pg_catalog.pg_blocking_pids(a.pid)) ORDER BY b.pid)
FROM pg_catalog.pg_stat_activity a WHERE a.pid = %s AND a.application_name = %s
"""
_REFUSES: Final = "FATAL:"
"""Part of libpq's text if a server has answered that it takes no further connection."""


@dataclass(frozen=True)
class Patience:
    """Seconds of silence after which the server is asked, and after which it counts as gone; and seconds between two
    asks."""

    ask: float
    silent: float
    again: float = TELL_SECONDS


FOR_STREAMS: Final = Patience(30, 60)
"""Half of wal_receiver_timeout's default, and all of it. A walsender that has nothing to send answers a request at
once."""
FOR_QUERIES: Final = Patience(10, 60)


class Silence:
    """Counts the seconds in which nothing came while the caller listened. Time in which the caller was busy or stopped
    does not count.

    From ``patience.ask`` seconds on ``at_work`` is called, which returns whether the server is seen to be at work. If
    the server can be asked, ``ask`` is called first, and ``at_work`` only if no answer has come by the next time.
    """

    _LONGEST = 1.0
    """Seconds that may lie between two calls of :meth:`listened`; time beyond that was not spent listening."""

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
        """Say that something came."""
        self._seconds, self._due, self._asked = 0.0, self._patience.ask, False
        self._at = time.monotonic()

    def listened(self) -> None:
        """Say that nothing has come since the last call. Raises SourceUnavailable when that has lasted too long."""
        now = time.monotonic()
        self._seconds += min(now - self._at, self._LONGEST)
        self._at = now
        if self._seconds >= self._patience.silent:
            raise SourceUnavailable(
                f"has said nothing for {self._patience.silent:g} s: the server or the way to it hangs",
                thing=self._endpoint, do="run again; it goes on from what is durable",
            )  # fmt: skip
        if self._seconds >= self._due:
            at_work = self._look()
            spent, self._at = time.monotonic() - now, time.monotonic()
            # A server that is at work gets its whole patience again.
            self._seconds = 0.0 if at_work else self._seconds + spent
            self._due = self._seconds + self._patience.again

    def _look(self) -> bool:
        if self._ask is None:
            return self._at_work()
        self._ask()
        asked, self._asked = self._asked, True
        return asked and self._at_work()


class _Observer(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose queries have a time limit, so that it is closed soon whatever happens."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, LOOK_SECONDS)


@dataclass(frozen=True)
class Session:
    """A session of ours on the server, as another connection sees it."""

    conninfo: str = field(repr=False)
    """The conninfo of the session; with the password, if it holds one."""
    pid: int
    application_name: str

    def work(self) -> str | None:
        """What the session is working on, in words; None if it is idle, or nobody can be asked."""
        try:
            conninfo = make_conninfo(self.conninfo, connect_timeout=LOOK_SECONDS, replication="false")
            with _Observer.connect(conninfo, autocommit=True) as conn:
                row = conn.execute(_LOOK, [self.pid, self.application_name]).fetchone()
        except psycopg.Error as error:
            # A server that has no free connection for us is alive.
            return "to a server that refuses to be asked" if _REFUSES in str(error) else None
        if row is None or not row[0]:
            return None
        _, kind, blockers = row
        return f"which waits for a lock of {', '.join(blockers)}" if blockers else f"which is at work ({kind or 'CPU'})"
