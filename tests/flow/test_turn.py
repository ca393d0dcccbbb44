"""A turn searches the whole log, also above its own end, for rows of unknown partitions. The tests need only batch
summaries."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.turn import take_turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.structure.record import Strange, TableRecord, UnreadRows

ROOT = Table(100, TableName("public", "root"), (Column(1, "id", PgType(23, "int4")),), key=(1,))
UNKNOWN_LEAF = 200


@dataclass
class Progress:
    """Replaces :class:`TablesProgress`: contains the records of all tables."""

    records: dict[TableName, TableRecord]
    router: Router = field(default_factory=lambda: Router.of([ROOT]))

    def __getitem__(self, name: TableName) -> TableRecord:
        return self.records[name]

    def hold(self, name: TableName, unread: UnreadRows) -> None:
        self.records[name] = replace(self.records[name], unread=unread)

    def moved(self, name: TableName, lsn: Lsn) -> None:
        self.records[name] = replace(self.records[name], replay_lsn=lsn)


def batch(start: int, end: int, *leaves: int) -> BatchSummary:
    partitions = {ROOT.oid: leaves} if leaves else {}
    return BatchSummary(Lsn(start), Lsn(end), 1, 1, None, None, None, {}, {}, 0, {}, (), partitions)


@pytest.mark.parametrize(
    ("stray_batch", "held"),
    [(1, True), (2, True), (None, False)],
    ids=["in the turn's batch", "in a later batch", "no stray"],
)
def test_rows_of_an_unknown_partition_anywhere_in_the_log_stop_their_table(stray_batch: int | None, held: bool) -> None:
    """The partition may have been attached below the turn's end, with rows that are never streamed. The table then
    waits for a catalog check."""
    batches = [batch(number * 16, number * 16 + 16, *([UNKNOWN_LEAF] if number == stray_batch else []))
               for number in (1, 2)]  # fmt: skip
    log = cast(ChangeLog, SimpleNamespace(batches=lambda start: [one for one in batches if one.end > start]))
    progress = Progress({ROOT.name: TableRecord(ROOT, TableState.STREAMING, Lsn(16))})
    work: Any = SimpleNamespace(progress=progress, observer=Silent())
    take_turn(cast(Work, work), LogSpan(log, LsnRange(Lsn(16), Lsn(48))), Lsn(32), [*progress.records.values()])
    record = progress[ROOT.name]
    assert (record.replay_lsn, record.unread is not None) == ((Lsn(16), True) if held else (Lsn(32), False))
    assert record.unread is None or record.unread.how is Strange.PARTITION
