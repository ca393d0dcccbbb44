"""A place that one process holds, with a text for the others. It is held only while its holder lives."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pgcdc_assets.core.location import LOCAL, Location
from pgcdc_assets.store import chainlease, filelease
from pgcdc_assets.store.base import Lease


def held(
    place: Location, *, guarding: Location | None = None, at_once: bool = False
) -> AbstractContextManager[Lease | None]:
    """Hold a place during the block; None if another process has it. The text is empty at first, and after the block.

    ``at_once``: None, too, while it is not known yet whether the last holder lives; otherwise this is waited for.

    ``guarding``: a folder to which nothing is written from here once it is not sure any more that the place is ours;
    each attempt then raises LeaseLost. A lock of this machine cannot be lost.
    OSError where the place cannot be written.
    """
    if place.scheme == LOCAL:
        return filelease.held(place)
    return chainlease.held(place, guarding=guarding, at_once=at_once)


def text_of_holder(place: Location) -> str | None:
    """What the living holder says; None when nobody holds the place."""
    return filelease.text_of_holder(place) if place.scheme == LOCAL else chainlease.text_of_holder(place)


def is_locked(place: Location) -> bool:
    """Whether anybody holds the place for longer than a look takes, also one who says nothing, such as a program that
    locks the file for itself. False if we may not know."""
    return filelease.is_locked(place) if place.scheme == LOCAL else chainlease.text_of_holder(place) is not None


def silent_for(place: Location) -> float:
    """Seconds since a holder took the place, said something or gave it back; infinite if there was none.

    The clock of the store is compared with ours: good for what may be a minute wrong.
    """
    return filelease.silent_for(place) if place.scheme == LOCAL else chainlease.silent_for(place)
