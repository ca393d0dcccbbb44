"""Effects of the catalog watch on tables, without Spark and without a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pgcdc_assets.core.catalog import Catalog, Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.flow.catalogwatch import CatalogWatch
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.structurechanges import MirrorChange, StructureChanges
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.structure.successor import successor
from tests.flow.mirrors import OWNER, copied_at_10_applied_to_20, delta_target, no_spark
from tests.structure.marked import marks, remarked

INT = PgType(23, "int4")


def _table(oid: int, name: str, *columns: str) -> Table:
    made = tuple(Column(number, column, INT) for number, column in enumerate(("id", *columns), 1))
    return Table(oid, TableName("public", name), made, key=(1,), marks=marks(publications="1:1"))


class Told(Silent):
    """Collects the progress lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        self.lines.append(f"{stage}: {message}")


A, B = _table(1, "a"), _table(2, "b", "v")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Tables a and b, copied at LSN 10 and up to date at LSN 20."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(lake=tmp_path / "lake")
    identity = OWNER
    log = ChangeLog(settings.layout)
    log.create(identity, Lsn(5), 1)
    catalog = Catalog(identity, "p", 180000, (A, B))
    target = delta_target(settings.layout, identity)
    progress = TablesProgress(settings.layout, catalog, target, log.began, log.start)
    work = Work(settings, catalog, log, target, progress, Silent(), SparkOnDemand(no_spark))
    for table in (A, B):
        copied_at_10_applied_to_20(settings.layout, table)
        work.progress.copying([table], Lsn(10))
        work.progress.copied(table, Lsn(10), 1)
    return work


@dataclass
class _Source:
    work: Work
    empty: bool

    def mark_now(self) -> Lsn:
        return self.work.log.position()

    def without_rows(self, _: int) -> bool:
        return self.empty


def _watched(work: Work, live: Sequence[Table], *, empty: bool = False, paused: bool = False) -> None:
    structure = StructureChanges(work)
    watch = CatalogWatch(work, _Source(work, empty), structure)  # type: ignore[arg-type]
    watch.paused = paused
    watch.compare_all(live)
    structure.cancel()


def test_catalog_changes_of_a_table_that_is_set_aside_are_noticed(work: Work) -> None:
    """The stream may show that the mirror lacks rows before a catalog check shows the reason."""
    work.progress.put_aside(B.name, Lsn(15), "the mirror lacks a row")
    _watched(work, [A, B])
    assert work.progress[B.name].state is TableState.SET_ASIDE
    _watched(work, [A, replace(B, marks=marks(publications="1:2"))])
    assert work.progress[B.name].state is TableState.WAITING
    assert work.progress[A.name].state is TableState.CATCHING_UP


def test_large_table_with_new_files_waits_for_the_operator(work: Work) -> None:
    """The new files may come from a TRUNCATE that is not streamed."""
    work.settings = work.settings.model_copy(update={"recopy_bytes": 1 << 20})
    new = marks(relfilenode=7, traceless=True)
    for _ in range(2):
        _watched(work, [replace(A, marks=new), replace(B, marks=new, pages=129)])
    assert work.progress[A.name].state is TableState.WAITING
    entry = work.progress[B.name]
    assert entry.state is TableState.SET_ASIDE
    assert "has new files" in (entry.reason or "")
    assert (entry.reason or "").endswith("it has 1 MiB, more than `recopy_bytes`, so it waits for your request")


def test_files_are_compared_with_those_of_the_last_catalog_check(work: Work) -> None:
    """A TRUNCATE in one interval between checks and a SET NOT NULL in another interval do not count as a rewrite."""
    marked = remarked(B, "1:7 2:7", relfilenode=5)
    work.progress.moved(B.name, Lsn(20), table=marked)
    _watched(work, [A, remarked(marked, relfilenode=6)])
    _watched(work, [A, remarked(marked, "1:7 2:8", relfilenode=6)])
    assert work.progress[B.name].state is TableState.CATCHING_UP
    _watched(work, [A, remarked(marked, "1:7 2:9", relfilenode=7)])
    assert work.progress[B.name].state is TableState.WAITING


def test_table_published_during_a_run_waits_for_its_copy(work: Work) -> None:
    new = _table(9, "new")
    _watched(work, [A, B, new])
    assert work.progress.waiting() == [new]


def test_emptied_publication_ends_the_run(work: Work) -> None:
    with pytest.raises(EmptyPublication, match="publication p"):
        _watched(work, [])
    _watched(work, [A])


def test_table_that_no_mirror_can_hold_is_not_copied(work: Work) -> None:
    refused = replace(_table(2, "b", "V", "v"), marks=marks(publications="1:2"))
    _watched(work, [A, refused])
    entry = work.progress[B.name]
    assert (entry.state, entry.refused, work.progress.waiting()) == (TableState.SET_ASIDE, True, [])
    assert "differ only in case" in (entry.reason or "")
    _watched(work, [A, replace(B, marks=marks(publications="1:2"))])
    assert [table.name for table in work.progress.waiting()] == [B.name], "its columns fit now"


def test_many_changes_are_logged_once_in_one_line(work: Work) -> None:
    """Each catalog check finds the same changes again, because applying is paused and the mirrors do not change."""
    observer = Told()
    work.observer = observer
    more = tuple(Column(number, f"c{number}", INT, missing="1") for number in range(3, 38))
    changed = replace(B, columns=(*B.columns, *more))
    for _ in range(3):
        _watched(work, [A, changed], paused=True)
    (line,) = observer.lines
    assert line.startswith('watch: table public.b: column "c3" was added with a value in older rows, column "c4" ')
    assert line.endswith('column "c7" was added with a value in older rows, and 30 more')
    _watched(work, [A, B], paused=True)
    assert len(observer.lines) == 1
    _watched(work, [A, changed], paused=True)
    assert observer.lines == [line, line], "it came back"


def test_renamed_table_is_logged_as_renamed(work: Work) -> None:
    """The log lines of the other tables say that they are now published, or no longer published."""
    observer = Told()
    work.observer = observer
    _watched(work, [replace(A, name=TableName("public", "c")), _table(9, "new")])
    assert observer.lines == [
        "watch: table public.b: is no longer published, or was dropped",
        "watch: table public.new: is published now",
        "watch: table public.c: was called public.a, and its mirror is renamed too",
    ]


@pytest.mark.parametrize(
    ("now", "said"),
    [(B, "this was undone, and its mirror is unchanged"), (_table(2, "b", "w"), "its mirror has the new structure")],
    ids=["renamed back", "still renamed"],
)
def test_log_line_says_that_the_mirror_ignores_an_undone_change(work: Work, now: Table, said: str) -> None:
    """Rows with the new name of a column arrived before the catalog was read."""
    told = Told()
    work.observer = told
    after = successor(B, now, Lsn(20))
    work.progress.reshaping(B.name)
    change = MirrorChange(after, "column 'v' was renamed to 'w'", version=2)
    assert StructureChanges(work).take_in(change, Lsn(20))
    assert told.lines == [f"watch: table public.b: column 'v' was renamed to 'w'; {said}, as of 0/14"]
