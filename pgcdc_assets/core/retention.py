"""Decides what may be deleted: never what a consumer still needs, never what is young, and only from the front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import numpy as np

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.lsn import Lsn

GRACE: Final = timedelta(hours=1)
"""Data younger than this stays whatever the settings say: somebody may be reading it (a query, ``verify``), and a
process that was killed may need a moment to die."""

LONGEST_POINTS: Final = timedelta(days=15)
"""The oldest age of points. Delta keeps the log of a mirror's versions for 30 days, and a version may already be old
when a point names it."""

EVERY_POINT: Final = timedelta(hours=1)
"""Each consistent point stays this long. Then one stays for every ten minutes, and after a day one per hour: a turn per
second makes 86,400 points a day, and each keeps the deletion vectors of its versions."""
LADDER: Final = ((timedelta(days=1), timedelta(hours=1)), (EVERY_POINT, timedelta(minutes=10)))
"""Pairs of an age and the time for which one point stays from that age on; the oldest age first."""


def sparse(times: Ints, newer: int | None, now: int) -> Bools:
    """Which points stay on the ladder: the newest of its ten minutes, or of its hour.

    ``times`` are ascending. They are in microseconds since 1970, like ``now`` and ``newer``, the time of the first
    point after them (None: there is none, and the last of them is the newest of all).
    """
    every = np.ones(len(times), np.int64)
    for age, step in reversed(LADDER):
        every[now - times > age // timedelta(microseconds=1)] = step // timedelta(microseconds=1)
    after = np.append(times[1:], np.iinfo(np.int64).max if newer is None else newer)
    stays: Bools = times // every != after // every
    return stays


def oldest_kept(now: datetime, retention: timedelta, grace: timedelta = GRACE) -> datetime:
    """Data written before this time may be deleted."""
    return now - max(retention, grace)


@dataclass(frozen=True)
class LogFile:
    """A file of the change log: the first and the last of the batches (by their ends) that it has rows of."""

    first_end: Lsn
    last_end: Lsn
    written: datetime


def log_cut(files: Iterable[LogFile], start: Lsn, needed: Sequence[Lsn], oldest: datetime) -> Lsn:
    """The boundary up to which the change log may be deleted; ``start`` if nothing may.

    ``needed``: the effective ``replay_lsn`` of every consumer; a table at R needs the transactions with ``commit_lsn >=
    R``, so every batch that ends above R. A batch is deleted whole, with all batches before it, and not before every
    file that holds rows of it may be deleted. Its age is that of its files, because ``commit_ts`` is another server's
    if an origin is replicated, and does not only rise.
    """
    left = sorted(files, key=lambda file: file.last_end)
    stay = [file.first_end for file in left if file.written > oldest or any(file.last_end > lsn for lsn in needed)]
    bound = min(stay, default=None)
    # From the last file backwards: a file that reaches into what stays, stays too, with every batch that it has rows
    # of.
    for file in reversed(left):
        if bound is not None and file.last_end >= bound:
            bound = min(bound, file.first_end)
    ends = [file.last_end for file in left if bound is None or file.last_end < bound]
    return max([start, *ends])
