"""The request file: who is heard, who is not, and what comes back. Without a source and without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import CopyOutdated, LakeError, LockHeld, NotRepairable, PgcdcError
from pgcdc_assets.flow import asking, requests
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.maintenance import MaintenanceReport
from pgcdc_assets.flow.plain import from_plain, to_plain
from pgcdc_assets.flow.reports import RangeReport, SyncReport, TableTurn, Untaken
from pgcdc_assets.flow.requests import Answer, Job, Request
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.store.local import path_of
from tests.end_to_end.command import wait_for

ODD = TableName("Odd Schema", 'a "b"')
T = TableName("public", "t")
SPAN = LsnRange(Lsn(0x10), Lsn(0x2000000030))
ASK_IT = """
import sys
from pathlib import Path
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.requests import Job, Request, placed
with placed(Layout.of(Path(sys.argv[1])), Request(Job.MAINTAIN, "maintain")):
    print("placed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.of(tmp_path / "lake")


def request() -> Request:
    return Request(Job.REPAIR, 'repair "Odd Schema"."a ""b"""', (ODD,), SPAN)


@dataclass
class Asked:
    """A command that waits, in a thread."""

    layout: Layout
    request: Request
    here: int | PgcdcError | None = None
    """What it does itself: None where the lock is held."""

    def __post_init__(self) -> None:
        self.stop = threading.Event()
        self.said: list[str] = []
        self.result: int | None = None
        self.error: PgcdcError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.result = asking.done(self.layout, self.request, int, self._do, self.said.append, self.stop)
        except PgcdcError as error:
            self.error = error

    def _do(self) -> int:
        with lake_lock(self.layout, self.request.command):
            return 42

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._thread.start()
        try:
            wait_for(lambda: requests.current(self.layout) is not None, 10, "the request")
            yield
        finally:
            self._thread.join(10)
            assert not self._thread.is_alive()


def test_a_request_is_seen_while_its_command_waits(layout: Layout) -> None:
    assert requests.current(layout) is None
    asked = request()
    with requests.placed(layout, asked):
        assert requests.current(layout) == asked
        said = pytest.raises(LockHeld, match=r"`pgcdc repair .*` \(pid \d+\) asks the running sync already")
        with said, requests.placed(layout, Request(Job.MAINTAIN, "maintain")):
            pass
        assert requests.current(layout) == asked
    assert requests.current(layout) is None


def test_the_request_of_a_command_that_died_is_none(layout: Layout) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASK_IT, str(layout.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "placed\n"
        found = requests.current(layout)
        assert found is not None
        assert (found.job, found.pid) == (Job.MAINTAIN, process.pid)
        process.kill()
    assert Request.from_text(path_of(layout.request).read_text()) is not None
    assert requests.current(layout) is None
    with requests.placed(layout, asked := request()):
        assert requests.current(layout) == asked


@pytest.mark.parametrize("text", ["", '{"job": "rep', "{}\n", "[]\n", "7\n"])
def test_what_is_no_whole_request_is_none(text: str) -> None:
    assert Request.from_text(text) is None
    assert Request.from_text(request().to_text()) is not None
    assert Request.from_text(request().to_text().replace('"repair"', '"tidy"')) is None


def test_who_finds_the_lock_free_asks_nobody(layout: Layout) -> None:
    asked = Asked(layout, request())
    assert asking.done(layout, asked.request, int, asked._do, asked.said.append) == 42
    assert asked.said == []
    assert not path_of(layout.request).exists()


def test_one_that_serves_nobody_is_not_asked(layout: Layout) -> None:
    asked = Asked(layout, request())
    with lake_lock(layout, "sync"), pytest.raises(LockHeld, match="`pgcdc sync`"):
        asking.done(layout, asked.request, int, asked._do, asked.said.append)
    assert not path_of(layout.request).exists()


def test_an_answer_is_what_the_command_would_have_got(layout: Layout) -> None:
    for answer in (7, NotRepairable("lacks a value", thing="public.t", lsn=Lsn(0x20), do="copy it")):
        asked = Asked(layout, request())
        with lake_lock(layout, "follow", serves=True), asked.waiting():
            number = asked.request.number
            requests.answered(layout, Answer("another", 8))
            told = Answer.of_error(number, answer) if isinstance(answer, PgcdcError) else Answer(number, answer)
            requests.answered(layout, told)
        if isinstance(answer, PgcdcError):
            assert (type(asked.error), str(asked.error)) == (NotRepairable, str(answer))
        else:
            assert (asked.result, asked.error) == (7, None)
        assert requests.current(layout) is None


def test_a_command_says_why_its_work_waits(layout: Layout) -> None:
    asked = Asked(layout, request())
    with lake_lock(layout, "follow", serves=True), asked.waiting():
        for waits in ("waits for pid 7", "waits for pid 8"):
            requests.answered(layout, Answer(asked.request.number, waits=waits))
            wait_for(lambda waits=waits: asked.said[-1] == waits, 10, "the word")  # type: ignore[misc]
        requests.answered(layout, Answer(asked.request.number, 7))
    assert (asked.result, asked.said[1:]) == (7, ["waits for pid 7", "waits for pid 8"])


def test_the_answer_of_an_earlier_request_is_not_taken(layout: Layout) -> None:
    asked = Asked(layout, request())
    with lake_lock(layout, "follow", serves=True), asked.waiting():
        requests.answered(layout, Answer(request().number, 8))
        assert requests.answer_to(layout, asked.request) is None
        asked.stop.set()
    assert asked.result is None


def test_a_command_does_the_work_itself_when_the_sync_ends(layout: Layout) -> None:
    asked = Asked(layout, request())
    with asked_of(layout, asked):
        assert asked.result is None
    asked._thread.join(10)
    assert asked.result == 42
    assert [line.split(" ")[0] for line in asked.said] == ["asks", "nobody"]


@contextmanager
def asked_of(layout: Layout, asked: Asked) -> Iterator[None]:
    """Of a sync that ends, without an answer, at the end of the block."""
    with lake_lock(layout, "follow", serves=True):
        asked._thread.start()
        wait_for(lambda: requests.current(layout) is not None, 10, "the request")
        yield


def test_a_request_that_is_stopped_is_withdrawn(layout: Layout) -> None:
    asked = Asked(layout, request())
    with lake_lock(layout, "follow", serves=True), asked.waiting():
        asked.stop.set()
        wait_for(lambda: requests.current(layout) is None, 10, "its end")
    assert isinstance(asked.error, LockHeld)
    assert "was not waited for" in str(asked.error)


def test_an_error_of_another_version_is_still_one(layout: Layout) -> None:
    told = {"class": "Novelty", "what": "is new", "thing": None, "lsn": None, "do": "look"}
    for name, kind in (("Novelty", LakeError), ("SetupRefused", LakeError), ("CopyOutdated", CopyOutdated)):
        with pytest.raises(kind, match="is new") as raised:
            Answer("1", error=told | {"class": name}).result(int)
        assert type(raised.value) is kind


def test_reports_come_back_as_they_were() -> None:
    turn = TableTurn(ODD, Lsn(0x99), 3, 1, 2, 3, {"insert": 1}, 0.5, 1.5)
    ranged = RangeReport(SPAN, 4, {"I": 2}, 77, Lsn(1), Lsn(2), 3, None, {ODD: turn, T: turn}, {"apply": 1.0},
                         [Untaken(5, T, 6, "why")])  # fmt: skip
    copied = CopyReport(ODD, Lsn(0x77), 5, 6, 7, 0.25, 8)
    sync = SyncReport(Lsn(1), Lsn(2), Lsn(3), [copied], 1, 2, 3, 4, 0.5, [(ODD, "why")], [(T, "what")], frozenset([T]))
    kept = MaintenanceReport(Lsn(5), None, 1, 2, 3, [T], [ODD], [], 4, 5, [T], [(T, "no")], 6, 7.5)
    for report in (ranged, sync, kept, MaintenanceReport(Lsn(5), Lsn(6))):
        assert from_plain(type(report), json.loads(json.dumps(to_plain(report)))) == report
