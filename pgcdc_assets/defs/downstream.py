"""For the assets that users build on mirrors: an automation condition, and mirrors as inputs. All inputs of a run are
read at one consistent point."""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.core.names import TableName

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc_assets.core.lsn import Lsn
    from pgcdc_assets.lake.point import LakeAt


def mirror_updated() -> dg.AutomationCondition[dg.AssetKey]:
    """True when a mirror that the asset depends on has changed. Like :meth:`dagster.AutomationCondition.eager`, but
    true also if ranges of a mirror are missing.

    If a table was copied later than others (because it was published later, or was not followed for some time), its
    mirror has no materialisation for the ranges before its copy. ``eager`` would wait until retention deletes the keys
    of these ranges, although the mirror contains their rows.
    """
    return dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing())


TABLE = "table"
"""The key in an input's metadata that names the table, as ``schema.table``."""
TABLE_NAME = "dagster/table_name"


class PgcdcLake(dg.ConfigurableIOManager):
    """The lake of one source, as a resource and as an IO manager for inputs.

    As an IO manager, it loads the mirror of an upstream asset as ``pyarrow.Table``, or as ``pandas.DataFrame`` or
    ``polars.DataFrame`` if the parameter has this type. It reads the newest point that was published before the run was
    created, so all inputs of all steps of a run are read at the same LSN. As a resource, :meth:`at` reads any point.
    """

    root: str
    """The lake's folder or URL."""

    def at(self, lsn: "Lsn | str | int | datetime | None" = None) -> "LakeAt":
        """The lake at a consistent point. See :meth:`pgcdc_assets.lake.lake.Lake.at`."""
        from pgcdc_assets.lake.lake import Lake

        return Lake(self.root).at(lsn)

    def load_input(self, context: dg.InputContext) -> Any:
        """The rows of the input's mirror. Raises UnknownTable if the point does not list the table, and LakeError if
        there is no point."""
        rows = self.at(_created(context)).arrow(_table(context))
        return _converted(rows, context.dagster_type.typing_type)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        raise dg.DagsterInvariantViolationError(
            f"{context.asset_key.to_user_string()} cannot be written to the lake {self.root}: only the sync writes "
            "mirrors; use another IO manager for the asset"
        )


def _created(context: dg.InputContext) -> datetime | None:
    """The time at which the run was created. None outside a run."""
    try:
        run_id = context.step_context.run_id
    except dg.DagsterInvariantViolationError:
        return None
    record = context.instance.get_run_record_by_id(run_id)
    return record.create_timestamp if record else None


def _table(context: dg.InputContext) -> TableName:
    """The table that the input's metadata names, or the table of the upstream asset."""
    if given := (context.definition_metadata or {}).get(TABLE):
        return TableName.parse(str(given))
    upstream: Mapping[str, Any] = (context.upstream_output.definition_metadata if context.upstream_output else {}) or {}
    if TABLE_NAME in upstream:
        # The text is `<source>.<schema>.<table>`. The source's name is removed.
        return TableName.parse(str(getattr(upstream[TABLE_NAME], "value", upstream[TABLE_NAME])).partition(".")[2])
    return TableName(*context.asset_key.path[-2:])


def _converted(rows: "pa.Table", wanted: Any) -> Any:
    package = getattr(wanted, "__module__", "").partition(".")[0]
    if package == "pandas":
        return rows.to_pandas()
    if package == "polars":
        import polars

        return polars.from_arrow(rows)
    return rows
