"""The models of dbt. They read the DuckDB tables."""

from pathlib import Path

import dagster as dg
from dagster_dbt import DbtCliResource, DbtProject, dbt_assets

DBT = DbtProject(project_dir=Path(__file__).parents[3] / "dbt")
DBT.prepare_if_dev()
if not DBT.manifest_path.exists():
    DBT.preparer.prepare(DBT)


@dbt_assets(manifest=DBT.manifest_path, pool="warehouse")
def reports(context: dg.AssetExecutionContext, dbt: DbtCliResource):
    yield from dbt.cli(["build"], context=context).stream()


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(assets=[reports], resources={"dbt": DbtCliResource(project_dir=DBT)})
