"""Prepared transactions on the source of :class:`Twins`, which is received by two receivers."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from tests.log.conftest import Source, eventually, until_event
from tests.log.received_twice import Row, Twins


def gid(source: Source, name: str = "g") -> str:
    """A gid that is unique on the server, because gids belong to the server and not to the database."""
    return f"{source.database.name} it's {name}".replace("'", "''")


def prepare(source: Source, *statements: str, name: str = "g") -> Lsn:
    return source.run("BEGIN", *statements, f"PREPARE TRANSACTION '{gid(source, name)}'")


def end(source: Source, how: str = "COMMIT", name: str = "g") -> Lsn:
    return source.run(f"{how} PREPARED '{gid(source, name)}'")


def kinds(rows: list[Row]) -> str:
    return "".join(row[5] for row in rows)


def durable(twins: Twins, lsn: Lsn) -> None:
    assert twins.streamed.receiver is not None
    recorded(twins.source, twins.streamed.log, twins.streamed.receiver, lsn)


def recorded(source: Source, log: ChangeLog, receiver: ReceiverProcess, lsn: Lsn) -> None:
    """Waits until the log is recorded up to ``lsn``, and this is confirmed. It sets a mark, because the server sends
    nothing for WAL records of its own, which may follow the last received message."""
    receiver.mark(lsn)
    until_event(receiver, "complete")
    eventually(lambda: source.confirmed(log) >= lsn)


def restart(twins: Twins) -> ReceiverProcess:
    assert twins.streamed.receiver is not None
    twins.streamed.receiver.kill()
    return twins.start()
