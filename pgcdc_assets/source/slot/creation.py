"""Creates a slot. This waits for the transactions of the whole cluster, and reports which transactions it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from pgcdc_assets.errors import CopyBlocked, SourceFailed
from pgcdc_assets.source.connect.silence import TELL_SECONDS
from pgcdc_assets.source.connect.walsender import CreatedSlot, ReplicationConnection
from pgcdc_assets.source.slot.blockers import Blocker, log_blockers, transactions

LOCK_SECONDS = 600
"""lock_timeout of slot creation, for each transaction that it waits for. A nightly report may take minutes. But a
forgotten session must not make the new slot hold WAL and dead rows for hours."""
_ATTEMPTS = 3
_TOO_LARGE = "snapshot too large"
"""Part of 'initial slot snapshot too large': more subtransactions are open than a snapshot holds. This is temporary."""

OnWait = Callable[[list[Blocker]], None]


def create_slot(
    connection: ReplicationConnection, conn: psycopg.Connection[Any], name: str, *, temporary: bool,
    two_phase: bool = False, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None,
) -> CreatedSlot:  # fmt: skip
    """Creates a pgoutput slot with an exported snapshot. After a timeout, CopyBlocked names the blocking transactions.

    The slot is always created with a snapshot. On servers older than the minor releases of August 2024, a slot that was
    created without a snapshot may start inside a transaction. During the wait, ``on_wait`` is called every ten seconds
    with the transactions that the server waits for.
    """
    connection.execute(f"SET lock_timeout = {int(lock_seconds * 1000):d}")
    tell = _Teller(conn, on_wait or log_blockers)
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
    """Called every half second during the wait. Queries and reports the blocking transactions every TELL_SECONDS."""

    def __init__(self, conn: psycopg.Connection[Any], on_wait: OnWait) -> None:
        self._conn = conn
        self._on_wait = on_wait
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= TELL_SECONDS:
            self._last = time.monotonic()
            self._on_wait(transactions(self._conn))
