"""The graph from slot to mirrors, drawn from the saved catalog.

All tables of a kind share one op that takes any subset of them, because the work is shared: one Spark
job decodes for all, one turn applies to all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.defs import keys, metadata
from pgcdc_assets.defs.observer import DagsterObserver, Watcher
from pgcdc_assets.defs.partitions import DELETE, LSN_RANGES, SNAPSHOT_RANGES, RangeRegister, Selection
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.sync import SyncConfig, run_sync, writing_run
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pgcdc_assets.flow.engine import Engine

IN_ONE_RUN = dg.BackfillPolicy.single_run()
"""A contiguous selection is one range to the engine, and one start of Spark."""


def pipeline_assets(catalog: Catalog, *, messages: bool = False) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """All assets of the catalog's tables, but the slot; and that of messages, where they are asked for."""
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
            report = _engine(context, engines, watcher, "check of the change log").check_range(selection.span)
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
            report = _engine(context, engines, watcher, "messages").messages_range(selection.span)
        _tell(context, keys.MESSAGES, selection, metadata.of_messages(report))
        return dg.MaterializeResult()

    return messages


def snapshot_assets(tables: Sequence[Table]) -> dg.AssetsDefinition:
    by_out = _by_out("snapshot", tables)

    @dg.multi_asset(
        name="snapshot",
        outs={
            out: dg.AssetOut(
                key=keys.snapshot_key(table.name),
                dagster_type=dg.Nothing,
                is_required=False,
                kinds={"spark", "postgres"},
                description=f"Copies of {table.name} under an exported snapshot, each exact at its consistent point. "
                'Materialising any partition asks for a new copy: so does "Materialize all", for every table that is '
                "selected.",
            )
            for out, table in by_out.items()
        },
        ins={"slot": dg.AssetIn(keys.SLOT, dagster_type=dg.Nothing)},
        internal_asset_deps={out: {keys.SLOT} for out in by_out},
        partitions_def=SNAPSHOT_RANGES,
        backfill_policy=IN_ONE_RUN,
        can_subset=True,
        group_name="snapshot",
    )
    def snapshot(
        context: dg.AssetExecutionContext, engines: Engines, watcher: dg.ResourceParam[Watcher]
    ) -> Iterator[dg.Output[None]]:
        chosen = _selected(context, by_out)
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

    return snapshot


def changes_assets(tables: Sequence[Table]) -> dg.AssetsDefinition:
    by_out = _by_out("changes", tables)

    @dg.multi_asset(
        name="changes",
        outs={
            out: dg.AssetOut(
                key=keys.changes_key(table.name),
                dagster_type=dg.Nothing,
                is_required=False,
                kinds={"spark", "deltalake"},
                description=f"Typed change feed of {table.name}, in commit order. Materialising a range derives it "
                "again from the log.",
            )
            for out, table in by_out.items()
        },
        ins={"change_log": dg.AssetIn(keys.CHANGE_LOG, dagster_type=dg.Nothing)},
        internal_asset_deps={out: {keys.CHANGE_LOG} for out in by_out},
        partitions_def=LSN_RANGES,
        backfill_policy=IN_ONE_RUN,
        can_subset=True,
        group_name="changes",
    )
    def changes(
        context: dg.AssetExecutionContext, engines: Engines, watcher: dg.ResourceParam[Watcher]
    ) -> Iterator[dg.Output[None]]:
        chosen = _selected(context, by_out)
        with writing_run(context.op_execution_context):
            selection = _selection(context)
            engine = _engine(context, engines, watcher, "changes")
            report = engine.transform_range([table.name for table in chosen.values()], selection.span)
        for out, table in chosen.items():
            found = metadata.of_changes(report, report.tables.get(table.name))
            _tell(context, keys.changes_key(table.name), selection, found)
            yield dg.Output(None, out)

    return changes


