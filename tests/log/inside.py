"""The receiver inside the test's own process, where each of its confirmations can be seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.catchup import begin
from pgcdc_assets.log.receiver import Limits, Receiver
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.start import Subscription, check_identity
from pgcdc_assets.log.table import ChangeLog
from pgcdc_assets.source.connection import connect
from pgcdc_assets.source.drain import LEAST_BYTES
from pgcdc_assets.source.libpq import LibpqConnection
from pgcdc_assets.source.replication import ReplicationConnection
from pgcdc_assets.source.session import SqlConnection
from tests.log.conftest import PUBLICATION, Source

Confirmation = Callable[[Lsn], None]


class Advances(LibpqConnection):
    """Says to where it advances the slot before it does."""

    confirming: Confirmation

    def execute(self, command: str, *, waiting: Callable[[], None] | None = None) -> list[tuple[str | None, ...]]:
        if advanced := re.search(r"pg_replication_slot_advance\(.*'([0-9A-F]+/[0-9A-F]+)'", command):
            self.confirming(Lsn.parse(advanced[1]))
        return super().execute(command, waiting=waiting)


class Watched(Advances, ReplicationConnection):
    """Says what it confirms before it does."""

    def send_status(self, write_lsn: Lsn, flush_lsn: Lsn, apply_lsn: Lsn, *, reply: bool = False) -> None:
        self.confirming(flush_lsn)
        super().send_status(write_lsn, flush_lsn, apply_lsn, reply=reply)


class WatchedSession(Advances, SqlConnection):
    """The same without replication connections."""


def receive_inside(
    source: Source, log: ChangeLog, until: Lsn, confirming: Confirmation, *,
    writer: type[BatchWriter] = BatchWriter, batch_seconds: float = 0.02, batch_bytes: int = 1 << 20,
    drain_bytes: int = LEAST_BYTES, replication: bool = True,
    orders: Callable[[Receiver], None] = lambda receiver: None, **options: Any,
) -> Lsn:  # fmt: skip
    """One run to a goal, as the receiver's process makes it; where the log stands then."""
    log.open()
    identity, timeline, position = log.identity, log.timeline, log.position()
    conninfo = source.database.conninfo
    kind: type[Advances] = Watched if replication else WatchedSession
    with connect(conninfo) as conn, kind.open(conninfo, options=options) as stream:
        stream.confirming = confirming
        found = check_identity(stream, identity, timeline, position)
        asked = Subscription(conn, identity.slot, [PUBLICATION])
        frames, floor = begin(asked, stream, position, least=drain_bytes)
        relations = Relations()
        receiver = Receiver(
            frames, conn, writer(log.path, identity, found.timeline, relations), relations,
            publications=[PUBLICATION], floor=floor, limits=Limits(batch_bytes, batch_seconds),
            report=lambda report: None, orders=orders,
        )  # fmt: skip
        receiver.until(until)
        return receiver.run()
