"""The oldest transaction that a mirror lacks, from the change log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.checks import lag as of_module
from pgcdc_assets.checks.health import TableFacts
from pgcdc_assets.checks.lag import Pending, pending
from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.log.summary import BatchSummary
from tests.defs.catalogs import catalog_of
from tests.log.written import START, WHO, frames_of, writer_of

T1, T2 = TableName("public", "t1"), TableName("public", "t2")
STEP = 100


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    """Five batches: rows of t1, then three times rows of t2, then t1 again."""
    log = ChangeLog(Layout.of(tmp_path / "lake"))
    log.create(WHO, START, 3)
    writer, _ = writer_of(log)
    for number, relation in enumerate((1, 2, 2, 2, 1)):
        at = START + 10 + STEP * number
        writer.commit(frames_of(at, relation), [], Lsn(at + 50))
    return log


@pytest.fixture
def catalog() -> Catalog:
    made = catalog_of(("public", "t1"), ("public", "t2"))
    return replace(made, tables=tuple(replace(table, oid=oid) for oid, table in enumerate(made.tables, start=1)))


def ends(log: ChangeLog) -> list[Lsn]:
    return [batch.end for batch in log.batches(START)]


def found(log: ChangeLog, catalog: Catalog, positions: Mapping[TableName, Lsn | None]) -> dict[TableName, Pending]:
    return pending(log, catalog, [TableFacts(name, TableState.STREAMING, lsn) for name, lsn in positions.items()])


def test_a_mirror_that_has_all_its_transactions_lacks_nothing(log: ChangeLog, catalog: Catalog) -> None:
    end = ends(log)
    assert found(log, catalog, {T1: end[4], T2: end[4]}) == {}
    assert found(log, catalog, {T1: end[4], T2: end[3]}) == {}, "the last batch has no rows of t2"


def test_the_first_batch_with_rows_of_the_table_counts(log: ChangeLog, catalog: Catalog) -> None:
    end = ends(log)
    both = found(log, catalog, {T1: end[0], T2: end[0]})
    assert {name: one.start for name, one in both.items()} == {T1: end[3], T2: end[0]}
    assert both[T2].committed == log.batches(end[0])[0].first_commit_ts


def test_a_table_that_was_set_aside_long_ago_has_its_own_search(log: ChangeLog, catalog: Catalog) -> None:
    end = ends(log)
    assert {name: one.start for name, one in found(log, catalog, {T1: START, T2: end[3]}).items()} == {T1: START}


def test_a_table_without_a_position_is_left_out(log: ChangeLog, catalog: Catalog) -> None:
    assert found(log, catalog, {T1: None}) == {}


def test_a_long_search_ends_with_what_the_bounds_of_the_files_say(
    log: ChangeLog, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_module, "READ_BYTES", 0)
    end = ends(log)
    both = found(log, catalog, {T1: end[0], T2: end[0]})
    assert {name: one.start for name, one in both.items()} == {T1: end[4], T2: end[0]}
    assert both[T1].committed == log.all_segments()[-1].written


def test_tables_at_many_positions_are_searched_together(
    log: ChangeLog, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that were set aside do not use up the bytes that are read for the others."""
    walks, in_order = [], log.in_order

    def counted(after: Lsn) -> Iterator[tuple[Segment, tuple[BatchSummary, ...]]]:
        for segment, batches in in_order(after):
            walks.append(segment.path.name)
            yield segment, batches

    monkeypatch.setattr(log, "in_order", counted)
    monkeypatch.setattr(of_module, "READ_BYTES", of_module.FILE_BYTES)
    end = ends(log)
    more = [replace(catalog.tables[0], oid=oid, name=TableName("public", f"a{oid}")) for oid in range(10, 1010)]
    catalog = replace(catalog, tables=(*catalog.tables, *more))
    aside = [TableFacts(table.name, TableState.SET_ASIDE, Lsn(START + place)) for place, table in enumerate(more)]
    both = pending(log, catalog, [
        *aside, TableFacts(T1, TableState.SET_ASIDE, START), TableFacts(T2, TableState.STREAMING, end[0]),
    ])  # fmt: skip
    assert {name: one.start for name, one in both.items()} == {T1: START, T2: end[0]}
    assert len(walks) == 3, "one file for t2, and two for all others"
