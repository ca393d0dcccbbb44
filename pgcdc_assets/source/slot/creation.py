"""Makes a slot, which waits for the transactions of the whole cluster, and says for whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psycopg

from pgcdc_assets.errors import CopyBlocked, SourceFailed
from pgcdc_assets.source.connect.walsender import CreatedSlot, ReplicationConnection
from pgcdc_assets.source.slot.blockers import Blocker, transactions

logger = logging.getLogger(__name__)

LOCK_SECONDS = 600
"""lock_timeout of slot creation, for each transaction that it waits for. A nightly report may take
minutes; a forgotten session must not hold WAL and dead rows for hours."""
TELL_SECONDS = 10
"""Seconds between two messages that say whom a wait is for."""
_ATTEMPTS = 3
_TOO_LARGE = "snapshot too large"
"""'initial slot snapshot too large': more open subtransactions than a snapshot holds. It passes."""

OnWait = Callable[[list[Blocker]], None]


def create_slot(
    connection: ReplicationConnection, conn: psycopg.Connection[Any], name: str, *, temporary: bool,
    two_phase: bool = False, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None,
) -> CreatedSlot:  # fmt: skip
    """Make a pgoutput slot with its exported snapshot. When time is up, CopyBlocked names who is in the way.

    The slot is always made with a snapshot: on servers before the minors of August 2024 a slot made without one may
    start inside a transaction. While the server waits, ``on_wait`` is called every ten seconds with whom it waits for.
    """
    connection.execute(f"SET lock_timeout = {int(lock_seconds * 1000):d}")
    tell = _Teller(conn, on_wait or log_waiting)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return connection.create_slot(name, temporary=temporary, export=True, two_phase=two_phase, waiting=tell)
        except CopyBlocked:
            names = ", ".join(str(holder) for holder in transactions(conn)) or "a transaction that has just ended"
            raise CopyBlocked(
                f"not made within {lock_seconds:g} s, for it waits for every open transaction: {names}",
                thing=f"slot {name}", do="end these transactions, then run again",
            ) from None  # fmt: skip
        except SourceFailed as error:
            if _TOO_LARGE not in error.what or attempt == _ATTEMPTS:
                raise
            time.sleep(attempt)
    raise AssertionError("unreachable")


class _Teller:
    """Called every half second while the server waits; it asks and reports less often."""

    def __init__(self, conn: psycopg.Connection[Any], on_wait: OnWait) -> None:
        self._conn = conn
        self._on_wait = on_wait
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= TELL_SECONDS:
            self._last = time.monotonic()
            self._on_wait(transactions(self._conn))


def log_waiting(holders: list[Blocker]) -> None:
    logger.warning("the source keeps us waiting: %s", ", ".join(str(holder) for holder in holders) or "nobody named")
