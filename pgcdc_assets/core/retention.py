"""Decides which data may be deleted: the oldest data first. Young data, and data that a consumer needs, is never
deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import numpy as np

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.lsn import Lsn

GRACE: Final = timedelta(hours=1)
"""Data younger than this is kept, even if the settings name a shorter time. A reader (a query, ``verify``) may be using
such data, and a process that was killed may need a moment to end."""

LONGEST_POINTS: Final = timedelta(days=15)
"""The longest time that consistent points are kept. Delta keeps the log of a mirror's versions for only 30 days, and a
version may already be old when a point names it."""

EVERY_POINT: Final = timedelta(hours=1)
"""Up to this age, every consistent point is kept. Of older points, one per ten minutes is kept, and after a day one per
hour. With a point per second, there would be 86,400 points a day, and each point keeps deletion vectors from being
deleted."""
LADDER: Final = ((timedelta(days=1), timedelta(hours=1)), (EVERY_POINT, timedelta(minutes=10)))
"""Pairs of an age and an interval, the oldest age first. Of the points that are older than the age, one per interval is
kept."""


def sparse(times: Ints, newer: int | None, now: int) -> Bools:
    """Marks the points that :data:`LADDER` keeps: all young points, and of the older points the newest one in each
    interval (ten minutes; an hour for the oldest points). Times are microseconds since 1970; ``times`` is ascending.
    ``newer`` is the time of the first point after ``times``; None means that the last of ``times`` is the newest point
    of all."""
    every = np.ones(len(times), np.int64)
    for age, step in reversed(LADDER):
        every[now - times > age // timedelta(microseconds=1)] = step // timedelta(microseconds=1)
    after = np.append(times[1:], np.iinfo(np.int64).max if newer is None else newer)
    stays: Bools = times // every != after // every
    return stays


def oldest_kept(now: datetime, retention: timedelta, grace: timedelta = GRACE) -> datetime:
    """The earliest time of data to keep. Data that was written earlier may be deleted."""
    return now - max(retention, grace)


@dataclass(frozen=True)
class LogFile:
    """A file of the change log. ``first_end``, ``last_end``: the end LSNs of the first and last batch with rows in
    it."""

    first_end: Lsn
    last_end: Lsn
    written: datetime


def log_cut(files: Iterable[LogFile], start: Lsn, needed: Sequence[Lsn], oldest: datetime) -> Lsn:
    """The boundary up to which the change log may be deleted; ``start``, where the log begins, if nothing may be
    deleted.

    ``needed`` has the LSN up to which each followed table (its ``replay_lsn``) and each other consumer has the changes.
    A table at R needs the transactions with ``commit_lsn >= R``, so it needs every batch that ends above R. A batch is
    deleted whole, together with all batches below it, and only if every file with rows of the batch may be deleted. The
    age of a batch is the age of its files. It is not computed from ``commit_ts``, which does not always rise: for a
    transaction that the source received by replication, it is the time of the commit on the other server.
    """
    left = sorted(files, key=lambda file: file.last_end)
    stay = [file.first_end for file in left if file.written > oldest or any(file.last_end > lsn for lsn in needed)]
    bound = min(stay, default=None)
    # Goes from the last file to the first. If a batch stays, each file with rows of this batch stays too, and so do all
    # other batches with rows in that file.
    for file in reversed(left):
        if bound is not None and file.last_end >= bound:
            bound = min(bound, file.first_end)
    ends = [file.last_end for file in left if bound is None or file.last_end < bound]
    return max([start, *ends])
