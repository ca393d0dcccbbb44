"""Helpers that change and read Delta tables through the project's own Delta log and commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from pgcdc_assets.checks.sides import READ_EXACTLY, queryable
from pgcdc_assets.checks.sides import opened as opened_by_delta_rs
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import Mode, commit_files
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion, open_delta
from pgcdc_assets.delta.logfiles import COMMIT
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.lake.scan import MirrorScan
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import LocalStore


def opened(folder: Path | Location) -> DeltaVersion:
    table = open_delta(Location.of(folder))
    assert table is not None
    return table


def by_delta_rs(at: LakeAt, name: TableName) -> pa.Table:
    """The mirror's rows, read by delta-rs, because the lake's own reader shares code with the merges that write
    mirrors. If delta-rs refuses the table, the lake's own reader reads it."""
    folder, version = Location.of(at.path(name)), at.versions[name]
    table = DeltaLog(folder).at(version)
    if not queryable(table):
        return at.arrow(name)
    query = QueryBuilder(READ_EXACTLY).register("mirror", opened_by_delta_rs(folder, version))
    rows = pa.table(query.execute("SELECT * FROM mirror").read_all())
    return rows.cast(MirrorScan(name, table).schema)


def commit(folder: Path | Location, files: Sequence[FileReport], mode: Mode, positions: Mapping[str, int]) -> int:
    return commit_files(opened(folder), files, mode, positions)


def live_files(folder: Path | Location) -> tuple[Added, ...]:
    return opened(folder).files


@contextmanager
def reads_of_commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collects the versions whose Delta commits are read during the block, in order, including versions that do not
    exist."""
    read: list[int] = []
    real = LocalStore.read

    def reading(store: LocalStore, at: Location, start: int = 0, size: int | None = None) -> bytes:
        if (match := COMMIT.fullmatch(at.name)) is not None:
            read.append(int(match[1]))
        return real(store, at, start, size)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "read", reading)
        yield read
        read.sort()


def publish_at(points: ConsistentPoints, lsn: int, versions: Mapping[TableName, int]) -> None:
    """Publish a point with these versions, in which every table's position is ``lsn``."""
    points.publish(Lsn(lsn), versions, dict.fromkeys(versions, Lsn(lsn)))
