"""Differences, the change feed and `Lake.wait` need only what every store promises."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import NotReached
from pgcdc_assets.log.extent import Extent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.store import storage
from tests.lake.onetable import DELETE, INSERT, NAME, OWNER, UPDATE, OneTable
from tests.memorystore import lake_in_memory


def hold(root: Location) -> None:
    """Uses each call once."""
    at = OneTable(root, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), (DELETE, {"id": "2"}))
    at.turn(300, (INSERT, {"id": "3"}))
    at.compact()
    at.publish(300)
    assert sorted(at.lake.diff(NAME, 100)["kind"].to_pylist()) == ["delete", "insert", "update"]
    assert at.lake.at().history(NAME, 1).versions["kind"].to_pylist() == ["update_postimage"]
    assert [row["id"] for part in at.lake.at().changes(NAME, 200) for row in part.to_pylist()] == [3]
    assert at.lake.undo(NAME, 100).count("GET DIAGNOSTICS") == 3
    log = ChangeLog(at.layout)
    log.create(OWNER, Lsn(300), 1)
    Extent(at.layout).note(Lsn(300), Lsn(400))
    assert at.lake.wait(400, timeout=0).lsn == 300
    with pytest.raises(NotReached):
        at.lake.wait(401, timeout=0)


def test_calls_work_in_memory() -> None:
    root = lake_in_memory()
    hold(root)
    storage.delete_folder(root)


@pytest.mark.long
def test_calls_work_in_a_bucket(bucket: Location) -> None:
    hold(bucket)
