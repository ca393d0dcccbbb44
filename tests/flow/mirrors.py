"""Mirrors without rows, for tests that only read their versions and states."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.mirror.delta.mirror import IDENTITY, create_mirror
from pgcdc_assets.spark.session import SparkOnDemand
from tests.deltatables import commit

OWNER = Identity("1", "db", "slot")


def copied_at_10_applied_to_20(layout: Layout, table: Table) -> None:
    """Makes the table's mirror: version 1 is the copy at LSN 10, version 2 has the changes up to LSN 20."""
    copied_mirror(layout, OWNER, table.name, 10)
    commit(layout.mirror(table.name), [], "append", {OWNER.app_id(f"{Lsn(10):X}"): 20})


def copied_mirror(layout: Layout, owner: Identity, name: TableName, at: int) -> None:
    """Makes a mirror without rows, whose version 1 is a copy at LSN ``at``."""
    path = layout.mirror(name)
    create_mirror(path, pa.schema([("id", pa.int64())]), {IDENTITY: owner.app_id()}, layout.root)
    commit(path, [], "append", {owner.app_id("snapshot", name.folder): at})


def no_spark() -> Any:
    raise AssertionError("nothing here needs Spark")


def delta_target(layout: Layout, owner: Identity) -> DeltaTarget:
    """A Delta target for tests that do not use Spark."""
    return DeltaTarget(layout, owner, SparkOnDemand(no_spark), timedelta(0))
