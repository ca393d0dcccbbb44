"""A source with a publication, and a lake whose mirrors the test itself writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from pgcdc_assets.checks.report import TableReport, VerifyReport
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import connect
from tests.checks import mirrors

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    replay_lsn: Lsn
    tables: dict[TableName, int]


@dataclass
class Lake:
    """A source whose tables are published, and a lake whose mirrors the test writes."""

    conninfo: str
    root: Path

    def catalog(self) -> Catalog:
        with connect(self.conninfo) as conn:
            return Catalog(Identity("1", "d", "s"), "p", 0, read_tables(conn, ["p"]), ("p",))

    def write(self, table: str, schema: pa.Schema, rows: list[Row]) -> None:
        mirrors.write_mirror(self.path(table), schema, rows)

    def path(self, table: str) -> Path:
        return self.root / TableName.parse(table).folder

    def verify(self, *tables: str) -> VerifyReport:
        """Verifies against a point that lists every mirror at its newest version."""
        settings = Settings(source=self.conninfo, lake=self.root)
        names = [TableName.parse(table) for table in tables] or None
        written = [table.name for table in self.catalog().tables if (self.root / table.name.folder).exists()]
        versions = {name: self.version(str(name)) for name in written}
        return verify(settings, self.catalog(), names, lambda lsn: Point(lsn, versions))

    def version(self, table: str) -> int:
        return DeltaTable(str(self.path(table))).version()

    def only(self) -> TableReport:
        (report,) = self.verify().tables
        return report

    def script(self, script: str) -> None:
        """Runs SQL statements on the source, with ``public`` on the search path."""
        with connect(self.conninfo, options={"search_path": "public"}) as conn:
            conn.execute(script.encode())
