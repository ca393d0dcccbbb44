"""The rules that end a batch: the time since the last batch, the batch's size, or a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.positions import ReportedPositions
from pgcdc_assets.log.batch import Committed
from pgcdc_assets.log.receive import batches as batches_module
from pgcdc_assets.log.receive.batches import Batches, Limits
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.log.receive.wholetransactions import Taken
from tests.log.streams import begin, commit, frame, insert, run_of

SECONDS, START = 10.0, 1000.0


@dataclass
class Rig:
    """Batches with a clock that moves only when the test moves it, and a writer that only counts."""

    clock: list[float]
    cuts: list[int] = field(default_factory=list)
    """The size of each batch in bytes."""

    def __post_init__(self) -> None:
        self.positions = SimpleNamespace(boundary=ZERO)
        intake = SimpleNamespace(positions=self.positions, stream_aborts=0)
        writer = SimpleNamespace(position=ZERO, commit=self._commit)
        self.batches = Batches(
            cast("Any", writer), cast("Any", intake), ReportedPositions(ZERO), Limits(10_000, SECONDS),
            lambda event: None, lambda: None,
        )  # fmt: skip

    @property
    def now(self) -> float:
        return self.clock[0]

    def _commit(self, closed: Any, staged: Any, end: Lsn, ended: Any) -> Committed:
        self.cuts.append(closed.size)
        return Committed(ZERO, end, 1, 1, closed.size)

    def transaction(self, size: int = 1) -> None:
        at = int(self.positions.boundary)
        payloads = [begin(at, 5), insert(1, b"x" * size), commit(at, at + 50)]
        run = run_of([frame(payload, at) for payload in payloads], 0)
        self.batches.add(Taken(run, len(run), None))
        self.positions.boundary = Lsn(at + 50)

    def round(self, after: float = 0.0) -> int:
        """Does what the receiver does after each FrameRun. Returns the number of batches since the start."""
        self.clock[0] += after
        self.batches.writing.finish()
        self.batches.cut_if_due(self.now)
        self.batches.writing.finish()
        return len(self.cuts)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    now = [START]
    monkeypatch.setattr(batches_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rig = Rig(now)
    yield rig
    rig.batches.writing.close()


def test_first_commit_after_a_quiet_time_makes_a_batch_at_once(rig: Rig) -> None:
    rig.clock[0] += SECONDS
    rig.transaction()
    assert rig.batches.due_in(rig.now) == 0
    assert rig.round() == 1
    assert rig.batches.due_in(rig.now) is None


def test_steady_commits_make_one_batch_per_batch_seconds(rig: Rig) -> None:
    each, seconds = 2, int(SECONDS) * 10
    for _ in range(seconds * each):
        rig.transaction()
        rig.round(1 / each)
    assert len(rig.cuts) == seconds // SECONDS


def test_full_batch_and_requested_flush_are_cut_at_once(rig: Rig) -> None:
    rig.transaction()
    assert rig.round() == 0
    rig.batches.flush()
    assert rig.round() == 1
    rig.transaction(20_000)
    assert rig.round() == 2
    rig.transaction()
    assert rig.round(SECONDS - 1) == 2
    assert rig.round(1) == 3


def test_receiver_waits_for_frames_only_until_the_next_cut_is_due() -> None:
    def seconds(due_in: float | None, *, busy: bool = False) -> float:
        receiver = cast("Any", object.__new__(Receiver))
        receiver._writing, receiver._limits = SimpleNamespace(busy=busy), Limits(1, 1.0)
        receiver._batches = SimpleNamespace(due_in=lambda now: due_in)
        return float(receiver._quiet_seconds())

    usual = seconds(None)
    assert seconds(usual + 1) == usual
    assert seconds(usual / 2) == usual / 2
    assert seconds(0.0) == 0.0
    assert seconds(usual / 2, busy=True) == Limits(1, 1.0).linger_seconds < usual / 2
