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

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import ROOM, MachineError, PgcdcError, ReceiverDied
from pgcdc_assets.log.receive.connections import Receiving
from pgcdc_assets.log.receive.messages import Event, ReceiverSettings, error_line, event_line
from pgcdc_assets.log.receive.orders import Orders

_ALONE_SECONDS = 1.0
"""The parent may have taken nine of the ten seconds that a command has to end in."""
_COLLECT_AFTER = 200_000
"""New objects between two looks for cycles; a run of frames makes 8,192 and lets them go again."""


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
        receiving = Receiving(settings, orders, _tell)
        signal.signal(signal.SIGTERM, lambda number, frame: receiving.terminate())
        # A terminal's interrupt is the parent's to answer: it stops us at a boundary.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        receiving.run()
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
