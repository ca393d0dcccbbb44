"""One source inside Dagster: its settings, its names, and the specs of its tables' assets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self, get_args

import dagster as dg

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.dagsterinternals import location_of
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.partitions import RangeRegister
from pgcdc_assets.project import SavedCatalog
from pgcdc_assets.settings import Settings

Stage = Literal["snapshot", "changes", "mirror"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class PgcdcTable:
    """One asset of a table."""

    names: Names
    stage: Stage
    table: Table
    uri: str
    """The URI of the table's mirror."""

    @property
    def key(self) -> dg.AssetKey:
        """The asset's key, unless the user chooses another key."""
        return self.names.of_stage(self.stage, self.table.name)


class PgcdcTranslator:
    """Makes the spec of each table's assets. Override :meth:`get_asset_spec` to change what Dagster shows."""

    def get_asset_spec(self, data: PgcdcTable) -> dg.AssetSpec:
        """The spec of one asset. The pipeline adds dependencies and partitions to it."""
        name, table = data.table.name, data.table
        group = data.names.of(data.stage)
        if data.stage == "snapshot":
            text = (
                f"Snapshot copies of {name}. Each copy equals the table at one LSN. The sync job copies a table once. "
                "For a new copy, materialize any partition with `copy_again: true` in the run's configuration."
            )
            return dg.AssetSpec(data.key, kinds={"spark", "postgres"}, group_name=group, description=text)
        if data.stage == "changes":
            text = (
                f"The change feed of {name}: its changes with typed columns, in commit order. Materializing a range "
                "writes its changes again, from the change log."
            )
            return dg.AssetSpec(data.key, kinds={"spark", "deltalake"}, group_name=group, description=text)
        follows = "" if table.updates_seen else " Updates and deletes are not applied."
        comment = f"{metadata.shortened(table.comment)}\n\n" if table.comment else ""
        return dg.AssetSpec(
            data.key,
            kinds={"deltalake", "spark"},
            group_name=group,
            metadata=metadata.of_table(table)
            | {
                "dagster/table_name": dg.MetadataValue.text(f"{data.names.source}.{name}"),
                "dagster/storage_kind": dg.MetadataValue.text("delta"),
                "dagster/uri": dg.MetadataValue.text(data.uri),
            },
            description=f"{comment}{name}, equal to the source at its replay_lsn.{follows} Materialize a range above "
            "replay_lsn to apply it, or an older range to repair the rows that changed in it.",
        )


@dataclass(frozen=True)
class Replication:
    settings: Settings
    translator: PgcdcTranslator = field(default_factory=PgcdcTranslator)
    prefix: tuple[str, ...] = ()
    """Parts before the source's name in every asset key."""
    outside: tuple[str, ...] = ()
    """Parts that the user's project put before pgcdc's asset keys, for example by
    ``load_assets_from_modules(key_prefix=...)``."""
    shown: frozenset[dg.AssetKey] = frozenset()
    """The asset keys of the code location. Only :meth:`within` sets this and ``outside``."""
    running: bool = False
    """Whether sensor and schedule are on when Dagster first loads them. If not, a user turns them on in the UI."""
    freshness: dg.FreshnessPolicy | None = None
    """The policy of ``consistent_points``."""
    pooled: bool = True
    """Whether the ops wait for Dagster's pool of the source, which lets one op run at a time. Commands set False,
    because they wait for the lake's lock instead."""

    @cached_property
    def names(self) -> Names:
        return Names(self.settings.name, self.prefix)

    def within(self, context: dg.OpExecutionContext | dg.SensorEvaluationContext) -> Self:
        """A copy of this object with ``outside`` and ``shown`` as in the code location of this run or sensor. Dagster
        does not report the prefix ``outside``, so it is derived from the change log's key."""
        repository = location_of(context)
        if repository is None:
            return self
        own, shown = self.names.change_log.path, frozenset(repository.asset_graph.get_all_asset_keys())
        found = [key.path for key in shown if key.path[-len(own) :] == own]
        return replace(self, outside=tuple(found[0][: -len(own)]), shown=shown) if len(found) == 1 else self

    def placed(self, key: dg.AssetKey) -> dg.AssetKey:
        """The key under which events of one of pgcdc's assets are recorded: with the prefix ``outside`` if the code
        location has the asset under that key. Dagster puts the prefix before the keys of all assets with an op, but
        leaves out some assets without an op."""
        outer = key.with_prefix(self.outside)
        return outer if outer in self.shown or key not in self.shown else key

    @cached_property
    def _catalog(self) -> SavedCatalog:
        return SavedCatalog(self.settings.catalog_file)

    def table(self, name: TableName) -> Table | None:
        """The table as the saved catalog describes it now. A running sync may have changed the saved catalog."""
        catalog = self._catalog.read()
        return catalog.table(name) if catalog else None

    def spec(self, stage: Stage, table: Table) -> dg.AssetSpec:
        """The spec of one asset of the table. It includes the lineage of the columns, from the source table through the
        change feed to the mirror."""
        if (known := self._specs.get((stage, table))) is None:
            known = self._spec(stage, table)
            if stage != "snapshot":
                source = self.names.source_table(table.name)
                upstream = source if stage == "changes" else self.spec("changes", table).key
                known = known.replace_attributes(metadata={**metadata.lineage(table, upstream), **known.metadata})
            self._specs[stage, table] = known
        return known

    @cached_property
    def _specs(self) -> dict[tuple[Stage, Table], dg.AssetSpec]:
        """Specs that were made already. Dagster requests each spec several times when it loads a location."""
        return {}

    def _spec(self, stage: Stage, table: Table) -> dg.AssetSpec:
        uri = self.settings.layout.mirror(table.name).uri
        return self.translator.get_asset_spec(PgcdcTable(self.names, stage, table, uri))

    def key(self, stage: Stage, name: TableName) -> dg.AssetKey:
        """The key under which events of the table's asset are recorded. If the table is in the catalog, the translator
        decides the key."""
        table = self.table(name)
        return self.placed(self._spec(stage, table).key if table else self.names.of_stage(stage, name))

    @property
    def pool(self) -> str | None:
        return self.names.pool if self.pooled else None

    @property
    def resource_keys(self) -> set[str]:
        """The keys of the resources that every writing op needs."""
        return {self.names.engines, self.names.watcher}

    def register(self, instance: dg.DagsterInstance) -> RangeRegister:
        return RangeRegister(instance, self.names)
