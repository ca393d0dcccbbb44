"""Reads the change feed of a table up to a consistent point: in order, and in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import dataset
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion
from pgcdc_assets.errors import FeedGap, LakeError
from pgcdc_assets.feed.schema import COMMIT_LSN, ORDINAL
from pgcdc_assets.feed.table import bounds_of

BATCH_BYTES: Final = 8 << 20
"""A batch that a reader gets contains the rows of about this many (compressed) bytes of the feed's files."""
_ORDER: Final = [(COMMIT_LSN, "ascending"), (ORDINAL, "ascending")]


@dataclass(frozen=True)
class ChangeFeed:
    """The changes of a table's feed below a consistent point."""

    name: TableName
    covered: LsnRange
    """The range for which the feed contains all changes of the table. Its end is the point's LSN."""
    _folder: Location
    _delta: DeltaVersion | None

    @classmethod
    def at(cls, layout: Layout, name: TableName, mirror: DeltaVersion, owner: str, upto: Lsn) -> Self:
        """``mirror``: the table's mirror at the point. ``owner``: :meth:`Identity.app_id`. ``upto``: the point."""
        folder = layout.changes(name)
        copied = Lsn(mirror.positions.get(f"{owner}/snapshot/{name.folder}", 0))
        delta = DeltaLog(folder).newest()
        positions = {} if delta is None else delta.positions
        start, end = (Lsn(positions.get(f"{owner}/{part}/{name.folder}", 0)) for part in ("changes_since", "changes"))
        if delta is not None and not end:
            # The feed was emptied, because its rows will be derived again for another structure of the table.
            return cls(name, LsnRange(upto, upto), folder, None)
        if end < copied:
            # Nothing was added to the feed since the copy, because the table has not changed since.
            return cls(name, LsnRange(min(copied, upto), upto), folder, None)
        return cls(name, LsnRange(min(start, upto), upto), folder, delta)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([]) if self._delta is None else self._delta.columns

    def require(self, after: Lsn) -> None:
        """Raises FeedGap if the feed lacks changes at or above ``after``."""
        if after < self.covered.start:
            raise FeedGap(
                f"lacks the changes between {after} and {self.covered.start}",
                thing=f"change feed of {self.name}", lsn=after,
                do="retention deleted them, or the table was copied again; read the whole mirror at a consistent "
                   "point, then the changes above that point",
            )  # fmt: skip

    def rows(self, span: LsnRange, only: pc.Expression | None = None) -> Iterator[pa.Table]:
        """The changes of the span in order, as tables of about ``BATCH_BYTES``. ``only``: only rows for which this is
        true."""
        for files in self._overlapping(span):
            yield from self._ordered(files, span, only)

    def _overlapping(self, span: LsnRange) -> Iterator[list[Added]]:
        """The files with rows of the span, in groups. The LSN ranges of two groups do not overlap. Files of one group
        overlap, for example because several Spark tasks wrote them for one transform."""
        found = [(*bounds_of(file), file) for file in (self._delta.files if self._delta is not None else ())]
        found = sorted((one for one in found if one[0] < span.end and one[1] >= span.start), key=lambda one: one[0])
        held: list[Added] = []
        end = -1
        for low, high, file in found:
            if held and low > end:
                yield held
                held = []
            held.append(file)
            end = max(end, high)
        if held:
            yield held

    def _ordered(self, files: Sequence[Added], span: LsnRange, only: pc.Expression | None) -> Iterator[pa.Table]:
        lsn = pc.field(COMMIT_LSN)
        wanted = _all([lsn >= int(span.start), lsn < int(span.end), *([] if only is None else [only])])
        order = self._read(files, wanted, [COMMIT_LSN, ORDINAL]).sort_by(_ORDER)
        rows, size = sum(file.rows or 0 for file in files), sum(file.size for file in files)
        step = max(1, BATCH_BYTES * rows // max(size, 1))
        for first in range(0, order.num_rows, step):
            part = order.slice(first, step)
            if part.num_rows == order.num_rows:
                yield self._read(files, wanted).sort_by(_ORDER)
                return
            ends = [[part[name][at].as_py() for name in (COMMIT_LSN, ORDINAL)] for at in (0, -1)]
            yield self._read(files, _all([wanted, _from(*ends[0]), _upto(*ends[1])])).sort_by(_ORDER)

    def _read(self, files: Sequence[Added], wanted: pc.Expression, names: list[str] | None = None) -> pa.Table:
        try:
            found: pa.Table = dataset([self._folder / file.path for file in files], self.schema).to_table(
                columns=names, filter=wanted
            )
        except (OSError, pa.ArrowException) as error:
            raise LakeError(f"cannot be read: {type(error).__name__}", thing=f"change feed of {self.name}",
                            do="maintenance may have replaced a file: try again") from error  # fmt: skip
        return found


def _from(lsn: int, ordinal: int) -> pc.Expression:
    return (pc.field(COMMIT_LSN) > lsn) | ((pc.field(COMMIT_LSN) == lsn) & (pc.field(ORDINAL) >= ordinal))


def _upto(lsn: int, ordinal: int) -> pc.Expression:
    return (pc.field(COMMIT_LSN) < lsn) | ((pc.field(COMMIT_LSN) == lsn) & (pc.field(ORDINAL) <= ordinal))


def _all(conditions: Sequence[Any]) -> pc.Expression:
    return reduce(lambda left, right: left & right, conditions)
