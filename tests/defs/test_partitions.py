"""The register of LSN ranges: in order, without gaps, pruned with the log."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.defs.partitions import LSN_RANGES, RangeRegister, register_snapshot, selected_span
from pgcdc_assets.errors import BadRange, RangeGap


def span(start: int, end: int) -> LsnRange:
    return LsnRange(Lsn(start), Lsn(end))


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def register(instance: dg.DagsterInstance) -> RangeRegister:
    return RangeRegister(instance)


def test_ranges_are_kept_in_the_order_of_their_closing(register: RangeRegister, instance: dg.DagsterInstance) -> None:
    for start, end in ((0x10, 0x20), (0x20, 0x1000), (0x1000, 0x1_0000_0000)):
        assert register.add(span(start, end)) == span(start, end)
    assert instance.get_dynamic_partitions(str(LSN_RANGES.name)) == [
        "000000000010-000000000020", "000000000020-000000001000", "000000001000-000100000000",
    ]  # fmt: skip


def test_a_hole_becomes_a_range_of_its_own(register: RangeRegister) -> None:
    register.add(span(0x10, 0x20))
    assert register.add(span(0x40, 0x50)) == span(0x40, 0x50)
    assert register.known() == [span(0x10, 0x20), span(0x20, 0x40), span(0x40, 0x50)]


def test_what_is_known_is_not_registered_again(register: RangeRegister) -> None:
    register.add(span(0x10, 0x20))
    register.add(span(0x20, 0x30))
    assert register.add(span(0x10, 0x20)) == span(0x10, 0x20)
    assert register.add(span(0x18, 0x28)) == span(0x20, 0x30)
    assert register.add(span(0x28, 0x40)) == span(0x30, 0x40)
    assert register.known() == [span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)]


def test_keys_go_with_the_log(register: RangeRegister) -> None:
    for start, end in ((0x10, 0x20), (0x20, 0x30), (0x30, 0x40)):
        register.add(span(start, end))
    assert register.prune(Lsn(0x20), Lsn(0x30)) == [span(0x10, 0x20), span(0x30, 0x40)]
    assert register.known() == [span(0x20, 0x30)]


def test_a_copy_is_registered_once(instance: dg.DagsterInstance) -> None:
    assert register_snapshot(instance, Lsn(0xABC)) == "000000000000-000000000ABC"
    register_snapshot(instance, Lsn(0xABC))
    assert instance.get_dynamic_partitions("snapshot_ranges") == ["000000000000-000000000ABC"]


def test_selected_keys_make_one_range() -> None:
    assert selected_span([span(0x20, 0x30).key, span(0x10, 0x20).key]) == span(0x10, 0x30)


def test_no_keys_or_keys_with_holes_fail() -> None:
    with pytest.raises(BadRange, match="no range was selected"):
        selected_span([])
    with pytest.raises(RangeGap, match="0/20 is followed by 0/30"):
        selected_span([span(0x10, 0x20).key, span(0x30, 0x40).key])
    with pytest.raises(BadRange, match="not a range key"):
        selected_span(["..."])
