"""Mirrors as inputs of the user's own assets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from pgcdc_assets import Lake, PgcdcLake
from pgcdc_assets.core import retention
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of

ORDERS, LINES = TableName("public", "orders"), TableName("public", "Order Lines")
KEYS = {ORDERS: ["shop", "public", "orders"], LINES: ["acme", "lines"]}
"""Asset keys of the two mirrors. A translator of the user chose the second key."""
NAMES = {ORDERS: "shop.public.orders", LINES: f"shop.{LINES}"}
MIRRORS = [
    dg.AssetSpec(["house", "x"]),
    *(dg.AssetSpec(KEYS[table], metadata={"dagster/table_name": NAMES[table]}) for table in KEYS),
]


def publish(root: Path, lsn: int) -> None:
    """Publishes a point at which each mirror has one more row."""
    layout, versions = Layout.of(root), {}
    for table in KEYS:
        app = Transaction(f"/snapshot/{table.folder}", lsn)
        write_deltalake(
            path_of(layout.mirror(table)), pa.table({"id": [lsn]}), mode="append",
            commit_properties=CommitProperties(app_transactions=[app]),
        )  # fmt: skip
        versions[table] = lsn // 100 - 1
    ConsistentPoints(layout).publish(Lsn(lsn), versions, dict.fromkeys(versions, Lsn(lsn)))


def delete_points(root: Path, keep: int) -> None:
    """Deletes all points except the newest point and the point at ``keep``, as maintenance does with older points."""
    now = datetime.now(UTC)
    ConsistentPoints(Layout.of(root)).prune(now + timedelta(hours=1), [], now, in_use=Lsn(keep))


@pytest.fixture
def lake(tmp_path: Path) -> PgcdcLake:
    publish(tmp_path, 100)
    return PgcdcLake(root=str(tmp_path))


def _ran(lake: PgcdcLake, *assets: dg.AssetsDefinition) -> list[list[int]]:
    """Materializes the assets in one Dagster run, and returns their outputs."""
    result = dg.materialize([*MIRRORS, *assets], resources={"shop_lake": lake})
    assert result.success
    return [result.output_for_node(asset.op.name) for asset in assets]


def _ids(*tables: pa.Table) -> list[int]:
    return [len(table) for table in tables]


def test_all_inputs_of_a_run_are_read_at_the_point_that_was_newest_at_its_start(lake: PgcdcLake) -> None:
    ins = {
        name: dg.AssetIn(KEYS[table], input_manager_key="shop_lake")
        for name, table in (("orders", ORDERS), ("lines", LINES))
    }

    @dg.asset(ins=ins)
    def first(orders: pa.Table, lines: pa.Table) -> list[int]:
        # The next step of the run must not see this point.
        publish(Path(lake.root), 200)
        return _ids(orders, lines)

    @dg.asset(ins=ins, deps=[first])
    def second(orders: pd.DataFrame, lines: pa.Table) -> list[int]:
        assert isinstance(orders, pd.DataFrame)
        return _ids(pa.Table.from_pandas(orders), lines)

    assert _ran(lake, first, second) == [[1, 1], [1, 1]]
    assert _ran(lake, second) == [[2, 2]]


def test_an_input_is_not_read_at_an_older_point_than_other_inputs_of_the_run(lake: PgcdcLake) -> None:
    publish(Path(lake.root), 200)

    @dg.asset(ins={"orders": dg.AssetIn(KEYS[ORDERS], input_manager_key="shop_lake")})
    def first(orders: pa.Table) -> list[int]:
        publish(Path(lake.root), 300)
        delete_points(Path(lake.root), keep=100)
        return _ids(orders)

    @dg.asset(ins={"lines": dg.AssetIn(KEYS[LINES], input_manager_key="shop_lake")}, deps=[first])
    def second(lines: pa.Table) -> list[int]:
        return _ids(lines)

    with pytest.raises(LakeError, match=r"no longer has the consistent point 0/C8.*start a new run"):
        _ran(lake, first, second)
    assert _ran(lake, second) == [[3]]


def test_a_run_that_waited_reads_no_point_below_the_one_that_was_newest_when_it_was_created(
    lake: PgcdcLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "EVERY_POINT", timedelta(0))
    publish(Path(lake.root), 200)

    @dg.asset
    def waited() -> list[int]:
        publish(Path(lake.root), 300)
        delete_points(Path(lake.root), keep=100)
        publish(Path(lake.root), 400)
        return []

    @dg.asset(ins={"orders": dg.AssetIn(KEYS[ORDERS], input_manager_key="shop_lake")}, deps=[waited])
    def seen(orders: pa.Table) -> list[int]:
        return _ids(orders)

    assert _ran(lake, waited, seen) == [[], [3]]
    assert _ran(lake, seen) == [[4]]


def test_metadata_of_an_input_may_name_the_table_to_read(lake: PgcdcLake) -> None:
    @dg.asset(
        ins={"mirror": dg.AssetIn(["house", "x"], input_manager_key="shop_lake", metadata={"table": "public.orders"})}
    )
    def seen(mirror: pa.Table) -> list[int]:
        return _ids(mirror)

    assert _ran(lake, seen) == [[1]]


def test_the_lake_can_be_used_as_a_resource(lake: PgcdcLake) -> None:
    @dg.asset
    def seen(shop_lake: dg.ResourceParam[PgcdcLake]) -> list[int]:
        publish(Path(shop_lake.root), 200)
        return _ids(shop_lake.at().arrow(ORDERS), shop_lake.at("0/64").arrow(ORDERS))

    assert _ran(lake, seen) == [[2, 1]]


def test_an_asset_cannot_be_written_to_the_lake(lake: PgcdcLake) -> None:
    @dg.asset(io_manager_key="shop_lake")
    def mine() -> int:
        return 1

    with pytest.raises(dg.DagsterInvariantViolationError, match="mine cannot be written to the lake"):
        dg.materialize([mine], resources={"shop_lake": lake})
    assert Lake(lake.root).at().tables == sorted(KEYS)
