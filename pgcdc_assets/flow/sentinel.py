"""The operator's requests to the runs of a lake: the LSN at which following ends, and whether changes are applied.

The idea comes from pgcopydb's sentinel. Each request is a separate file in the lake, so that no command overwrites the
other request. A request is in force for all runs, also for the runs of the sensor, until it is withdrawn. A run reads
the files between its turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Sentinel:
    endpos: Lsn | None = None
    """A run that follows ends at the last boundary at or below this LSN. A run that has passed the LSN already ends at
    its present position. None: the run does not end."""
    paused: bool = False
    """Nothing is applied. Changes go only into the log, and the slot can advance."""

    def reached(self, position: Lsn) -> bool:
        """Whether a log at ``position`` has reached the LSN at which following ends."""
        return self.endpos is not None and position >= self.endpos


def read(layout: Layout) -> Sentinel:
    """The operator's present requests. LakeError if the file of ``endpos`` does not hold an LSN."""
    try:
        text = storage.read(layout.endpos).decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    try:
        endpos = Lsn.parse(text) if text else None
    except ValueError:
        raise LakeError("does not hold an LSN", thing=str(layout.endpos), do="set it anew with `pgcdc until`") from None
    return Sentinel(endpos, storage.exists(layout.apply_paused))


def apply_paused(layout: Layout) -> LakeError:
    """The error for operations that would change mirrors although applying is paused."""
    return LakeError("is not applied to: that was paused", thing=f"lake {layout.root}", do="run `pgcdc resume apply`")


def follow_until(layout: Layout, lsn: Lsn | None) -> None:
    """Have every run that follows end at ``lsn``. None withdraws the request."""
    if lsn is None:
        storage.delete([layout.endpos])
    else:
        storage.replace(layout.endpos, f"{lsn}\n".encode())


def pause_apply(layout: Layout, *, paused: bool) -> bool:
    """Pause applying, or resume it; returns whether this changed anything."""
    before = storage.exists(layout.apply_paused)
    if paused and not before:
        storage.replace(layout.apply_paused, b"")
    elif before and not paused:
        storage.delete([layout.apply_paused])
    return before is not paused
