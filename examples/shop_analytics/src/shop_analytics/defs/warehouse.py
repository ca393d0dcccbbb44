"""The mirrors of both databases as DuckDB tables. All tables of one database are at one LSN."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import duckdb

from pgcdc_assets import PgcdcLake, mirror_updated

FILE = Path(__file__).parents[3] / "warehouse.duckdb"
TABLES = {"shop": ("products", "orders", "order_lines"), "crm": ("customers",)}


def specs() -> Iterator[dg.AssetSpec]:
    for source, tables in TABLES.items():
        for table in tables:
            yield dg.AssetSpec(
                [f"{source}_warehouse", table],
                deps=[[source, "public", table]],
                kinds={"duckdb"},
                automation_condition=mirror_updated(),
            )


@dg.multi_asset(specs=list(specs()), pool="warehouse")
def warehouse(shop_lake: dg.ResourceParam[PgcdcLake], crm_lake: dg.ResourceParam[PgcdcLake]):
    points = {"shop": shop_lake.at(), "crm": crm_lake.at()}
    with duckdb.connect(str(FILE)) as db:
        # One transaction, so that readers of the file never see one table at the old LSN and another at the new LSN.
        db.begin()
        for source, tables in TABLES.items():
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {source}_warehouse")
            for table in tables:
                db.register("rows", points[source].arrow(f"public.{table}"))
                db.execute(f"CREATE OR REPLACE TABLE {source}_warehouse.{table} AS FROM rows")
        db.commit()
    for source, tables in TABLES.items():
        for table in tables:
            yield dg.MaterializeResult([f"{source}_warehouse", table], metadata={"lsn": str(points[source].lsn)})
