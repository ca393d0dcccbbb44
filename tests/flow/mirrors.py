"""Mirrors without rows, for tests of what is said of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.mirror.delta.mirror import IDENTITY
from pgcdc_assets.spark.ondemand import SparkOnDemand
from pgcdc_assets.store.local import path_of
from tests.deltatables import commit


def copied_mirror(layout: Layout, owner: Identity, name: TableName, at: int) -> None:
    """Version 1 holds the copy of consistent point ``at``."""
    path = layout.mirror(name)
    DeltaTable.create(path_of(path), pa.schema([("id", pa.int64())]), configuration={IDENTITY: owner.app_id()},
                      raise_if_key_not_exists=False)  # fmt: skip
    commit(path, [], "append", {owner.app_id("snapshot", name.folder): at})


def no_spark() -> Any:
    raise AssertionError("nothing here needs Spark")


def delta_target(layout: Layout, owner: Identity) -> DeltaTarget:
    """For what needs no Spark."""
    return DeltaTarget(layout, owner, SparkOnDemand(no_spark), timedelta(0))
