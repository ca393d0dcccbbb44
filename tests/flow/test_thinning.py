"""A sync in follow mode deletes old points and versions. The remaining points are read as before."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pgcdc_assets.core import retention
from pgcdc_assets.errors import LakeError
from pgcdc_assets.flow import maintenance
from pgcdc_assets.mirror.delta.mirror import PROPERTIES
from pgcdc_assets.mirror.delta.versionexpiry import Unneeded
from pgcdc_assets.points.points import ConsistentPoints
from tests.flow.rig import Rig, T, promised, turns

pytestmark = pytest.mark.spark


def commits(rig: Rig, table: str) -> int:
    return len(list((rig.lake / f"public/{table}/_delta_log").glob("*.json")))


@pytest.mark.long
def test_files_do_not_grow_with_the_number_of_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(retention, "LADDER", ((timedelta(0), timedelta(days=40_000)),))
    monkeypatch.setattr(maintenance, "THIN_AFTER_VERSIONS", 3)
    monkeypatch.setitem(PROPERTIES, "delta.checkpointInterval", "3")
    delete = Unneeded.delete

    def refused(found: Unneeded) -> None:
        if found.mirror.name == T:
            raise LakeError("cannot be read", thing="a file of t")
        delete(found)

    monkeypatch.setattr(Unneeded, "delete", refused)
    told: list[str] = []
    monkeypatch.setattr(rig.observer, "progress", lambda stage, message, **numbers: told.append(message))
    rig.setup()
    rig.sync()
    turns(rig, 8)
    assert len(ConsistentPoints(rig.settings.layout).all()) <= 4
    assert commits(rig, "u") <= 6 < 9 <= commits(rig, "t")
    assert any("old versions of public.t were not deleted" in message for message in told)
    assert len({lsn for lsn, _ in promised(rig)}) == len(ConsistentPoints(rig.settings.layout).all())
    rig.assert_equal()
    turns(rig, 1, first=2000)
    rig.assert_equal()
