from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.registry.named import NamedTable
from tests.registry.unity import Served, unity_server

IDENTITY = Identity("7", "shop", "s")
COLUMNS = pa.schema([
    pa.field("id", pa.int64(), nullable=False),
    pa.field("price", pa.decimal128(10, 2)),
    pa.field("at", pa.timestamp("us")),
    pa.field("seen", pa.timestamp("us", "UTC")),
    pa.field("tags", pa.list_(pa.int32())),
])  # fmt: skip


def mirror(folder: Path, name: TableName, *, more: tuple[str, ...] = ()) -> NamedTable:
    """Writes a Delta table at the path of a mirror. ``more``: names of additional text columns."""
    schema = pa.schema([*COLUMNS, *(pa.field(one, pa.string()) for one in more)])
    layout = Layout.of(folder)
    place = str(folder / name.folder)
    write_deltalake(place, schema.empty_table(), mode="overwrite", schema_mode="overwrite", description="all orders")
    return NamedTable.of(layout, IDENTITY, name)


@pytest.fixture
def unity() -> Iterator[Served]:
    with unity_server() as served:
        yield served
