"""Rewrites files of a mirror during sync, so that a turn's cost does not grow with the number of turns.

Each turn leaves a small file in each mirror that changed. Once there are many small files, their live rows are written
to one file, in a commit that changes no row and no position. Each turn also rewrites the whole deletion vector of every
file that it touches. So a large file with many deleted rows is rewritten without these rows, one file at a time. Files
of medium size are left to ``pgcdc maintain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.log import Added
from pgcdc_assets.failures import contained
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, gathered

SMALL_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class Compaction:
    """When files of a mirror are rewritten."""

    look_every: int = 10
    """Versions of a mirror between two checks of its files. Each version adds one small file, and adds the rows that it
    deletes to the vectors."""
    most_small: int = 32
    """Up to this many small files are left alone: to open a file costs a merge less than a millisecond."""
    worn_share: int = 32
    """A file is worn if one row in this many is deleted. A vector has two bytes for each deleted row, and is written
    with every turn."""
    fewest_worn: int = 10_000
    """A file with fewer deleted rows than this is not worn."""

    def worth_rewriting(self, live: Sequence[Added]) -> tuple[Added, ...]:
        """The files to rewrite as one now: the small files if there are many, or the most worn file; usually none."""
        return self.small_files(live) or self.worn_file(live)

    def small_files(self, live: Sequence[Added]) -> tuple[Added, ...]:
        small = tuple(file for file in live if file.size < SMALL_BYTES and file.rows is not None)
        return small if len(small) > self.most_small else ()

    def worn_file(self, live: Sequence[Added]) -> tuple[Added, ...]:
        worn = [file for file in live if file.rows is not None and self._is_worn(file.rows, file.deleted)]
        return tuple(sorted(worn, key=lambda file: -file.deleted)[:1])

    def _is_worn(self, rows: int, deleted: int) -> bool:
        return deleted >= max(self.fewest_worn, rows / self.worn_share)


COMPACTION: Final = Compaction()


@dataclass(frozen=True)
class Compacted:
    """The result of rewriting a mirror's files. ``failure``: why one of these files could not be read."""

    report: FileReport | None = None
    failure: str | None = None


def compact_mirror(target: MergeTarget) -> Compacted:
    """Write the target's files to one file. A file that cannot be read is a failure of that mirror alone."""
    with contained() as failed:
        return Compacted(compact_file(target))
    return Compacted(failure=failed.told)


def compact_file(target: MergeTarget) -> FileReport | None:
    """Write the live rows of the target's files to one file; None if there are no live rows. Runs in a Spark task."""
    with DataFile(target.folder, target.schema) as file:
        for rows in gathered(group.read(target.names).filter(pa.array(group.alive)) for group in target.groups({})):
            file.write(rows.columns)
        report = file.finish()
    passed(FaultPoint.MIRROR_FILES_WRITTEN)
    return report
