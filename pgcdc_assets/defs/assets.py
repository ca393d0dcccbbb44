"""The assets from slot to mirrors, created from the saved catalog.

All assets of a kind share one op, which can run for any subset of the tables. The reason is that the work is shared:
one Spark job decodes the changes of all tables, and one turn applies them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import dagster as dg

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.defs import keys, metadata
from pgcdc_assets.defs.metadata import Metadata
from pgcdc_assets.defs.observer import Watcher
from pgcdc_assets.defs.partitions import DELETE, LSN_RANGES, SNAPSHOT_RANGES, RangeRegister, Selection
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.sync import SyncConfig, engine_at_rest, run_sync, writing_run

IN_ONE_RUN = dg.BackfillPolicy.single_run()
"""The engine processes a contiguous selection as one range, with one start of Spark."""

Chosen = Mapping[str, Table]
"""The tables that a run selects, by the names of their op outputs."""
Outputs = Iterator[dg.Output[None]]


def pipeline_assets(catalog: Catalog, *, messages: bool = False) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """All assets except the slot. ``messages`` adds the asset of logical messages."""
    tables = list(catalog.tables)
    return [
        change_log_asset(),
        snapshot_assets(tables),
        changes_assets(tables),
        mirror_assets(tables),
        consistent_points(tables),
        *([messages_asset()] if messages else []),
    ]


def change_log_asset() -> dg.AssetsDefinition:
    @dg.asset(
        key=keys.CHANGE_LOG,
        deps=[keys.SLOT],
        partitions_def=LSN_RANGES,
        backfill_policy=IN_ONE_RUN,
        group_name="log",
        kinds={"postgres", "deltalake"},
        description=(
            "The messages of logical replication as PostgreSQL sent them: append-only, durable before the slot is "
            "confirmed. Written by the sync job. Materialising a range by hand checks that it is in the log, whole; "
            "it is never received twice."
        ),
    )
    def change_log(
        context: dg.AssetExecutionContext, engines: Engines, watcher: dg.ResourceParam[Watcher]
    ) -> dg.MaterializeResult[None]:
        with writing_run(context.op_execution_context):
            selection = _selection(context)
            engine = engine_at_rest(context.op_execution_context, engines, watcher, "check of the change log")
            report = engine.check_range(selection.span)
        _tell(context, keys.CHANGE_LOG, selection, metadata.of_log(report))
        return dg.MaterializeResult()

    return change_log


def messages_asset() -> dg.AssetsDefinition:
    @dg.asset(
        key=keys.MESSAGES,
        deps=[keys.CHANGE_LOG],
        partitions_def=LSN_RANGES,
        backfill_policy=IN_ONE_RUN,
        group_name="changes",
        kinds={"postgres", "deltalake"},
        description=(
            "Logical messages (pg_logical_emit_message) of the prefixes that the setting `messages` names, in the "
            "order of their commits. Written by the sync job, with the mirrors: Lake(root).at(lsn).messages() reads "
            "those of a consistent point. Materialising a range derives it again from the log."
        ),
    )
    def messages(
        context: dg.AssetExecutionContext, engines: Engines, watcher: dg.ResourceParam[Watcher]
    ) -> dg.MaterializeResult[None]:
        with writing_run(context.op_execution_context):
            selection = _selection(context)
            engine = engine_at_rest(context.op_execution_context, engines, watcher, "messages")
            report = engine.messages_range(selection.span)
        _tell(context, keys.MESSAGES, selection, metadata.of_messages(report))
        return dg.MaterializeResult()

    return messages


def snapshot_assets(tables: Sequence[Table]) -> dg.AssetsDefinition:
    def out(table: Table) -> dg.AssetOut:
        return _out(
            keys.snapshot_key(table.name),
            kinds={"spark", "postgres"},
            description=f"Copies of {table.name} under an exported snapshot, each exact at its consistent point. "
            'Materialising any partition asks for a new copy: so does "Materialize all", for every table that is '
            "selected.",
        )

    def copy(context: dg.AssetExecutionContext, chosen: Chosen, engines: Engines, watcher: Watcher) -> Outputs:
        names = [str(table.name) for table in chosen.values()]
        config = SyncConfig(copy_anew=names, command="snapshot")
        report = run_sync(context.op_execution_context, config, engines, watcher)
        points = {copy.table: copy for copy in report.copied}
        missing = [str(table.name) for table in chosen.values() if table.name not in points]
        for out, table in chosen.items():
            if table.name in points:
                yield dg.Output(None, out, metadata=metadata.of_copy(points[table.name], table))
        if missing:
            raise dg.Failure(f"the run ended before the copy of {', '.join(missing)}", allow_retries=False)

    return _assets_of_tables(
        "snapshot",
        tables,
        out,
        partitions=SNAPSHOT_RANGES,
        ins={"slot": dg.AssetIn(keys.SLOT, dagster_type=dg.Nothing)},
        upstream=lambda table: {keys.SLOT},
        materialise=copy,
    )


def changes_assets(tables: Sequence[Table]) -> dg.AssetsDefinition:
    def out(table: Table) -> dg.AssetOut:
        return _out(
            keys.changes_key(table.name),
            kinds={"spark", "deltalake"},
            description=f"Typed change feed of {table.name}, in commit order. Materialising a range derives it "
            "again from the log.",
        )

    def transform(context: dg.AssetExecutionContext, chosen: Chosen, engines: Engines, watcher: Watcher) -> Outputs:
        with writing_run(context.op_execution_context):
            selection = _selection(context)
            engine = engine_at_rest(context.op_execution_context, engines, watcher, "changes")
            report = engine.transform_range([table.name for table in chosen.values()], selection.span)
        for out, table in chosen.items():
            found = metadata.of_changes(report, report.tables.get(table.name))
            _tell(context, keys.changes_key(table.name), selection, found)
            yield dg.Output(None, out)

    return _assets_of_tables(
        "changes",
        tables,
        out,
        partitions=LSN_RANGES,
        ins={"change_log": dg.AssetIn(keys.CHANGE_LOG, dagster_type=dg.Nothing)},
        upstream=lambda table: {keys.CHANGE_LOG},
        materialise=transform,
    )


def mirror_assets(tables: Sequence[Table]) -> dg.AssetsDefinition:
    def out(table: Table) -> dg.AssetOut:
        follows = "" if table.updates_seen else " Its updates and deletes are not applied."
        comment = f"{metadata.shortened(table.comment)}\n\n" if table.comment else ""
        return _out(
            keys.mirror_key(table.name),
            kinds={"deltalake", "spark"},
            metadata=metadata.of_table(table),
            description=f"{comment}{table.name}, equal to the source at its replay_lsn.{follows} Materialising a range "
            "above replay_lsn applies it; at or below, it repairs the keys that the range touched.",
        )

    def apply(context: dg.AssetExecutionContext, chosen: Chosen, engines: Engines, watcher: Watcher) -> Outputs:
        with writing_run(context.op_execution_context):
            selection = _selection(context)
            engine = engine_at_rest(context.op_execution_context, engines, watcher, "apply")
            report = engine.apply_range([table.name for table in chosen.values()], selection.span)
        for out, table in chosen.items():
            found = metadata.of_mirror(report, report.tables.get(table.name), table)
            _tell(context, keys.mirror_key(table.name), selection, found)
            yield dg.Output(None, out)

    sources = {}
    for table in tables:
        sources[keys.op_name("from_changes", table.name)] = dg.AssetIn(
            keys.changes_key(table.name), dagster_type=dg.Nothing
        )
        # A mirror depends on its newest copy, which has a key of its own. By default Dagster would look for a copy with
        # the key of the range.
        sources[keys.op_name("from_snapshot", table.name)] = dg.AssetIn(
            keys.snapshot_key(table.name), dagster_type=dg.Nothing, partition_mapping=dg.AllPartitionMapping()
        )
    return _assets_of_tables(
        "mirror",
        tables,
        out,
        partitions=LSN_RANGES,
        ins=sources,
        upstream=lambda table: {keys.changes_key(table.name), keys.snapshot_key(table.name)},
        materialise=apply,
    )


def _out(key: dg.AssetKey, *, kinds: set[str], description: str, metadata: Metadata | None = None) -> dg.AssetOut:
    return dg.AssetOut(
        key=key, dagster_type=dg.Nothing, is_required=False, kinds=kinds, description=description, metadata=metadata
    )


def _assets_of_tables(
    name: str,
    tables: Iterable[Table],
    out: Callable[[Table], dg.AssetOut],
    *,
    partitions: dg.PartitionsDefinition[str],
    ins: Mapping[str, dg.AssetIn],
    upstream: Callable[[Table], set[dg.AssetKey]],
    materialise: Callable[[dg.AssetExecutionContext, Chosen, Engines, Watcher], Outputs],
) -> dg.AssetsDefinition:
    """One op for all assets of a kind, with one asset per table. ``materialise`` gets the tables that a run selects."""
    by_out = {keys.op_name(name, table.name): table for table in tables}

    @dg.multi_asset(
        name=name,
        outs={key: out(table) for key, table in by_out.items()},
        ins=ins,
        internal_asset_deps={key: upstream(table) for key, table in by_out.items()},
        partitions_def=partitions,
        backfill_policy=IN_ONE_RUN,
        can_subset=True,
        group_name=name,
    )
    def assets(context: dg.AssetExecutionContext, engines: Engines, watcher: dg.ResourceParam[Watcher]) -> Outputs:
        selected = context.op_execution_context.selected_output_names
        chosen = {key: table for key, table in by_out.items() if key in selected}
        yield from materialise(context, chosen, engines, watcher)

    return assets


def consistent_points(tables: Sequence[Table]) -> dg.AssetSpec:
    """The asset of consistent points, which every turn writes. It has no op of its own, so that no point can combine
    tables that are at different LSNs."""
    return dg.AssetSpec(
        keys.CONSISTENT_POINTS,
        deps=[keys.mirror_key(table.name) for table in tables],
        partitions_def=LSN_RANGES,
        group_name="mirror",
        kinds={"deltalake"},
        description="One row per turn: replay_lsn, and the Delta version of every mirror that stands exactly there. "
        "Lake(root).at(lsn) reads all tables together by it.",
    )


def _selection(context: dg.AssetExecutionContext) -> Selection:
    """The selected partitions as one range. Logs its warnings."""
    selection = Selection(context.partition_keys, RangeRegister(context.instance))
    for line in selection.told:
        context.log.warning(line)
    return selection


def _tell(context: dg.AssetExecutionContext, key: dg.AssetKey, selection: Selection, found: metadata.Metadata) -> None:
    """Record the bounds of each partition. The counts exist only for all partitions together. They are recorded with
    the last partition, so that plots and sums count nothing twice."""
    last = selection.ranges[-1]
    for span in selection.ranges:
        own = metadata.lsns(start_lsn=span.start, end_lsn=span.end)
        if len(selection.ranges) > 1:
            counted = f"{len(selection.ranges)} partitions, {selection.span}, together, with the last of them"
            own["counted"] = dg.MetadataValue.text(counted)
        context.add_asset_metadata(found | own if span == last else own, asset_key=key, partition_key=span.key)
    for odd in selection.odd:
        passed_over = {"passed_over": dg.MetadataValue.text(f"no range of the log: {DELETE}")}
        context.add_asset_metadata(passed_over, asset_key=key, partition_key=odd)
