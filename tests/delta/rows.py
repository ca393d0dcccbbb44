"""A Delta table of ids, and a simple model of the rows in each of its versions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap64

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.commit import FileChange, commit_change
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from tests.deltatables import opened

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
OWNER = Identity("1", "db", "slot")


class Rows:
    """A table of ids, together with a model of its rows in each version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: set[int] = set()
        self.position = count(1)
        self.history: list[frozenset[int]] = []

    @property
    def delta(self) -> DeltaVersion:
        return opened(self.path)

    def change(self, added: Sequence[int], removed: set[int], *, transaction: int | None = None) -> int:
        table = self.delta
        gone: dict[str, BitMap64] = {}
        for group in MergeTarget(Location.of(self.path), SCHEMA, ("id", "v"), table.files).groups():
            ids = group.read(["id"])["id"].to_pylist()
            at = [group.start + place for place, value in enumerate(ids) if group.alive[place] and value in removed]
            if at:
                gone[group.path] = BitMap64(at)
        position = next(self.position) if transaction is None else transaction
        change = FileChange(self.written(added), gone)
        version = commit_change(table, change, {"app": position}, {"numTargetRowsInserted": len(added)})
        self.held = (self.held - removed) | set(added)
        self.history.append(frozenset(self.held))
        return version

    def written(self, ids: Sequence[int]) -> list[FileReport]:
        with DataFile(Location.of(self.path), SCHEMA) as file:
            file.write([pa.array(list(ids), pa.int64()), pa.array([str(number) for number in ids])])
            report = file.finish()
        return [report] if report is not None else []

    def read(self, version: int | None = None) -> list[int]:
        query = QueryBuilder().register("t", DeltaTable(self.path, version=version)).execute("SELECT id FROM t")
        return sorted(pa.table(query.read_all())["id"].to_pylist())
