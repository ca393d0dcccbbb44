"""A lease: a place that only one process holds at a time, with a text for other processes. The place is held only while
its holder lives."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pgcdc_assets.core.location import LOCAL, Location
from pgcdc_assets.store import chainlease, filelease
from pgcdc_assets.store.base import Lease


def held(
    place: Location, *, guarding: Location | None = None, at_once: bool = False
) -> AbstractContextManager[Lease | None]:
    """Hold a place during the block; None if another process holds it. The text is empty at first, and again after the
    block. OSError if the place cannot be written.

    ``at_once``: return None also if it is not known yet whether the last holder lives. Otherwise this waits until it is
    known.

    ``guarding``: a folder. Once it is not certain that this process still holds the place, each write of this process
    to the folder raises LeaseLost. A lock of a local file cannot be lost.
    """
    if place.scheme == LOCAL:
        return filelease.held(place)
    return chainlease.held(place, guarding=guarding, at_once=at_once)


def text_of_holder(place: Location) -> str | None:
    """The text of the living holder; None if no process holds the place."""
    return filelease.text_of_holder(place) if place.scheme == LOCAL else chainlease.text_of_holder(place)


def is_locked(place: Location) -> bool:
    """Whether a process holds the place for longer than a check takes. A process without a text counts too, such as
    another program that locks the file. False if we have no right to check."""
    return filelease.is_locked(place) if place.scheme == LOCAL else chainlease.text_of_holder(place) is not None


def silent_for(place: Location) -> float:
    """Seconds since a holder took the place, changed its text or gave the place back; infinite if there never was a
    holder.

    The store's clock is compared with ours, so the result may be wrong by a minute.
    """
    return filelease.silent_for(place) if place.scheme == LOCAL else chainlease.silent_for(place)
