"""What ``setup`` reports depends on the source's version."""

from __future__ import annotations

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import check_source
from tests.fix_postgres import fresh_database

NULLS = "has NULL in a column that was added later with a default"


@pytest.mark.long
@pytest.mark.versions(14, 15, 18)
@pytest.mark.parametrize(
    ("via_root", "key", "warned"), [("true", "", True), ("false", "", False), ("true", "PRIMARY KEY", False)]
)
def test_setup_warns_about_null_values_in_old_row_images(
    version_server: EmbeddedServer, via_root: str, key: str, warned: bool
) -> None:
    """Setup warns only about tables without a key, because their old rows are found by all values."""
    with fresh_database(version_server) as database, database.connect() as conn:
        conn.execute(f"CREATE TABLE t (id int {key}, v text) PARTITION BY RANGE (id)".encode())
        conn.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)")
        if not key:
            conn.execute("ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t1 REPLICA IDENTITY FULL")
        conn.execute(f"CREATE PUBLICATION theirs FOR TABLE t WITH (publish_via_partition_root = {via_root})".encode())
        settings = Settings(source=database.conninfo, slot=f"s_{database.name}", publication="theirs")
        told = [str(finding) for finding in check_source(conn, settings) if NULLS in finding.what]
    assert bool(told) is (warned and version_server.version < 15)
