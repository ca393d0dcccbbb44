"""A simulated disk loses everything that was not synced. Every published point stays readable, with the versions of the
mirrors that the point lists."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import Mode, commit_files
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.errors import IdentityMismatch
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.mirror.delta.durability import DurableVersions
from pgcdc_assets.mirror.delta.mirror import IDENTITY, SOURCE_TABLE, Mirrors
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.deltatables import opened
from tests.log.durable import Disk

OWNER = Identity("7", "shop", "pgcdc")
NAMES = [TableName("public", name) for name in "abc"]
SCHEMA = pa.schema([("id", pa.int64())])


class Turns:
    """Some mirrors. Each turn adds a row to one of them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.points = ConsistentPoints(layout)
        self.durable = DurableVersions(layout, OWNER.app_id())
        for name in NAMES:
            DeltaTable.create(path_of(layout.mirror(name)), SCHEMA, configuration={IDENTITY: OWNER.app_id()},
                              raise_if_key_not_exists=False)  # fmt: skip
            self.commit(name, Mirrors(layout, OWNER).open(name).snapshot_app_id, 100)

    def commit(self, name: TableName, app_id: str, at: int, mode: Mode = "append") -> int:
        folder = self.layout.mirror(name)
        with DataFile(folder, SCHEMA) as file:
            file.write([pa.array([at])])
            report = file.finish()
        assert report is not None
        return commit_files(opened(folder), [report], mode, {app_id: at})

    def publish(self, lsn: int) -> None:
        versions = {name: Mirrors(self.layout, OWNER).open(name).version for name in NAMES}
        self.points.publish(Lsn(lsn), versions, self.durable.settle(versions))


def test_after_a_power_cut_every_point_reads_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, os.fsync)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    turns = Turns(Layout.of(tmp_path / "lake"))
    for turn in range(1, 8):
        turns.commit(NAMES[turn % 2], OWNER.app_id("64"), 100 + 10 * turn)
        turns.publish(100 + 10 * turn)
        turns.commit(NAMES[0], "another", turn)
        left = Layout.of(disk.left(tmp_path.with_name(f"left{turn}")) / "lake")
        points = ConsistentPoints(left).all()
        assert [point.replay_lsn for point in points] == [100 + 10 * n for n in range(1, turn + 1)]
        for point in points:
            for place, name in enumerate(NAMES):
                rows = Lake(left.root).at(point.replay_lsn).arrow(name)["id"].to_pylist()
                applied = [at for at in range(110, point.replay_lsn + 1, 10) if (at - 100) // 10 % 2 == place]
                own = [number for number in range(1, turn) if number < (point.replay_lsn - 100) // 10]
                assert sorted(rows) == sorted([100, *applied, *(own if place == 0 else [])])


def test_recovery_moves_aside_an_incomplete_commit_that_is_newer_than_all_points(tmp_path: Path) -> None:
    turns = Turns(Layout.of(tmp_path / "lake"))
    turns.publish(100)
    log = turns.layout.mirror(NAMES[0]) / "_delta_log"
    last = turns.commit(NAMES[0], OWNER.app_id("64"), 200)
    path_of(log / f"{last:020}.json").write_bytes(b"")
    again = DurableVersions(turns.layout, OWNER.app_id())
    found = again.recover(NAMES, ConsistentPoints(turns.layout))
    assert found == {NAMES[0]: (f"{last:020}.json",)}
    now = {name: Mirrors(turns.layout, OWNER).open(name).version for name in NAMES}
    assert again.settle(now) == dict.fromkeys(NAMES, 100)


def test_a_folder_shared_by_two_tables_is_an_error(tmp_path: Path) -> None:
    """On a file system that ignores case, the mirrors of the tables users and "Users" have the same folder."""
    layout, users = Layout.of(tmp_path), TableName("public", "users")
    DeltaTable.create(path_of(layout.mirror(users)), SCHEMA, raise_if_key_not_exists=False,
                      configuration={IDENTITY: OWNER.app_id(), SOURCE_TABLE: 'public."Users"'})  # fmt: skip
    with pytest.raises(IdentityMismatch, match=r'is the mirror of public\."Users": this file system'):
        Mirrors(layout, OWNER).open(users).delta  # noqa: B018
