"""A note in the lake with the LSN up to which the log is complete. This LSN may be above the log's recorded position.

WAL that contains nothing for the log moves the recorded position only once per 16 MiB, so that a quiet source causes no
Delta commits. A reader that waits for an LSN in such WAL could wait for days. So two processes write the note, a small
file: the receiver while it runs, and the sensor if the slot has no changes that must still be received.

No stored position is computed from the note, and the file may be lost without harm. The note contains the recorded
position for which it was written, and is ignored if the log has another position. So an old note has no effect after
the source was restored.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Final

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import LeaseLost, StoreFailed
from pgcdc_assets.store import storage

NOTE_SECONDS: Final = 1.0
"""Seconds between two notes while the source writes WAL that contains nothing for the log."""


class Extent:
    """Writes the note. Errors of the disk or of the object store are ignored, so that they do not stop the process."""

    def __init__(self, layout: Layout) -> None:
        self._place = layout.extent
        self._noted = ZERO
        self._due = 0.0

    def note(self, position: Lsn, complete: Lsn, *, last: bool = False) -> None:
        """Note that a log with the recorded ``position`` contains every transaction that ends at or below ``complete``.
        Skips the note if the previous note is too recent, unless it is the ``last`` note of a connection."""
        if complete > max(position, self._noted) and (last or time.monotonic() >= self._due):
            with suppress(OSError, StoreFailed, LeaseLost):
                storage.replace(self._place, json.dumps({"position": position, "complete": complete}).encode())
                self._noted = complete
            self._due = time.monotonic() + max(NOTE_SECONDS, storage.pace(self._place))


def complete_to(layout: Layout, position: Lsn) -> Lsn:
    """The LSN up to which a log with the recorded ``position`` contains every transaction. It is ``position``, or a
    higher LSN from a note that was written for this position."""
    try:
        noted = json.loads(storage.read(layout.extent))
        return Lsn(noted["complete"]) if noted["position"] == position else position
    except (FileNotFoundError, *MALFORMED):
        return position
