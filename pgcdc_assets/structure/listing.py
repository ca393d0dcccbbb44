"""Decides which tables a consistent point may list. A point may list a table only if it is certain that, at the LSN of
the point, the source had a table of this name with the structure of the mirror."""

from __future__ import annotations

from collections.abc import Container, Iterable

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.structure.record import TableRecord


def shown(record: TableRecord, lsn: Lsn) -> bool:
    """Whether the source, at ``lsn``, certainly had the table under its name and with the structure of its mirror."""
    if record.reshaping or record.since_columns is not None or record.listed_from is None:
        return False
    lineage = record.table.lineage
    return record.listed_from <= lsn and (lineage is None or lineage.since <= lsn)


def versions_at(records: Iterable[TableRecord], lsn: Lsn) -> dict[TableName, int]:
    """The versions of the mirrors that a point at ``lsn`` would list."""
    return {record.table.name: record.version for record in records
            if record.followed and record.replay_lsn == lsn and shown(record, lsn)}  # fmt: skip


def structures_from(records: Iterable[TableRecord]) -> Lsn:
    """The LSN at and above which the source certainly has, for all followed tables, the structure of the mirror."""
    lineages = (record.table.lineage for record in records if record.followed)
    return max((Lsn(lineage.since) for lineage in lineages if lineage is not None), default=ZERO)


def late(records: Iterable[TableRecord], newest: Lsn) -> list[TableRecord]:
    """The followed tables that are below the ``newest`` point, because they were copied while changes of other tables
    were applied. Empty if all followed tables are below this point."""
    followed = [record for record in records if record.followed]
    below = [record for record in followed if record.replay_lsn < newest]
    return below if len(below) < len(followed) else []


def left_out(records: Iterable[TableRecord], listed: Container[TableName], lsn: Lsn) -> set[TableName]:
    """The tables that an existing point at ``lsn`` lists (``listed``), but that a new point at this LSN may not list,
    because their structure or name has changed."""
    changed = (record for record in records if record.former is not None
               or (record.followed and not shown(record, lsn)))  # fmt: skip
    return {record.table.name for record in changed if record.table.name in listed}
