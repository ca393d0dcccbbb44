"""The receiver as a process: ``python -m pgcdc_assets.log.receive.process``.

It reads settings and orders from stdin, whose end means that the parent died: the process stops at a boundary. It
writes events to stdout. All of these are :mod:`pgcdc_assets.log.receive.messages`.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from types import FrameType

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import ROOM, MachineError, PgcdcError, ReceiverDied
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.choice import Choice
from pgcdc_assets.log.receive.messages import (
    Event,
    EventName,
    Order,
    OrderName,
    ReceiverSettings,
    error_line,
    event_line,
)
from pgcdc_assets.log.receive.overlap import Overlap
from pgcdc_assets.log.receive.receiver import Limits, Receiver
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.plainsession import open_source
from pgcdc_assets.source.connect.pluginoptions import Origins, PluginOptions
from pgcdc_assets.source.slot.slotstatus import require_slot
from pgcdc_assets.source.stream.catchup import begin
from pgcdc_assets.source.stream.subscribe import Subscription, check_identity

_ALONE_SECONDS = 1.0
"""The parent may have taken nine of the ten seconds that a command has to end in."""
_COLLECT_AFTER = 200_000
"""New objects between two looks for cycles; a run of frames makes 8,192 and lets them go again."""


class Orders:
    """Lines on a pipe, read without waiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self._buffer = b""
        self.ended = False
        """The other side is gone, or has ordered a stop."""

    def first_line(self) -> bytes:
        """Waits for it."""
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


class ReceiverRun:
    """One run of the receiver, from the settings to the end of the stream."""

    def __init__(self, settings: ReceiverSettings, orders: Orders) -> None:
        self._settings = settings
        self._orders = orders
        self._terminated = False
        signal.signal(signal.SIGTERM, self._terminate)
        # A terminal's interrupt is the parent's to answer: it stops us at a boundary.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        settings = self._settings
        log = ChangeLog(Layout.of(settings.lake)).open()
        identity, timeline, position = log.identity, log.timeline, log.position()
        with (
            connect(settings.conninfo, application_name=f"{APPLICATION}/catalog") as conn,
            open_source(
                settings.conninfo,
                replication_connections=settings.replication_connections,
                application_name=f"{APPLICATION}/receive",
            ) as stream,
        ):
            source = check_identity(stream, identity, timeline, position, settings.highest)
            choice = Choice(settings.messages, origins=settings.origin == Origins.ANY)
            confirmed = require_slot(conn, identity.slot).confirmed_flush_lsn
            overlap = Overlap.of(log, confirmed, settings.published, origins=choice.origins)
            options = PluginOptions.of(
                conn.info.server_version // 10000, messages=bool(settings.messages), origins=Origins(settings.origin)
            )
            asked = Subscription(conn, identity.slot, settings.publications, options, self._keep_waiting)
            start_lsn = overlap.start if overlap and overlap.start < position else None
            frames, floor = begin(asked, stream, position, start_lsn=start_lsn, drain_bytes=settings.drain_bytes)
            relations = Relations()
            writer = BatchWriter(log.path, identity, source.timeline, relations)
            if source.timeline != timeline:
                # The fork has been checked. What is copied from now on lies beyond it.
                writer.advance(position)
            receiver = Receiver(
                frames, conn, writer, relations,
                publications=settings.publications, floor=floor, overlap=overlap and overlap.above(floor),
                choice=choice,
                limits=Limits(settings.batch_bytes, settings.batch_seconds),
                report=_tell, orders=self._obey,
            )  # fmt: skip
            _tell(Event(EventName.STARTED, position))
            receiver.run()

    def _keep_waiting(self) -> bool:
        return not (self._terminated or self._orders.ended)

    def _obey(self, receiver: Receiver) -> None:
        for order in self._orders.take():
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
        if not self._keep_waiting():
            receiver.stop()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True


def _say(line: bytes) -> None:
    while line:
        try:
            line = line[os.write(sys.stdout.fileno(), line) :]
        except BrokenPipeError:
            # The parent is gone; its end of our stdin says so too, and the loop stops by that.
            return


def _tell(event: Event) -> None:
    _say(event_line(event))


def _end_with_parent(descriptor: int) -> None:
    """End some seconds after the parent, if no boundary was found by then: it may wait for a dead server."""
    poll = select.poll()
    poll.register(descriptor, 0)
    while not poll.poll():
        continue
    time.sleep(_ALONE_SECONDS)
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), name="parent", daemon=True).start()
    orders = Orders(sys.stdin.fileno())
    line = orders.first_line()
    if not line:
        return 1
    # Every frame is a new object that the cycle collector would look at: a fifth of the time, for nothing.
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    settings = ReceiverSettings.from_line(line)
    try:
        ReceiverRun(settings, orders).run()
    except PgcdcError as error:
        _say(error_line(error))
        return 1
    except OSError as error:
        # A full disk, as a rule. The system's words quote no row.
        thing = error.filename or str(Layout.of(settings.lake).change_log)
        what = os.strerror(error.errno) if error.errno else f"ended by {type(error).__name__}"
        _say(error_line(MachineError(what, thing=str(thing), do=ROOM)))
        return 1
    except Exception as error:  # noqa: BLE001 - the last place that can say what happened
        # Where it happened, but not the message: it might quote a row.
        traceback.print_tb(error.__traceback__)
        _say(error_line(ReceiverDied(f"ended by {type(error).__name__}", thing="receiver")))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
