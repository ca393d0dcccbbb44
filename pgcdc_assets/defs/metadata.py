"""Turns reports into asset metadata. Every LSN is shown as text for people, and as an integer for plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange

if TYPE_CHECKING:
    from pgcdc_assets.flow.reports import RangeReport, StructureChange, TableTurn
    from pgcdc_assets.mirror.target import CopyReport

Metadata = dict[str, dg.MetadataValue]

_LONGEST = 1000
"""The maximum number of characters of a comment. PostgreSQL has no such limit."""
_KINDS = {"I": "inserts", "U": "updates", "D": "deletes", "T": "truncates"}
"""Names for the message types of pgoutput, by their letter."""


def lsns(**positions: Lsn | None) -> Metadata:
    """Each position as two entries: ``<name>`` as text ``X/Y``, and ``<name>_int`` as a number, because only numbers
    can be plotted."""
    found: Metadata = {}
    for name, lsn in positions.items():
        if lsn is not None:
            found[name] = dg.MetadataValue.text(str(lsn))
            found[f"{name}_int"] = dg.MetadataValue.int(int(lsn))
    return found


def numbers(values: Mapping[str, float | int | None], prefix: str = "") -> Metadata:
    """The values that are not None. Floats are rounded to three digits, which are easier to read."""
    return {
        prefix + name: dg.MetadataValue.int(value)
        if isinstance(value, int)
        else dg.MetadataValue.float(round(value, 3))
        for name, value in values.items()
        if value is not None
    }


def of_range(report: RangeReport) -> Metadata:
    """The metadata that each asset gets for a range that has ended."""
    span = report.span
    positions = lsns(
        start_lsn=span.start, end_lsn=span.end, transform_lsn=report.transform_lsn, replay_lsn=report.replay_lsn
    )
    times: Metadata = {}
    if report.committed is not None:
        first, last = (dg.MetadataValue.timestamp(at.timestamp()) for at in report.committed)
        times = {"first_commit": first, "last_commit": last}
    return (
        positions
        | times
        | numbers(
            {"lag_bytes": report.lag_bytes, "lag_seconds": report.lag_seconds, "transactions": report.transactions}
        )
    )


def of_each(ranges: Sequence[LsnRange], whole: LsnRange, found: Metadata) -> Iterator[tuple[LsnRange, Metadata]]:
    """Each range of ``ranges`` with its own metadata. Every range gets its own LSN bounds. ``found`` has the counts of
    the ``whole`` range that a run processed, so only the last range gets ``found``. Plots and sums then count nothing
    twice."""
    for span in ranges:
        own = lsns(start_lsn=span.start, end_lsn=span.end)
        if span != whole:
            counted = f"the counts are for the range {whole}; of its partitions, only the last one has them"
            own["counted"] = dg.MetadataValue.text(counted)
        yield span, found | own if span == ranges[-1] else own


def of_structure(report: StructureChange) -> Metadata:
    """The metadata of a mirror for a change of its table's structure."""
    return (
        lsns(since_lsn=report.since)
        | numbers({"version": report.version})
        | {
            "followed": dg.MetadataValue.text(
                "the table was copied again" if report.copied else "the mirror was changed"
            ),
            "from": dg.MetadataValue.text(_columns_of(report.before)),
            "to": dg.MetadataValue.text(_columns_of(report.after)),
        }
    )


def _columns_of(table: Table) -> str:
    return ", ".join(f"{column.name} {column.type.name}" for column in table.columns)


def of_log(report: RangeReport) -> Metadata:
    rows = {_KINDS.get(kind, kind): count for kind, count in report.rows.items()}
    return (
        of_range(report)
        | numbers({"rows": sum(rows.values()), "bytes": report.bytes})
        | numbers({"rows_untaken": sum(entry.rows for entry in report.untaken)})
        | numbers(rows, "rows_")
        | numbers(report.seconds, "seconds_")
    )


