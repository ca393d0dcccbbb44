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
"""Younger things stay whatever the settings say: somebody may be reading them (a query, ``verify``), and a
process that was killed may need a moment to die."""

LONGEST_POINTS: Final = timedelta(days=15)
"""Delta keeps the log of a mirror's versions for 30 days, and a version may have stood for some before."""

EVERY_POINT: Final = timedelta(hours=1)
"""For so long each consistent point stays. Then one every ten minutes, and after a day one an hour: a turn a second
makes 86,400 a day, and each keeps the deletion vectors of its versions."""
LADDER: Final = ((timedelta(days=1), timedelta(hours=1)), (EVERY_POINT, timedelta(minutes=10)))
"""From which age on there is one point in how long, the oldest first."""


def sparse(times: Ints, newer: int | None, now: int) -> Bools:
    """Which points stay on the ladder: the newest of its ten minutes, or of its hour.

    ``times`` rise, in microseconds since 1970, as do ``now`` and ``newer``, the time of the first point behind them
    (None: there is none, and the last of them is the newest of all).
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
    """Up to where the change log may be forgotten: a boundary, ``start`` where nothing may.

    ``needed``: the effective ``replay_lsn`` of every consumer; a table at R needs the transactions with
    ``commit_lsn >= R``, so every batch that ends above R. A batch goes whole, with all batches before it,
    and no earlier than every file that holds rows of it. Its age is that of its files: ``commit_ts`` is
    another server's where an origin is replicated, and does not rise.
    """
    left = sorted(files, key=lambda file: file.last_end)
    stay = [file.first_end for file in left if file.written > oldest or any(file.last_end > lsn for lsn in needed)]
    bound = min(stay, default=None)
    # From the last file on: one that reaches into what stays, stays, with every batch that it has rows of.
    for file in reversed(left):
        if bound is not None and file.last_end >= bound:
            bound = min(bound, file.first_end)
    ends = [file.last_end for file in left if bound is None or file.last_end < bound]
    return max([start, *ends])
