"""Opens the receiver's connections, one after another. On each connection, starts the stream and runs the receive
loop."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import SlotAhead, SourceFailed
from pgcdc_assets.log.announcements import Announcer
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.extent import Extent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.batches import Limits
from pgcdc_assets.log.receive.intake import StreamUnsure
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.messages import FALLBACK_SECONDS, Event, EventName, Order, OrderName, ReceiverSettings
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.log.receive.wholetransactions import ResendCheck
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.spill import PreparedFolder
from pgcdc_assets.log.transactions import PreparedTransactions
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.pluginoptions import Origins, PluginOptions, Streaming
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import require_slot
from pgcdc_assets.source.stream.subscribe import Subscription, begin, check_identity

logger = logging.getLogger(__name__)

_MOST_SECONDS: Final = 3600.0
"""The longest time in seconds for which streaming of transactions in progress is off after a server error. The time
doubles with each error, because each attempt makes the server read all open transactions again."""
_OVER_BY: Final = {
    OrderName.MARK: (),
    OrderName.UNTIL: (OrderName.UNTIL, OrderName.FOLLOW),
    OrderName.FOLLOW: (OrderName.UNTIL, OrderName.FOLLOW),
}
"""For each order, the names of the earlier orders that it cancels. An order that is not listed here cancels an earlier
order of the same name."""


class Receiving:
    """The work of one receiver process. ``report`` sends an event to the parent."""

    def __init__(self, settings: ReceiverSettings, orders: Orders, report: Callable[[Event], None]) -> None:
        self._settings = settings
        self._orders = orders
        self._report_to_parent = report
        self._standing: list[Order] = []
        """Orders of the parent process that still hold. They are given to the receiver of each new connection again."""
        self._fallback = Fallback(settings.streaming, settings.fallback_seconds)
        self._started = False
        self._terminated = False

    def terminate(self) -> None:
        """Called if the process gets SIGTERM: stop at the last boundary that was received."""
        self._terminated = True

    def run(self) -> None:
        """Receive until the LSN of an UNTIL order is reached, or until a stop is ordered."""
        while self._connection():
            passed(FaultPoint.STREAM_RESTARTED)

    def _connection(self) -> bool:
        """Receive over one connection. Returns whether a new connection must be opened afterwards."""
        settings = self._settings
        layout = Layout.of(settings.lake)
        log = ChangeLog(layout).open()
        identity, timeline, position = log.identity, log.timeline, log.position()
        with (
            connect(settings.conninfo, application_name=f"{APPLICATION}/catalog") as conn,
            ReplicationConnection.open(settings.conninfo, application_name=f"{APPLICATION}/receive") as stream,
            closing(Announcer(layout)) as announcer,
        ):
            source = check_identity(stream, identity, timeline, position, settings.highest)
            wanted = MessageFilter(settings.messages, origins=settings.origin == Origins.ANY, encoding=stream.encoding)
            confirmed = require_slot(conn, identity.slot).confirmed_flush_lsn
            resend_check = ResendCheck.of(log, confirmed, origins=wanted.origins)
            # ``log`` holds the list of the log's files. The connection may last for days, and needs none of them.
            del log
            if resend_check is not None:
                # Transactions that the server sends again are compared with those in the log. For this, each must
                # arrive in one piece, so streaming is off until the stream has passed the log's end.
                self._fallback.until(Lsn(resend_check.end + 1))
            whole = self._fallback.whole
            options = PluginOptions.of(
                conn.info.server_version // 10000, streaming=not whole, messages=bool(settings.messages),
                origins=Origins(settings.origin), two_phase=settings.two_phase,
            )  # fmt: skip
            asked = Subscription(conn, identity.slot, settings.publications, options, self._keep_waiting)
            start_lsn = resend_check.start if resend_check and resend_check.start < position else None
            try:
                frames, floor = begin(asked, stream, position, start_lsn=start_lsn, drain_bytes=settings.drain_bytes)
                relations = Relations()
                writer = BatchWriter(layout.change_log, identity, source.timeline, relations, settings.leader)
                if source.timeline != timeline:
                    # Record the new timeline in the log. check_identity has checked that the log's position is not past
                    # the fork of the timelines.
                    writer.advance(position)
                folder = PreparedFolder(layout.change_log)
                if not settings.two_phase:
                    folder.clear()
                prepared = PreparedTransactions(folder.recover(writer.position)) if settings.two_phase else None
                receiver = Receiver(
                    frames, conn, writer, relations,
                    publications=settings.publications, floor=floor, wanted=wanted,
                    resend_check=resend_check and resend_check.above(floor),
                    limits=Limits(settings.batch_bytes, settings.batch_seconds, settings.segment_bytes),
                    report=self._report, orders=self._obey,
                    leave=self._fallback.over if whole else lambda boundary: False, announce=announcer.announce,
                    extent=Extent(layout), prepared=prepared,
                )  # fmt: skip
                for order in self._standing.copy():
                    _give(receiver, order)
                if not self._started:
                    self._report(Event(EventName.STARTED, position))
                    self._started = True
                receiver.run()
                return receiver.left
            except SlotAhead:
                # If the log has grown since its position was read, another process held the slot before, and no
                # change is lost.
                if ChangeLog(layout).open().position() == position:
                    raise
            except StreamUnsure as unsure:
                self._fallback.until(unsure.end_lsn)
            except SourceFailed as error:
                if options.streaming == Streaming.OFF:
                    raise
                seconds = self._fallback.failed()
                logger.warning(
                    "%s; for the next %.0f s, large transactions are received only after their commit", error, seconds
                )
        return True

    def _keep_waiting(self) -> bool:
        return not (self._terminated or self._orders.ended)

    def _obey(self, receiver: Receiver) -> None:
        for order in self._orders.take():
            over = _OVER_BY.get(order.name, (order.name,))
            self._standing = [standing for standing in self._standing if standing.name not in over]
            self._standing.append(order)
            _give(receiver, order)
        if not self._keep_waiting():
            receiver.stop()

    def _report(self, event: Event) -> None:
        if event.name == EventName.COMPLETE:
            self._standing.remove(Order(OrderName.MARK, event.lsn))
        self._report_to_parent(event)


def _give(receiver: Receiver, order: Order) -> None:
    match order.name:
        case OrderName.UNTIL:
            receiver.until(order.lsn)
        case OrderName.FOLLOW:
            receiver.follow()
        case OrderName.MARK:
            receiver.mark(order.lsn)
        case OrderName.REPORT_APPLY:
            receiver.report_apply(order.lsn)
        case OrderName.STOP:
            receiver.stop()


class Orders:
    """Reads the parent's orders from a pipe, one per line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self._buffer = b""
        self.ended = False
        """Whether the parent has closed the pipe, which means that it has died."""

    def first_line(self) -> bytes:
        """Wait for the first line."""
        while b"\n" not in self._buffer and not self.ended:
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def take(self) -> list[Order]:
        while not self.ended and self._poll.poll(0):
            self._read()
        *whole, self._buffer = self._buffer.split(b"\n")
        return [Order.from_line(line) for line in whole if line.strip()]

    def _read(self) -> None:
        piece = os.read(self._descriptor, 65536)
        self._buffer += piece
        self.ended = self.ended or not piece


