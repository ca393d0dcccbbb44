"""The dbt models as assets. They read the DuckDB tables that the asset `warehouse` writes."""

from pathlib import Path

import dagster as dg
from dagster_dbt import DbtCliResource, DbtProject, dbt_assets

DBT = DbtProject(project_dir=Path(__file__).parents[3] / "dbt")

# Every process of a run loads this file, and `dbt parse` takes seconds. So it runs only if the models have changed.
CHANGED = max(path.stat().st_mtime for path in Path(DBT.project_dir, "models").rglob("*"))
if not DBT.manifest_path.exists() or DBT.manifest_path.stat().st_mtime < CHANGED:
    DBT.preparer.prepare(DBT)


@dbt_assets(manifest=DBT.manifest_path, pool="warehouse")
def reports(context: dg.AssetExecutionContext, dbt: DbtCliResource):
    yield from dbt.cli(["build"], context=context).stream()


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(assets=[reports], resources={"dbt": DbtCliResource(project_dir=DBT)})
