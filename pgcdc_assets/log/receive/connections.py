"""Receives over one connection after another, from the settings to the end of the stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Final

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceFailed
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.prepared import PreparedTransactions
from pgcdc_assets.log.preparedfolder import PreparedFolder
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.announce import Announcer
from pgcdc_assets.log.receive.batches import Limits
from pgcdc_assets.log.receive.choice import Choice
from pgcdc_assets.log.receive.fallback import Fallback
from pgcdc_assets.log.receive.messages import Event, EventName, Order, OrderName, ReceiverSettings
from pgcdc_assets.log.receive.orders import Orders
from pgcdc_assets.log.receive.overlap import Overlap
from pgcdc_assets.log.receive.parts import StreamUnsure
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.pluginoptions import Origins, PluginOptions, Streaming
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slotstatus import require_slot
from pgcdc_assets.source.stream.subscribe import Subscription, begin, check_identity

logger = logging.getLogger(__name__)


_OVER_BY: Final = {
    OrderName.MARK: (),
    OrderName.UNTIL: (OrderName.UNTIL, OrderName.FOLLOW),
    OrderName.FOLLOW: (OrderName.UNTIL, OrderName.FOLLOW),
}
"""For each order: the names of earlier orders that it cancels. An order that is not listed replaces an earlier order of
the same name."""


class Receiving:
    """One run of the receiver. ``tell`` passes an event to the parent."""

    def __init__(self, settings: ReceiverSettings, orders: Orders, tell: Callable[[Event], None]) -> None:
        self._settings = settings
        self._orders = orders
        self._tell_parent = tell
        self._standing: list[Order] = []
        """Orders that also apply to the next connection."""
        self._fallback = Fallback(settings.streaming, settings.fallback_seconds)
        self._started = False
        self._terminated = False

    def terminate(self) -> None:
        """Stop at the last boundary."""
        self._terminated = True

    def run(self) -> None:
        """Receive until the goal or a stop."""
        while self._connection():
            passed(FaultPoint.STREAM_RESTARTED)

    def _connection(self) -> bool:
        """Receive over one connection. Returns whether to continue with another connection."""
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
            choice = Choice(settings.messages, origins=settings.origin == Origins.ANY, encoding=stream.encoding)
            confirmed = require_slot(conn, identity.slot).confirmed_flush_lsn
            overlap = Overlap.of(log, confirmed, origins=choice.origins)
            if overlap is not None:
                # What comes again is compared with the log as whole transactions, up to just past the log's end.
                self._fallback.until(Lsn(overlap.end + 1))
            whole = self._fallback.whole
            options = PluginOptions.of(
                conn.info.server_version // 10000, streaming=not whole, messages=bool(settings.messages),
                origins=Origins(settings.origin), two_phase=settings.two_phase,
            )  # fmt: skip
            asked = Subscription(conn, identity.slot, settings.publications, options, self._keep_waiting)
            start_lsn = overlap.start if overlap and overlap.start < position else None
            try:
                frames, floor = begin(asked, stream, position, start_lsn=start_lsn, drain_bytes=settings.drain_bytes)
                relations = Relations()
                writer = BatchWriter(log.path, identity, source.timeline, relations, settings.leader)
                if source.timeline != timeline:
                    # The fork of the timelines has been checked. Everything received from now on is past the fork.
                    writer.advance(position)
                folder = PreparedFolder(log.path)
                if not settings.two_phase:
                    folder.clear()
                prepared = PreparedTransactions(folder.recover(writer.position)) if settings.two_phase else None
                receiver = Receiver(
                    frames, conn, writer, relations,
                    publications=settings.publications, floor=floor, overlap=overlap and overlap.above(floor),
                    choice=choice, limits=Limits(settings.batch_bytes, settings.batch_seconds, settings.segment_bytes),
                    report=self._tell, orders=self._obey,
                    leave=self._fallback.over if whole else lambda boundary: False, announce=announcer.announce,
                    prepared=prepared,
                )  # fmt: skip
                for order in self._standing.copy():
                    _give(receiver, order)
                if not self._started:
                    self._tell(Event(EventName.STARTED, position))
                    self._started = True
                receiver.run()
                return receiver.left
            except StreamUnsure as unsure:
                self._fallback.until(unsure.end_lsn)
            except SourceFailed as error:
                if options.streaming == Streaming.OFF:
                    raise
                seconds = self._fallback.failed()
                logger.warning("%s; transactions are received after their commits for %.0f s", error, seconds)
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

    def _tell(self, event: Event) -> None:
        if event.name == EventName.COMPLETE:
            self._standing.remove(Order(OrderName.MARK, event.lsn))
        self._tell_parent(event)


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
