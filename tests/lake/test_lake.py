"""`Lake.at` without points, below the first point, and for a missing version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError, UnknownTable
from pgcdc_assets.points.points import ConsistentPoints


def test_importing_the_package_imports_no_other_library() -> None:
    code = (
        "import sys, pgcdc_assets; "
        "assert not {'deltalake', 'pyarrow', 'pyspark', 'dagster'} & set(sys.modules); "
        "pgcdc_assets.Lake; assert 'deltalake' in sys.modules; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lake_without_points_has_no_tables(tmp_path: Path) -> None:
    assert Lake(tmp_path).tables == []
    with pytest.raises(LakeError, match="no consistent point"):
        Lake(tmp_path).at()


def test_an_lsn_below_the_first_point_is_refused(tmp_path: Path) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {})
    with pytest.raises(LakeError, match="0/63"):
        Lake(tmp_path).at(99)
    assert Lake(tmp_path).at("0/FFFF").lsn == 100
    with pytest.raises(UnknownTable):
        Lake(tmp_path).at().arrow("orders")


def test_a_time_selects_the_newest_point_that_was_published_before_it(tmp_path: Path) -> None:
    points = ConsistentPoints(Layout.of(tmp_path))
    times = []
    for lsn in (100, 200, 300):
        points.publish(Lsn(lsn), {}, {})
        times.append(points.all()[-1].at)
    lake = Lake(tmp_path)
    assert [lake.at(time).lsn for time in times] == [100, 200, 300]
    assert lake.at(times[1] + (times[2] - times[1]) / 2).lsn == 200
    assert lake.at(times[2] + timedelta(days=1)).lsn == 300
    with pytest.raises(LakeError, match=r"no consistent point published by .*; the oldest is 0/64"):
        lake.at(times[0] - timedelta(microseconds=1))
    with pytest.raises(ValueError, match="has no time zone"):
        lake.at(datetime(2026, 1, 1))


@pytest.mark.parametrize("wrong", [1.5, True, b"0/64", [100], date(2026, 1, 1)])
def test_a_value_of_a_wrong_type_is_refused_by_every_call(tmp_path: Path, wrong: Any) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {}, messages=Lsn(100))
    lake = Lake(tmp_path)
    calls: list[Callable[[Any], object]] = [
        lake.at, lambda lsn: lake.wait(lsn, timeout=0), lake.at().messages, lambda lsn: lake.diff("t", lsn),
        lambda lsn: lake.undo("t", lsn),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"is not an LSN, which is text like '16/B374D848' or an integer"):
            call(wrong)


def test_a_number_of_another_library_is_an_lsn(tmp_path: Path) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {})
    number: Any = np.int64(100)
    assert Lake(tmp_path).at(number).lsn == 100
