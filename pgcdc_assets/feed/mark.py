"""The mark that stands for a commit in feed files that are written before it is known, and how the commit replaces it.

A mark has the size of a commit: a random number in the columns ``_pgcdc_commit_lsn`` and ``_pgcdc_commit_ts``, and in
what the file says of itself. These columns are not compressed, and each has one value, so the mark stands in a file
some dozen times, however many rows there are.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.file import feed_file
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, FeedFile
from pgcdc_assets.log.latefacts import LateFacts
from pgcdc_assets.store import storage

_DIGITS = 19
"""Of a commit_lsn's mark, as text: as many as the largest LSN has, which is written to the right of blanks."""


@dataclass(frozen=True)
class Mark:
    """What stands in the place of a commit. No value of a user's is likely to be the same number."""

    commit_lsn: int
    commit_ts: int

    @classmethod
    def new(cls) -> Mark:
        lsn = 10 ** (_DIGITS - 1) + secrets.randbelow(8 * 10 ** (_DIGITS - 1))
        # In a year from 6723 to 8307: statistics hold it as a date.
        return cls(lsn, 150_000_000_000_000_000 + secrets.randbelow(50_000_000_000_000_000))

    def landed(self, folder: Location, file: FeedFile, to: Location, late: LateFacts) -> FeedFile:
        """Write the commit over the marks of a file, and put it into the feed's folder ``to``."""
        draft, path = storage.draft(folder / file.name), to / file.name
        draft.patch(self._changes(late))
        storage.put(draft, path)
        _check(path, late)
        return feed_file(path, file.size)

    def _changes(self, late: LateFacts) -> dict[bytes, bytes]:
        """What is to be written over what."""
        commit_lsn, commit_ts = int(late.commit_lsn), late.commit_ts
        return {
            self.commit_lsn.to_bytes(8, "little"): commit_lsn.to_bytes(8, "little"),
            self.commit_ts.to_bytes(8, "little", signed=True): commit_ts.to_bytes(8, "little", signed=True),
            str(self.commit_lsn).encode(): str(commit_lsn).rjust(_DIGITS).encode(),
        }


def _check(path: Location, late: LateFacts) -> None:
    """Each row has the commit, and nothing else."""
    rows = pq.read_table(storage.open_file(path), columns=[COMMIT_LSN, COMMIT_TS], partitioning=None)
    found = {*pc.unique(rows[COMMIT_LSN]).to_pylist(), *pc.unique(rows[COMMIT_TS].cast("int64")).to_pylist()}
    if found != {late.commit_lsn, late.commit_ts}:
        raise LakeError("does not have its commit in all rows", thing=str(path), lsn=Lsn(late.commit_lsn))