class Fallback:
    """Decides whether a connection asks the server to stream transactions in progress. Without streaming, the server
    sends each transaction in one piece after its commit ("whole").

    Whole transactions always contain everything that the log needs. Streaming does not work in three cases:

    - PostgreSQL 14 to 18 fails to decode some transactions in progress ("could not map filenode", after a TRUNCATE that
      was rolled back to a savepoint). It fails again at each connect, but succeeds after the transaction's commit.
    - For a logical message, PostgreSQL does not show whether it was rolled back with a savepoint.
    - For a transaction that begins with a catalog change, PostgreSQL does not show whether it has an origin.

    ``streaming``: whether the settings allow streaming. ``seconds``: how long streaming is off after the server's first
    error.
    """

    def __init__(self, streaming: bool, seconds: float = FALLBACK_SECONDS) -> None:
        self._streaming = streaming
        self._until = ZERO
        self._again_at = 0.0
        self._seconds = seconds

    @property
    def whole(self) -> bool:
        """Whether a connection that starts now must ask for whole transactions, without streaming."""
        return not self._streaming or self._until > ZERO or time.monotonic() < self._again_at

    def until(self, lsn: Lsn) -> None:
        """Turn streaming off until a boundary at or above ``lsn`` is reached."""
        self._until = max(self._until, lsn)

    def failed(self) -> float:
        """Turn streaming off, because the server could not decode a transaction in progress. Returns the number of
        seconds for which it stays off."""
        seconds = self._seconds
        self._again_at = time.monotonic() + seconds
        self._seconds = min(2 * seconds, _MOST_SECONDS)
        return seconds

    def over(self, boundary: Lsn) -> bool:
        """Whether the reasons for whole transactions are over, so that a new connection can turn streaming on again.
        ``boundary``: everything that commits below this LSN has been received."""
        if boundary >= self._until:
            self._until = ZERO
        return not self.whole