def of_messages(report: RangeReport) -> Metadata:
    """The metadata of the feed of messages after a range."""
    if report.messages is None:
        return of_range(report)
    counts = {"rows": report.messages.count, "delta_version": report.messages.version}
    return of_range(report) | lsns(messages_lsn=report.messages.complete_to) | numbers(counts)


def of_changes(report: RangeReport, turn: TableTurn | None) -> Metadata:
    """The metadata of a table's change feed for a range. ``turn`` is None for a table without changes."""
    counts = turn.changes if turn else {}
    seconds = {"seconds_transform": turn.seconds_transform} if turn else {}
    rows = {"rows": sum(counts.values())}
    return of_range(report) | numbers(rows) | numbers(counts, "rows_") | numbers(seconds)


def of_mirror(report: RangeReport, turn: TableTurn | None, table: Table | None) -> Metadata:
    """The metadata of a mirror after a range: its changed rows, its own position, its columns and its Delta version."""
    found = of_range(report)
    if turn is not None:
        found |= lsns(replay_lsn=turn.replay_lsn)
    counts = {
        "rows_inserted": turn.inserted if turn else 0,
        "rows_updated": turn.updated if turn else 0,
        "rows_deleted": turn.deleted if turn else 0,
    }
    if turn is not None:
        found |= numbers({"delta_version": turn.version, "seconds_apply": turn.seconds_apply})
        found |= numbers({"dagster/row_count": turn.rows})
    found |= numbers(counts)
    return found | ({"dagster/column_schema": column_schema(table)} if table else {})


def of_copy(report: CopyReport, table: Table | None) -> Metadata:
    found = lsns(consistent_point=report.consistent_point, replay_lsn=report.consistent_point) | numbers(
        {
            "dagster/row_count": report.rows,
            "bytes": report.bytes,
            "files": report.files,
            "seconds": report.seconds,
            "delta_version": report.version,
        }
    )
    return found | ({"dagster/column_schema": column_schema(table)} if table else {})


def of_table(table: Table) -> Metadata:
    """The metadata of a mirror in the definitions, before any run."""
    identity = {"d": "default", "n": "nothing", "f": "full", "i": "index"}[table.replica_identity]
    key = ", ".join(column.name for column in table.key_columns)
    return {
        "dagster/column_schema": column_schema(table),
        "key": dg.MetadataValue.text(key or ("none (multiset of rows)" if table.multiset else "none")),
        "replica_identity": dg.MetadataValue.text(identity),
    }


def lineage(table: Table, upstream: dg.AssetKey) -> Metadata:
    """Lineage metadata: each column comes from the column of the same name in the upstream asset."""
    columns = [column.name for column in table.columns]
    deps = {name: [dg.TableColumnDep(asset_key=upstream, column_name=name)] for name in columns}
    return {"dagster/column_lineage": dg.MetadataValue.column_lineage(dg.TableColumnLineage(deps_by_column=deps))}


def column_schema(table: Table) -> dg.MetadataValue:
    return dg.MetadataValue.table_schema(dg.TableSchema([_column(column, table) for column in table.columns]))


def _column(column: Column, table: Table) -> dg.TableColumn:
    in_key = column.attnum in table.key
    constraints = dg.TableColumnConstraints(nullable=not column.not_null, other=["key"] if in_key else [])
    description = shortened(table.column_comments[column.name])
    return dg.TableColumn(column.name, _type_name(column.type), description, constraints)


def shortened(comment: str | None) -> str | None:
    """A comment from the source, cut to ``_LONGEST`` characters: Dagster stores it again with every materialisation."""
    return comment if comment is None or len(comment) <= _LONGEST else f"{comment[:_LONGEST]}..."


def _type_name(type_: PgType) -> str:
    """The name of a PostgreSQL type. docs/reference/types.md lists the mirror's type for each PostgreSQL type."""
    if type_.element is not None:
        return f"{_type_name(type_.element)}[]"
    return type_.name
