from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.reported import ReportedPositions

_LSNS = st.integers(0, 1 << 40).map(Lsn)


@given(_LSNS, st.lists(st.tuples(st.sampled_from(["received", "durable", "applied"]), _LSNS)))
def test_reported_positions_never_fall(floor: Lsn, steps: list[tuple[str, Lsn]]) -> None:
    progress = ReportedPositions(floor)
    before = (floor, floor, floor)
    for name, lsn in steps:
        getattr(progress, name)(lsn)
        now = (progress.write, progress.flush, progress.apply)
        assert all(new >= old for new, old in zip(now, before, strict=True))
        assert progress.apply <= progress.flush <= progress.write
        before = now
    durable = max([floor, *(lsn for name, lsn in steps if name == "durable")])
    assert progress.flush == durable


def test_received_position_is_not_reported_as_flushed() -> None:
    progress = ReportedPositions(Lsn(10))
    assert progress.received(Lsn(50)) == 50
    assert progress.flush == 10
    assert progress.applied(Lsn(40)) == 10
    assert progress.durable(Lsn(45)) == 45
    assert progress.apply == 40
