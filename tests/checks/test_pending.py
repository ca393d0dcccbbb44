"""For each mirror, the oldest transaction of the change log that the mirror lacks. Also: the stored results of
``verify``, and the lag of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pgcdc_assets.checks import positions as of_module
from pgcdc_assets.checks.health import Facts, LogFacts, SourceFacts, TableFacts
from pgcdc_assets.checks.positions import Lag, Pending, _lag, pending
from pgcdc_assets.checks.report import TableReport, keep_proofs, read_proofs
from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.source.slot.slot import SlotStatus
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.defs.catalogs import catalog_of
from tests.log.streams import START, WHO, frames_of, writer_of

T1, T2 = TableName("public", "t1"), TableName("public", "t2")
STEP = 100


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    """A change log with five batches. The first and the last batch contain rows of t1, the three batches between them
    rows of t2."""
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


def test_a_mirror_that_has_all_transactions_of_the_log_is_not_listed(log: ChangeLog, catalog: Catalog) -> None:
    end = ends(log)
    assert found(log, catalog, {T1: end[4], T2: end[4]}) == {}
    assert found(log, catalog, {T1: end[4], T2: end[3]}) == {}, "the last batch has no rows of t2"


def test_the_oldest_missing_transaction_is_in_the_first_batch_with_rows_of_the_table(
    log: ChangeLog, catalog: Catalog
) -> None:
    """The search begins at the mirror's position, so earlier batches with rows of the table do not count."""
    end = ends(log)
    both = found(log, catalog, {T1: end[0], T2: end[0]})
    assert {name: one.start for name, one in both.items()} == {T1: end[3], T2: end[0]}
    assert both[T2].committed == log.batches(end[0])[0].first_commit_ts


def test_each_table_is_searched_from_its_own_position(log: ChangeLog, catalog: Catalog) -> None:
    end = ends(log)
    assert {name: one.start for name, one in found(log, catalog, {T1: START, T2: end[3]}).items()} == {T1: START}


def test_a_table_without_a_position_is_not_searched(log: ChangeLog, catalog: Catalog) -> None:
    assert found(log, catalog, {T1: None}) == {}


def test_a_search_that_has_read_too_many_bytes_uses_the_lsn_bounds_of_the_files_instead(
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
    """A search reads a limited number of bytes of the log. If it searched separately for each of the many tables that
    were set aside, it would reach this limit before it has searched for the other tables."""
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
    assert len(walks) == 3, "one file is read for t2, and two files for all other tables"


# `verify` stores the result of the newest comparison of each table ----------------------------------

A, B, C = (TableName("public", name) for name in ("a", 'Odd "b"', "c"))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout.of(tmp_path / "lake")
    path_of(found.own).mkdir(parents=True)
    return found


def test_the_result_of_the_last_comparison_of_each_table_is_kept(layout: Layout) -> None:
    keep_proofs(layout, [TableReport(A, lsn=Lsn(5)), TableReport(B, missing=1, lsn=Lsn(5))])
    keep_proofs(layout, [TableReport(B, lsn=Lsn(9)), TableReport(A, compared=False, reason="locked", lsn=Lsn(9))])
    found = read_proofs(layout)
    assert {name: (proof.lsn, proof.equal) for name, proof in found.items()} == {A: (5, True), B: (9, True)}


def test_a_difference_that_unpublished_updates_explain_counts_as_equal(layout: Layout) -> None:
    keep_proofs(layout, [TableReport(A, extra=1, updates_seen=False, lsn=Lsn(5)), TableReport(C, extra=1, lsn=Lsn(5))])
    assert {name: proof.equal for name, proof in read_proofs(layout).items()} == {A: True, C: False}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"public.a": 1}', b'{"a.b.c": {}}'])
def test_a_damaged_record_of_comparisons_is_replaced_by_the_next_comparison(layout: Layout, content: bytes) -> None:
    path_of(layout.proofs).write_bytes(content)
    assert read_proofs(layout) == {}
    keep_proofs(layout, [TableReport(A, lsn=Lsn(5))])
    assert set(read_proofs(layout)) == {A}


# The lag of a table, from the facts about source, log and lake --------------------------------------

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
AGO = NOW - timedelta(seconds=40)
AT = Lsn(10_000)
LAGGING = Identity("7123", "shop", "pgcdc")
LEVEL = Facts(NOW, "pgcdc", SourceFacts(LAGGING, AT), log=LogFacts(LAGGING, Lsn(1), AT))
BEHIND = replace(LEVEL, log=LogFacts(LAGGING, Lsn(1), Lsn(AT - 500)))
"""The source is ahead of the log."""
ORDERS = TableFacts(TableName("public", "orders"), TableState.STREAMING, AT)
EVENTS = TableFacts(TableName("public", "events"), TableState.CATCHING_UP, Lsn(AT - 1000))


def test_a_table_lags_since_the_commit_of_the_first_transaction_that_its_mirror_lacks() -> None:
    assert _lag(LEVEL, EVENTS, Pending(Lsn(AT - 1000), AGO), None) == Lag(1000, 40.0)


def test_a_table_whose_mirror_has_all_its_transactions_has_a_lag_of_0_seconds() -> None:
    """The mirror's position may be below the source's position, because only other tables have changed since then."""
    assert _lag(LEVEL, EVENTS, None, AGO) == Lag(1000, 0.0)


def test_the_lag_is_zero_while_a_process_receives_the_rest_of_the_wal() -> None:
    assert _lag(replace(BEHIND, at_work="`pgcdc follow` (pid 5)"), ORDERS, None, AGO) == Lag(0, 0.0)


def test_without_a_receiving_process_the_lag_counts_from_the_last_reception() -> None:
    assert _lag(BEHIND, ORDERS, None, AGO) == Lag(0, 40.0)
    assert _lag(replace(BEHIND, slot=_inactive(7)), ORDERS, None, AGO) == Lag(0, 7.0)
    assert _lag(BEHIND, ORDERS, None, None) == Lag(0, None)


def _inactive(seconds: float) -> SlotStatus:
    return SlotStatus(
        name="pgcdc", plugin="pgoutput", database="shop", connected_to="shop", temporary=False, active=False,
        active_pid=None, restart_lsn=AT, confirmed_flush_lsn=AT, wal_lsn=AT, wal_status="reserved", safe_wal_size=None,
        catalog_xmin_age=None, xmin_age=None, two_phase=False, conflicting=False, invalidation_reason=None,
        inactive_since=NOW - timedelta(seconds=seconds), failover=False, synced=False,
    )  # fmt: skip


def test_without_the_source_the_lag_counts_only_transactions_in_the_log() -> None:
    assert _lag(replace(LEVEL, source=None), ORDERS, None, AGO) == Lag(None, None)
    assert _lag(replace(LEVEL, source=None), ORDERS, Pending(AT, AGO), None) == Lag(None, 40.0)
