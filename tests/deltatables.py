"""Delta tables as tests change and read them, through the project's own log and commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import Mode, commit_files
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.delta.log import Added, DeltaVersion, open_delta
from pgcdc_assets.points.points import ConsistentPoints


def opened(folder: Path | Location) -> DeltaVersion:
    table = open_delta(Location.of(folder))
    assert table is not None
    return table


def commit(folder: Path | Location, files: Sequence[FileReport], mode: Mode, positions: Mapping[str, int]) -> int:
    return commit_files(opened(folder), files, mode, positions)


def live_files(folder: Path | Location) -> tuple[Added, ...]:
    return opened(folder).files


def publish_at(points: ConsistentPoints, lsn: int, versions: Mapping[TableName, int]) -> None:
    """Publish a point whose versions all record its own LSN."""
    points.publish(Lsn(lsn), versions, dict.fromkeys(versions, Lsn(lsn)))
