"""A writer that lost its lease on the lake, without knowing this, cannot commit after the fence."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import Schema

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.definition import commit_properties, create_table
from pgcdc_assets.delta.log import open_delta
from pgcdc_assets.errors import CommitLost, LogConflict
from pgcdc_assets.log.commit import LogWriter, shut_out
from pgcdc_assets.log.reader import ChangeLog

WHO = Identity("7", "db", "slot")


@pytest.fixture(params=["local", "s3"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    if request.param == "s3":
        bucket: Location = request.getfixturevalue("bucket")
        return Layout(bucket)
    return Layout.of(tmp_path / "lake")


def test_receiver_that_lost_the_lake_cannot_commit(layout: Layout) -> None:
    ChangeLog(layout).create(WHO, Lsn(100), 1)
    before = LogWriter(layout.change_log, WHO)
    before.commit(Lsn(100), Lsn(200), 1, [])
    shut_out(layout, 5)
    assert ChangeLog(layout).position() == 200, "nothing that is durable is lost"
    with pytest.raises(LogConflict, match="another writer, because this one did not renew its lease"):
        before.commit(Lsn(200), Lsn(300), 1, [])
    with pytest.raises(LogConflict, match="another writer"):
        # Opening the log again does not give the writer the lease back.
        LogWriter(layout.change_log, WHO)
    after = LogWriter(layout.change_log, WHO, ChangeLog(layout).leader)
    after.commit(Lsn(200), Lsn(250), 1, [])
    shut_out(layout, 9)
    with pytest.raises(LogConflict):
        after.commit(Lsn(250), Lsn(300), 1, [])
    assert ChangeLog(layout).position() == 250


def test_fence_reaches_every_table_of_the_lake(layout: Layout) -> None:
    ChangeLog(layout).create(WHO, Lsn(100), 1)
    names = [TableName("public", "t"), TableName("public", "with a log_of.its own"), TableName("odd", "_delta_log")]
    places = [*map(layout.mirror, names), layout.changes(names[0])]
    for place in places:
        create_table(place, Schema.from_arrow(pa.schema([("a", pa.int64())])), {}, {}, layout.root)
    seen = [open_delta(place) for place in places]
    shut_out(layout, 5)
    for version in seen:
        assert version is not None
        with pytest.raises(CommitLost):
            commit_properties(version, {"a": "b"})
    for place in places:
        now = open_delta(place)
        assert now is not None
        assert commit_properties(now, {"a": "b"}) == 2
        assert now.positions == {"pgcdc/leader": 5}
