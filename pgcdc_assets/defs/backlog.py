"""Checks how far the source is ahead of the lake. The check is cheap: plain SQL, and reads of small tables.

It opens no replication connection, does not start Spark, and moves no position.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psycopg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.states import TableState
from pgcdc_assets.defs.demand import FOREIGN_WAL_BYTES, Cursor, SourceLook
from pgcdc_assets.errors import SlotMissing
from pgcdc_assets.protocol.layouts import CHANGES
from pgcdc_assets.source.connect.pluginoptions import Origins, PluginOptions
from pgcdc_assets.source.slot.positions import FLUSH_LSN

if TYPE_CHECKING:
    from pgcdc_assets.log.reader import ChangeLog
    from pgcdc_assets.source.connect.connection import SourceConnection

_PEEK_WAL_BYTES = 4 * FOREIGN_WAL_BYTES
"""The maximum number of bytes of WAL that one check decodes. Decoding always begins at restart_lsn, so a check would be
too expensive while a long transaction is open."""
_PEEK_MILLISECONDS = 10_000

_POSITIONS = f"""
SELECT active, coalesce(confirmed_flush_lsn, '0/0')::text, coalesce(restart_lsn, '0/0')::text,
       {FLUSH_LSN}::text
FROM pg_replication_slots WHERE slot_name = %s
"""  # noqa: S608  (put together of our own constants)

# Whether the slot holds a committed transaction that changes a published table, or a message if messages are asked for.
# Nothing is consumed.
_PEEK = f"""
SELECT EXISTS (
  SELECT FROM pg_logical_slot_peek_binary_changes(%s, %s::text::pg_lsn, NULL, VARIADIC %s::text[])
  WHERE get_byte(data, 0) IN ({", ".join(str(int(kind)) for kind in CHANGES)}))
"""  # noqa: S608  (put together of our own constants)


def look(
    conn: SourceConnection,
    catalog: Catalog,
    layout: Layout,
    cursor: Cursor,
    *,
    messages: bool = False,
    origin: str = Origins.ANY,
) -> SourceLook:
    """The present positions of source and lake. Raises SlotMissing, or an error of the connection."""
    from pgcdc_assets.flow.requests import operator_requests
    from pgcdc_assets.log.reader import ChangeLog

    slot = catalog.identity.slot
    found = conn.execute(_POSITIONS, [slot]).fetchone()
    if found is None:
        raise SlotMissing("does not exist", thing=f"slot {slot}", do="see `pgcdc status`")
    active, (confirmed, restart, flushed) = found[0], (Lsn.parse(text) for text in found[1:])
    log = ChangeLog(layout)
    position = log.position() if log.exists else confirmed
    told = operator_requests(layout)
    seen = SourceLook(
        now=time.time(),
        flush_lsn=flushed,
        position=position,
        to_copy=_to_copy(catalog, layout),
        unapplied=_unapplied(log, layout, messages=messages),
        paused=told.paused,
        endpos=told.endpos,
    )
    to_apply = (seen.to_copy or seen.unapplied) and not seen.paused
    if to_apply or told.reached(position) or not ZERO < flushed - position < FOREIGN_WAL_BYTES:
        return seen
    if cursor.empty_to == flushed:
        return seen.with_published(False)
    if active or flushed - restart > _PEEK_WAL_BYTES:
        return seen
    return seen.with_published(_published(conn, catalog, flushed, messages=messages, origin=origin))


def _to_copy(catalog: Catalog, layout: Layout) -> int:
    from pgcdc_assets.points.states import TableStates

    rows = TableStates(layout).all()
    states = {name: row.state for name, row in rows.items()}
    return sum(states.get(table.name) in (None, TableState.COPYING) for table in catalog.tables)


def _unapplied(log: ChangeLog, layout: Layout, *, messages: bool) -> int:
    """The number of batches after the newest consistent point that have transactions, or messages if these are asked
    for."""
    from pgcdc_assets.points.points import ConsistentPoints

    if not log.exists:
        return 0
    point = ConsistentPoints(layout).newest()
    return sum(
        batch.transactions > 0 or (messages and "M" in batch.others)
        for batch in log.batches(point.replay_lsn if point else log.start)
    )


def _published(conn: SourceConnection, catalog: Catalog, upto: Lsn, *, messages: bool, origin: str) -> bool | None:
    """Whether the slot holds a published change, or a message if messages are asked for. None if PostgreSQL could not
    check it, because another session began to read the slot or the time ran out."""
    conn.execute("SELECT set_config('statement_timeout', %s, false)", [str(_PEEK_MILLISECONDS)])
    try:
        options = PluginOptions.of(conn.info.server_version // 10000, messages=messages, origins=Origins(origin))
        pairs = [part for option in options.given(catalog.publications).items() for part in option]
        found = conn.execute(_PEEK, [catalog.identity.slot, str(upto), pairs]).fetchone()
    except psycopg.Error:
        return None
    return bool(found and found[0])