def mirror_assets(tables: Sequence[Table]) -> dg.AssetsDefinition:
    by_out = _by_out("mirror", tables)
    sources = {}
    for table in tables:
        sources[keys.op_name("from_changes", table.name)] = dg.AssetIn(
            keys.changes_key(table.name), dagster_type=dg.Nothing
        )
        # A mirror rests on its newest copy, whichever that is; by default Dagster would look for a copy of
        # the range's own key.
        sources[keys.op_name("from_snapshot", table.name)] = dg.AssetIn(
            keys.snapshot_key(table.name), dagster_type=dg.Nothing, partition_mapping=dg.AllPartitionMapping()
        )

    @dg.multi_asset(
        name="mirror",
        outs={out: _mirror_out(table) for out, table in by_out.items()},
        ins=sources,
        internal_asset_deps={
            out: {keys.changes_key(table.name), keys.snapshot_key(table.name)} for out, table in by_out.items()
        },
        partitions_def=LSN_RANGES,
        backfill_policy=IN_ONE_RUN,
        can_subset=True,
        group_name="mirror",
    )
    def mirror(
        context: dg.AssetExecutionContext, engines: Engines, watcher: dg.ResourceParam[Watcher]
    ) -> Iterator[dg.Output[None]]:
        chosen = _selected(context, by_out)
        with writing_run(context.op_execution_context):
            selection = _selection(context)
            engine = _engine(context, engines, watcher, "apply")
            report = engine.apply_range([table.name for table in chosen.values()], selection.span)
        for out, table in chosen.items():
            found = metadata.of_mirror(report, report.tables.get(table.name), table)
            _tell(context, keys.mirror_key(table.name), selection, found)
            yield dg.Output(None, out)

    return mirror


def _mirror_out(table: Table) -> dg.AssetOut:
    follows = "" if table.updates_seen else " Published for inserts only: updates and deletes are not seen."
    return dg.AssetOut(
        key=keys.mirror_key(table.name),
        dagster_type=dg.Nothing,
        is_required=False,
        kinds={"deltalake", "spark"},
        metadata=metadata.of_table(table),
        description=f"{table.name}, equal to the source at its replay_lsn.{follows} Materialising a range above "
        "replay_lsn applies it; at or below, it repairs the keys that the range touched.",
    )


def consistent_points(tables: Sequence[Table]) -> dg.AssetSpec:
    """Written by every turn; not an op of its own, so that no point is made of tables that stand apart."""
    return dg.AssetSpec(
        keys.CONSISTENT_POINTS,
        deps=[keys.mirror_key(table.name) for table in tables],
        partitions_def=LSN_RANGES,
        group_name="mirror",
        kinds={"deltalake"},
        description="One row per turn: replay_lsn, and the Delta version of every mirror that stands exactly there. "
        "Lake(root).at(lsn) reads all tables together by it.",
    )


def _by_out(kind: str, tables: Iterable[Table]) -> dict[str, Table]:
    return {keys.op_name(kind, table.name): table for table in tables}


def _selected(context: dg.AssetExecutionContext, by_out: Mapping[str, Table]) -> dict[str, Table]:
    selected = context.op_execution_context.selected_output_names
    return {out: table for out, table in by_out.items() if out in selected}


def _selection(context: dg.AssetExecutionContext) -> Selection:
    """The selected partitions as one range."""
    selection = Selection(context.partition_keys, RangeRegister(context.instance))
    for line in selection.told:
        context.log.warning(line)
    return selection


def _tell(context: dg.AssetExecutionContext, key: dg.AssetKey, selection: Selection, found: metadata.Metadata) -> None:
    """Each partition's own bounds. The counts, which the work has for all together, go with the last of them, so that
    plots and sums count nothing twice."""
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


def _engine(context: dg.AssetExecutionContext, engines: Engines, watcher: Watcher, command: str) -> "Engine":
    settings = Settings.load()
    observer = DagsterObserver(context.op_execution_context, settings.layout, watcher)
    return engines.engine_at_rest(settings, observer, command)
