"""What Dagster shows of each table. Users change keys, groups, owners and other properties by a subclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import dagster as dg

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.keys import Names

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
                f"Snapshot copies of {name}, each exact at its consistent point. The sync job copies a table once. For "
                "a new copy, materialize any partition with `copy_again: true` in the run's configuration."
            )
            return dg.AssetSpec(data.key, kinds={"spark", "postgres"}, group_name=group, description=text)
        if data.stage == "changes":
            text = (
                f"Typed change feed of {name}, in commit order. Materializing a range rebuilds it from the change log."
            )
            return dg.AssetSpec(data.key, kinds={"spark", "deltalake"}, group_name=group, description=text)
        follows = "" if table.updates_seen else " Its updates and deletes are not applied."
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
            "replay_lsn to apply it, or an older range to repair the rows that it touched.",
        )
