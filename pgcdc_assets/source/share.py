"""The LSN of a snapshot without a slot: no transaction that wrote these tables is under way when it is taken.

SHARE locks keep writers out for the moment in which the snapshot and the source's insert position are
read. Who wrote these tables before has committed below that position, and is seen: a transaction keeps its
locks until every new snapshot sees it as ended. Who writes them later commits above it. So the position is
exact for these tables, though not for others.

For the same reason a slot may be older than its decoder's first whole transaction (as on servers before the
minors of August 2024, where it was made without a snapshot): what was under way then and wrote one of these
tables has ended below the copy's position, and is left out of what the log brings to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg
from psycopg import sql

from pgcdc_assets.core.endpos import DELAYS_UNTIL_FLUSHED
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceNotReady, SourceUnavailable
from pgcdc_assets.source.connection import SourceConnection
from pgcdc_assets.source.failures import of_exception
from pgcdc_assets.source.positions import flush_lsn, record_end, wal_writer_delay

BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE"
"""A transaction that may only read may not lock so; it is made such a one once it has."""

# A writer that comes while we wait stands behind us in line. Half of deadlock_timeout is the longest that this may
# last: whoever waits for us in turn looks for a deadlock only after all of it, and then we have given way.
_BRIEFLY = "SELECT (setting::int / 2)::text FROM pg_catalog.pg_settings WHERE name = 'deadlock_timeout'"
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 10.0
"""With a disk that is busy."""


class Written(Exception):
    """Somebody has written these tables and not committed yet."""


def still_point(holder: SourceConnection, observer: SourceConnection, names: Sequence[TableName]) -> Lsn:
    """Where the snapshot stands that ``holder``'s transaction has from here on; it has taken none before.

    Raises Written: then roll the transaction back, so that nobody waits for us, and try again later.
    SourceNotReady where this role, or this server, cannot lock so.
    """
    briefly = observer.execute(_BRIEFLY).fetchone()
    assert briefly is not None
    holder.execute("SAVEPOINT still")
    holder.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(briefly[0]))
    listed = sql.SQL(", ").join(sql.Identifier(name.schema, name.name) for name in names)
    try:
        if names:
            holder.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(listed))
    except psycopg.errors.QueryCanceled:
        raise Written from None
    except psycopg.errors.ReadOnlySqlTransaction:
        raise SourceNotReady(
            "is a standby, where no table can be locked for a moment, as a copy without a replication connection "
            "needs it", thing=holder.endpoint, do="copy from its primary, or set `replication_connections: true`",
        ) from None  # fmt: skip
    except psycopg.Error as error:
        raise of_exception(error).typed("source") from None
    point = record_end(holder)
    # The locks go with what is rolled back; the snapshot is the whole transaction's.
    holder.execute("ROLLBACK TO SAVEPOINT still")
    holder.execute("RELEASE SAVEPOINT still")
    holder.execute("SET TRANSACTION READ ONLY")
    _until_flushed(observer, point)
    return point


def _until_flushed(observer: SourceConnection, point: Lsn) -> None:
    """An asynchronous commit is seen before it is durable: a crash of the source would take it back from its own
    tables, and not from the copy.

    A commit of our own takes all before it along to the disk: a source at rest may leave it for minutes.
    """
    deadline = time.monotonic() + DELAYS_UNTIL_FLUSHED * wal_writer_delay(observer) + _PATIENCE_SECONDS
    observer.execute("SELECT pg_current_xact_id()")
    while flush_lsn(observer) < point:
        if time.monotonic() > deadline:
            raise SourceUnavailable("does not write its WAL to disk", thing=observer.endpoint, lsn=point)
        time.sleep(_POLL_SECONDS)
