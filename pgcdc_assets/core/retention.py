"""What may be forgotten: never what a consumer still needs, never what is young, and only from the front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from pgcdc_assets.core.lsn import Lsn

GRACE: Final = timedelta(hours=1)
"""Younger things stay whatever the settings say: somebody may be reading them (a query, ``verify``), and a
process that was killed may need a moment to die."""

LONGEST_POINTS: Final = timedelta(days=15)
"""Delta keeps the log of a mirror's versions for 30 days, and a version may have stood for some before."""


def oldest_kept(now: datetime, retention: timedelta, grace: timedelta = GRACE) -> datetime:
    """What was written before this may go."""
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
