"""The main function of the receiver process: ``python -m pgcdc_assets.log.receive.process``. The process reads settings
and orders from stdin, and writes events to stdout (:mod:`pgcdc_assets.log.receive.messages`). If stdin ends, the parent
has died, and the process stops at a boundary."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback

from pgcdc_assets import logs
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import ROOM, MachineError, PgcdcError, ReceiverDied
from pgcdc_assets.log.receive.connections import Orders, Receiving
from pgcdc_assets.log.receive.messages import ReceiverSettings, error_line, event_line

_log = logging.getLogger(__name__)

_ALONE_SECONDS = 1.0
"""How many seconds the process may run after its parent has died. A command must end within ten seconds of a signal,
and the parent may have used nine of these."""
_COLLECT_AFTER = 200_000
"""How many new objects start Python's cycle collector. Reading frames creates up to 8,192 objects at a time, and frees
them again, so they do not start it."""


def _write_line(line: bytes) -> None:
    while line:
        try:
            line = line[os.write(sys.stdout.fileno(), line) :]
        except BrokenPipeError:
            # The parent has died. The receive loop notices that stdin has ended, and stops.
            return


def _end_with_parent(descriptor: int) -> None:
    """Wait for the parent's death, then exit after ``_ALONE_SECONDS``. Normally the process stops at a boundary within
    this time, but it cannot if it waits for a server that does not answer."""
    poll = select.poll()
    poll.register(descriptor, 0)
    while not poll.poll():
        continue
    time.sleep(_ALONE_SECONDS)
    os._exit(1)


def _frames(error: Exception) -> list[str]:
    """The lines of code where an error happened, from its traceback, without the error's message."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]


def main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    logs.begin_in_child(stage="receive", process="receiver")
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), name="parent", daemon=True).start()
    orders = Orders(sys.stdin.fileno())
    line = orders.first_line()
    if not line:
        return 1
    # Every frame is a new object. With Python's default threshold, the cycle collector would take a fifth of the time
    # to check these objects, and would find nothing.
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    settings = ReceiverSettings.from_line(line)
    failure: PgcdcError
    try:
        receiving = Receiving(settings, orders, lambda event: _write_line(event_line(event)))
        signal.signal(signal.SIGTERM, lambda number, frame: receiving.terminate())
        # The parent handles a terminal's interrupt, and then sends the order STOP to this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        receiving.run()
        return 0
    except PgcdcError as error:
        failure = error
    except OSError as error:
        # The cause is usually a full disk. The system's error text never quotes a row.
        thing = error.filename or str(Layout.of(settings.lake).change_log)
        what = os.strerror(error.errno) if error.errno else f"cannot be read or written: {type(error).__name__}"
        failure = MachineError(what, thing=str(thing), do=ROOM)
    except Exception as error:  # noqa: BLE001 - the last place that can say what happened
        # Print where the error happened, but not its message, which might quote a row.
        kind = type(error).__name__
        _log.error("the receiver process ended because of an unexpected %s", kind, extra={"trace": _frames(error)})
        failure = ReceiverDied(f"ended because of an unexpected {kind}", thing="receiver")
    _write_line(error_line(failure))
    return 1


if __name__ == "__main__":
    sys.exit(main())
