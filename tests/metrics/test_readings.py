"""A part that hangs or fails is absent, and the other part is shown."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.metrics import readings
from pgcdc_assets.metrics.readings import LakeReader, Part
from pgcdc_assets.settings import Settings
from tests.lake.lakes import written_tables
from tests.waiting import wait_for


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Readings that hang until this is set."""
    gate = threading.Event()
    yield gate
    gate.set()


def value(part: Part[int], seconds: float = 5) -> int | None:
    part.begin()
    return part.value(time.monotonic() + seconds)


def test_a_part_that_hangs_ends_no_scrape_and_is_read_once(gate: threading.Event) -> None:
    began: list[int] = []

    def hang() -> int:
        began.append(1)
        gate.wait()
        return 7

    part = Part("lake", hang)
    assert value(part, 0.05) is None
    assert value(part, 0.05) is None
    assert (part.why, len(began)) == ("does not answer in time", 1)
    gate.set()
    assert value(part) == 7


def test_a_slow_part_is_shown_as_it_was_read_last_up_to_a_limit(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([1, 2])

    def slow() -> int:
        found = next(answers)
        if found == 2:
            gate.wait()
        return found

    part = Part("lake", slow)
    assert value(part) == 1
    monkeypatch.setattr(readings, "FRESH_SECONDS", 0.0)
    assert value(part, 0.05) == 1
    monkeypatch.setattr(readings, "STALE_SECONDS", 0.0)
    assert value(part, 0.05) is None


def test_a_fresh_reading_is_used_again() -> None:
    answers = iter([1, 2])
    part = Part("source", lambda: next(answers))
    assert [value(part), value(part)] == [1, 1]


def test_an_error_is_no_crash_and_its_text_is_kept_only_if_it_is_ours() -> None:
    def away() -> int:
        raise SourceUnavailable("does not answer", thing="u@h/d")

    def broken() -> int:
        raise RuntimeError("password=hunter2")

    part = Part("source", away)
    assert value(part) is None
    assert part.why == "u@h/d: does not answer"
    part = Part("source", broken)
    assert value(part) is None
    assert part.why == "cannot be read: RuntimeError"
    wait_for(lambda: not [one for one in threading.enumerate() if one.name == "read-source"], what="the end")


def test_sizes_of_mirrors_are_read_a_few_at_a_time_and_only_if_they_changed(tmp_path: Path) -> None:
    rows = pa.table({"id": range(100)})
    layout = written_tables(Location.of(tmp_path / "lake"), {TableName("public", name): rows for name in "abc"})
    reader, versions = LakeReader(Settings(lake=tmp_path / "lake")), Lake(layout.root).at().versions
    found = [reader._mirror_bytes(versions) for _ in range(3)]
    assert [len(sizes) for sizes in found] == [2, 3, 3]
    assert {name.name: size for name, size in found[-1].items()} == {
        name: sum(file.stat().st_size for file in (tmp_path / "lake/public" / name).glob("*.parquet")) for name in "abc"
    }  # fmt: skip
    shutil.rmtree(tmp_path / "lake/public")
    assert reader._mirror_bytes(versions) == found[-1], "no file is read again"
    newer = dict.fromkeys(versions, 9)
    assert reader._mirror_bytes(newer) == found[-1], "what cannot be read keeps its last size"
    assert reader._mirror_bytes(newer) == found[-1]
