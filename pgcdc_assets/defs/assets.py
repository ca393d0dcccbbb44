"""The assets from slot to mirrors, created from the saved catalog.

The assets of all tables in one stage (snapshot, changes or mirror) share one op, which can run for any subset of the
tables. The reason is that the tables share the work: one Spark job decodes the changes of all tables.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.keys import op_name
from pgcdc_assets.defs.partitions import DELETE, Selection
from pgcdc_assets.defs.replication import Replication, Stage
from pgcdc_assets.defs.runs import writing_run
from pgcdc_assets.defs.sync import SyncConfig, engine_at_rest, run_sync

if TYPE_CHECKING:
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import RangeReport

IN_ONE_RUN = dg.BackfillPolicy.single_run()
"""Dagster makes one run for a backfill. The engine processes all its ranges as one range, and starts Spark once."""

COPY_AGAIN = "Copy the selected tables again. Without this option, only tables that have no copy yet are copied."

Chosen = Mapping[str, Table]
"""The tables that a run selects, by the names of their op outputs."""
Outputs = Iterator[dg.Output[None]]
Process = Callable[["Engine", LsnRange], "RangeReport"]
"""The function that a Dagster run calls to process a range."""


def pipeline_assets(of: Replication, catalog: Catalog) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """All assets except the slot. The asset of logical messages needs the setting ``messages``."""
    tables = list(catalog.tables)
    return [
        change_log_asset(of),
        *source_tables(of, tables),
        snapshot_assets(of, tables),
        changes_assets(of, tables),
        mirror_assets(of, tables),
        consistent_points(of, tables),
        *([messages_asset(of)] if of.settings.messages else []),
    ]


def change_log_asset(of: Replication) -> dg.AssetsDefinition:
    return _asset_of_ranges(
        of,
        of.names.change_log,
        of.names.slot,
        "The changes as PostgreSQL sent them by logical replication. The sync job writes them here before it confirms "
        "their LSN to the slot. Materializing a range by hand only checks that the log contains the whole range. It "
        "does not receive the changes again.",
        "check of the change log",
        lambda engine, span: engine.check_range(span),
        metadata.of_log,
    )


def messages_asset(of: Replication) -> dg.AssetsDefinition:
    return _asset_of_ranges(
        of,
        of.names.messages,
        of.names.change_log,
        "Logical messages (pg_logical_emit_message) with the prefixes in the setting `messages`, in commit order. "
        "The sync job writes them. Lake(root).at(lsn).messages() reads the messages up to a consistent point. "
        "Materializing a range writes its messages again, from the change log.",
        "messages",
        lambda engine, span: engine.messages_range(span),
        metadata.of_messages,
    )


def _asset_of_ranges(
    of: Replication,
    key: dg.AssetKey,
    upstream: dg.AssetKey,
    description: str,
    command: str,
    process: Process,
    found: Callable[["RangeReport"], metadata.Metadata],
) -> dg.AssetsDefinition:
    """An asset that is not divided by tables, with its own op. ``found`` makes the asset's metadata from a report."""

    @dg.asset(
        key=key,
        deps=[upstream],
        partitions_def=of.names.lsn_ranges,
        backfill_policy=IN_ONE_RUN,
        group_name=of.names.source,
        kinds={"postgres", "deltalake"},
        required_resource_keys=of.resource_keys,
        pool=of.pool,
        description=description,
    )
    def asset(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        selection, report = _over_selection(of, context, command, process)
        _tell(context, context.asset_key, selection, found(report))
        return dg.MaterializeResult()

    return asset


def _over_selection(
    of: Replication, context: dg.AssetExecutionContext, command: str, process: Process
) -> tuple[Selection, "RangeReport"]:
    """Process the selected partitions as one range. Logs the selection's warnings."""
    with writing_run(of, context.op_execution_context):
        selection = Selection(context.partition_keys, of.register(context.instance))
        for line in selection.told:
            context.log.warning(line)
        return selection, process(engine_at_rest(of, context.op_execution_context, command), selection.span)


def source_tables(of: Replication, tables: Sequence[Table]) -> list[dg.AssetSpec]:
    """The tables in PostgreSQL as external assets, where the lineage of columns starts."""
    return [
        dg.AssetSpec(
            of.names.source_table(table.name),
            kinds={"postgres"},
            group_name=of.names.of("source"),
            metadata={"dagster/column_schema": metadata.column_schema(table)},
            description=f"Table {table.name} of the source.",
        )
        for table in tables
    ]


def snapshot_assets(of: Replication, tables: Sequence[Table]) -> dg.AssetsDefinition:
    def copy(context: dg.AssetExecutionContext, chosen: Chosen) -> Outputs:
        """Runs a sync, which copies the tables that have no copy yet. With ``copy_again``, copies all selected
        tables."""
        names = [str(table.name) for table in chosen.values()]
        again = bool(context.op_execution_context.op_config["copy_again"])
        config = SyncConfig(copy_anew=names if again else [], command="snapshot")
        report = run_sync(of, context.op_execution_context, config)
        points = {copy.table: copy for copy in report.copied}
        missing = [str(table.name) for table in chosen.values() if table.name not in points]
        for out, table in chosen.items():
            if table.name in points:
                yield dg.Output(None, out, metadata=metadata.of_copy(points[table.name], table))
        if missing and again:
            raise dg.Failure(f"the run ended before it copied {', '.join(missing)}", allow_retries=False)
        if missing:
            asked = "for a new copy, set copy_again in the run's configuration"
            context.log.info(f"tables that already have a copy were not copied again: {', '.join(missing)}; {asked}")

    return _assets_of_tables(
        of,
        "snapshot",
        tables,
        partitions=of.names.snapshot_ranges,
        ins={"slot": dg.AssetIn(of.names.slot, dagster_type=dg.Nothing)},
        upstream=lambda table: {of.names.slot},
        materialise=copy,
        config_schema={"copy_again": dg.Field(bool, default_value=False, description=COPY_AGAIN)},
    )


def changes_assets(of: Replication, tables: Sequence[Table]) -> dg.AssetsDefinition:
    def transform(context: dg.AssetExecutionContext, chosen: Chosen) -> Outputs:
        names = [table.name for table in chosen.values()]
        selection, report = _over_selection(
            of, context, "changes", lambda engine, span: engine.transform_range(names, span)
        )
        for out, table in chosen.items():
            found = metadata.of_changes(report, report.tables.get(table.name))
            _tell(context, context.asset_key_for_output(out), selection, found)
            yield dg.Output(None, out)

    return _assets_of_tables(
        of,
        "changes",
        tables,
        partitions=of.names.lsn_ranges,
        ins={"change_log": dg.AssetIn(of.names.change_log, dagster_type=dg.Nothing)}
        | {
            op_name("from_source", table.name): dg.AssetIn(of.names.source_table(table.name), dagster_type=dg.Nothing)
            for table in tables
        },
        upstream=lambda table: {of.names.change_log, of.names.source_table(table.name)},
        materialise=transform,
    )


def mirror_assets(of: Replication, tables: Sequence[Table]) -> dg.AssetsDefinition:
    def apply(context: dg.AssetExecutionContext, chosen: Chosen) -> Outputs:
        names = [table.name for table in chosen.values()]
        selection, report = _over_selection(of, context, "apply", lambda engine, span: engine.apply_range(names, span))
        for out, table in chosen.items():
            found = metadata.of_mirror(report, report.tables.get(table.name), table)
            _tell(context, context.asset_key_for_output(out), selection, found)
            yield dg.Output(None, out)

    sources = {}
    for table in tables:
        sources[op_name("from_changes", table.name)] = dg.AssetIn(
            of.spec("changes", table).key, dagster_type=dg.Nothing
        )
        # A mirror depends on the newest copy of its table. Copies and ranges have different partition keys. By default,
        # Dagster would look for a copy whose key is the range's key.
        sources[op_name("from_snapshot", table.name)] = dg.AssetIn(
            of.spec("snapshot", table).key, dagster_type=dg.Nothing, partition_mapping=dg.AllPartitionMapping()
        )
    return _assets_of_tables(
        of,
        "mirror",
        tables,
        partitions=of.names.lsn_ranges,
        ins=sources,
        upstream=lambda table: {of.spec("changes", table).key, of.spec("snapshot", table).key},
        materialise=apply,
    )


def _assets_of_tables(
    of: Replication,
    stage: Stage,
    tables: Iterable[Table],
    *,
    partitions: dg.PartitionsDefinition[str],
    ins: Mapping[str, dg.AssetIn],
    upstream: Callable[[Table], set[dg.AssetKey]],
    materialise: Callable[[dg.AssetExecutionContext, Chosen], Outputs],
    config_schema: Mapping[str, dg.Field] | None = None,
) -> dg.AssetsDefinition:
    """The assets of a stage: one asset per table, and one op for all of them. ``materialise`` gets the tables that a
    run selects.

    Dagster would derive the names of an op's outputs from asset keys, and give the same name to different keys. So this
    function names the outputs, and reads a run's selection from their names. This works also if the user's project puts
    a prefix before the keys.
    """
    by_out = {op_name(stage, table.name): table for table in tables}

    @dg.multi_asset(
        name=of.names.of(f"{stage}_assets"),
        outs={
            out: dg.AssetOut.from_spec(of.spec(stage, table), dagster_type=dg.Nothing, is_required=False)
            for out, table in by_out.items()
        },
        ins=ins,
        internal_asset_deps={out: upstream(table) for out, table in by_out.items()},
        partitions_def=partitions,
        backfill_policy=IN_ONE_RUN,
        can_subset=True,
        config_schema=config_schema,
        required_resource_keys=of.resource_keys,
        pool=of.pool,
    )
    def assets(context: dg.AssetExecutionContext) -> Outputs:
        selected = context.op_execution_context.selected_output_names
        yield from materialise(context, {out: table for out, table in by_out.items() if out in selected})

    return assets


def consistent_points(of: Replication, tables: Sequence[Table]) -> dg.AssetSpec:
    """The asset of consistent points, which only a sync writes. It cannot be materialized by hand, because a point may
    list only mirrors that are at the same LSN."""
    return dg.AssetSpec(
        of.names.consistent_points,
        deps=[of.spec("mirror", table).key for table in tables],
        partitions_def=of.names.lsn_ranges,
        group_name=of.names.of("mirror"),
        kinds={"deltalake"},
        freshness_policy=of.freshness,
        description="One row per consistent point: its LSN (replay_lsn), the mirrors that are exactly at this LSN, and "
        "their Delta versions. Lake(root).at(lsn) uses the row to read all these mirrors at one LSN.",
    )


def _tell(context: dg.AssetExecutionContext, key: dg.AssetKey, selection: Selection, found: metadata.Metadata) -> None:
    """Record metadata for each selected partition (see :func:`metadata.of_each`)."""
    for span, own in metadata.of_each(selection.ranges, selection.span, found):
        context.add_asset_metadata(own, asset_key=key, partition_key=span.key)
    for odd in selection.odd:
        passed_over = {
            "passed_over": dg.MetadataValue.text(f"this partition is not a range of the change log; {DELETE}")
        }
        context.add_asset_metadata(passed_over, asset_key=key, partition_key=odd)
