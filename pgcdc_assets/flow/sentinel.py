"""What an operator tells the runs of a lake while they go on: how far to follow, and whether to apply.

The idea is that of pgcopydb's sentinel. Each of the two is a file of its own in the lake, so that no command undoes
another's, and is in force for all runs, also those of the sensor, until it is taken back. A run looks at the files
between its turns.
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
    """A run that follows ends at the last boundary at or below this position; a run that is already past it, where it
    is. None: it does not end."""
    paused: bool = False
    """Nothing is applied: changes go into the log, and the slot is freed."""

    def reached(self, position: Lsn) -> bool:
        """Whether a log that stands at ``position`` has all that is to be followed."""
        return self.endpos is not None and position >= self.endpos


def read(layout: Layout) -> Sentinel:
    """What the operator says now. LakeError if the file of ``endpos`` does not hold an LSN."""
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
    """The error for operations that would change mirrors while applying is paused."""
    return LakeError("is not applied to: that was paused", thing=f"lake {layout.root}", do="run `pgcdc resume apply`")


def follow_until(layout: Layout, lsn: Lsn | None) -> None:
    """Have every run that follows end at ``lsn``; None takes that back."""
    if lsn is None:
        storage.delete([layout.endpos])
    else:
        storage.replace(layout.endpos, f"{lsn}\n".encode())


def pause_apply(layout: Layout, *, paused: bool) -> bool:
    """Stop applying, or go on with it; returns whether that changes anything."""
    before = storage.exists(layout.apply_paused)
    if paused and not before:
        storage.replace(layout.apply_paused, b"")
    elif before and not paused:
        storage.delete([layout.apply_paused])
    return before is not paused
