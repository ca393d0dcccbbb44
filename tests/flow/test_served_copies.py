"""When a request for copies is answered, and with what: the run is a script. No Spark, no source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, CopyOutdated, UnknownTable
from pgcdc_assets.flow import hold, requests
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.flow.requests import Job, Request
from pgcdc_assets.flow.serving import COPIES, Serving
from pgcdc_assets.flow.work import Work
from pgcdc_assets.mirror.target import CopyReport
from tests.flow.test_drift import A, B, work

__all__ = ["work"]


@dataclass
class Script:
    """A run that does what the test says."""

    work: Work
    following: bool = True
    copying: bool = False
    rests: str | None = None
    held_up: str | None = None
    copied: list[CopyReport] = field(default_factory=list)

    def copy_anew(self, tables: Sequence[TableName]) -> None:
        self.work.progress.request_copy(tables)
        self.copying = True

    def land(self, table: Table, *, last: bool = True) -> None:
        self.work.progress.copying([table], Lsn(20))
        self.work.progress.copied(table, Lsn(20), 1)
        self.copied.append(CopyReport(table.name, Lsn(20), len(self.copied), 0, 0, 0.0, 1))
        self.copying = not last

    def heal(self, tables: Sequence[TableName]) -> None:
        self.work.progress.heal(tables)

    def rest_on(self) -> None:
        raise AssertionError("nothing here works on mirrors")

    def summary(self) -> SyncReport:
        return SyncReport(ZERO, Lsn(20), Lsn(20), list(self.copied), 3, 4, 5, 0, 1.0, [])


class Case:
    def __init__(self, work: Work) -> None:
        self.progress = work.progress
        self.run = Script(work)
        self.serving = Serving(work, self.run, lambda seconds: Allowance(seconds))
        self.layout = work.layout
        self.request = Request(Job.SNAPSHOT, "snapshot", (A.name, B.name))

    @contextmanager
    def asked(self) -> Iterator[None]:
        with requests.placed(self.layout, self.request):
            yield

    @property
    def answer(self) -> requests.Answer | None:
        return requests.answer_to(self.layout, self.request)

    def result(self) -> Any:
        answer = self.answer
        assert answer is not None
        return answer.result(SyncReport)


@pytest.fixture
def case(work: Work) -> Case:
    return Case(work)


def test_an_answer_comes_with_the_point_that_lists_all_of_them(case: Case) -> None:
    case.run.land(B)
    with case.asked():
        assert case.serving.serve()
        assert case.serving.busy
        case.run.land(A, last=False)
        case.run.land(B)
        assert not case.serving.serve()
        case.progress.publish(Lsn(20), Lsn(20))
        assert case.serving.serve()
        report = case.result()
        assert [(copy.table, copy.rows) for copy in report.copied] == [(A.name, 1), (B.name, 2)]
        assert (report.start, report.transactions) == (Lsn(20), 0)
        # Its command has yet to read the answer.
        assert not case.serving.serve()
    assert not case.serving.busy


def test_a_table_that_is_set_aside_or_gone_is_waited_for_no_more(case: Case) -> None:
    with case.asked():
        case.serving.serve()
        case.progress.copying([A, B], Lsn(20))
        case.progress.put_aside(A.name, Lsn(20), "cannot be copied")
        assert not case.serving.serve()
        case.progress.not_copied(B.name, "away")
        case.progress.gone([A.name])
        case.run.copying = False
        assert case.serving.serve()
        assert case.result().copied == []


def test_a_table_that_is_left_for_later_is_an_error(case: Case) -> None:
    with case.asked():
        case.serving.serve()
        case.run.land(A)
        case.serving.not_copied(B.name, CopyBlocked("is locked", thing="table public.b"))
        with pytest.raises(CopyBlocked, match=r"public\.b: is locked"):
            _ = case.serving.serve() and case.result()


def test_a_table_that_never_rests_is_an_error(case: Case) -> None:
    with case.asked():
        case.serving.serve()
        for _ in range(COPIES):
            assert not case.serving.serve()
            case.run.land(B, last=False)
            case.progress.must_copy(B.name, Lsn(20), "was altered")
        with pytest.raises(CopyOutdated, match=r"public\.b: was altered"):
            _ = case.serving.serve() and case.result()


def test_copies_under_way_and_an_end_are_not_met_by_new_ones(case: Case) -> None:
    with case.asked():
        for case.run.copying, case.run.following in ((True, True), (False, False)):
            assert not case.serving.serve()
        assert case.answer == requests.Answer(case.request.number, waits="waits for copies under way")


def test_a_verify_that_has_yet_to_get_its_point_comes_first(case: Case) -> None:
    with case.asked(), hold.placed(case.layout) as held:
        assert not case.serving.serve()
        held.at(Lsn(30))
        assert not case.serving.serve()
        for name in (A.name, B.name):
            case.progress.moved(name, Lsn(30))
        case.progress.publish(Lsn(30), Lsn(30))
        assert case.serving.serve()


def test_a_request_that_is_withdrawn_is_let_go_of(case: Case) -> None:
    with case.asked():
        case.serving.serve()
    assert case.serving.busy
    case.run.land(A)
    assert not case.serving.serve()
    assert not case.serving.busy
    assert case.answer is None


def test_a_table_that_is_not_known_copies_none(case: Case) -> None:
    case.request = Request(Job.SNAPSHOT, "snapshot", (A.name, TableName("public", "nope")))
    with case.asked():
        case.serving.serve()
        with pytest.raises(UnknownTable, match="nope"):
            case.result()
    assert case.progress.waiting() == []


def test_why_it_waits_is_told_before_it_begins_and_after(case: Case) -> None:
    def told() -> str | None:
        case.serving.serve()
        return case.answer.waits if case.answer else None

    with case.asked():
        case.run.copying, case.run.held_up = True, "waits for pid 7"
        assert told() == "the copy waits for pid 7"
        case.run.copying, case.run.rests = False, "waits: applying is paused"
        assert told() == "waits: applying is paused"
        assert not case.run.copying
        case.run.rests = None
        case.serving.serve()
        assert case.run.copying
        case.run.held_up = "waits for pid 8"
        assert told() == "the copy waits for pid 8"
        case.run.rests = "waits: applying is paused"
        assert told() == "waits: applying is paused", "a table that no copy is under way for is not given up meanwhile"
