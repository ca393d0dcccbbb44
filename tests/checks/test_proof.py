"""The record of the last comparison of each table."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.checks.report import TableReport, keep_proofs, read_proofs
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.store.local import path_of

A, B, C = (TableName("public", name) for name in ("a", 'Odd "b"', "c"))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout.of(tmp_path / "lake")
    path_of(found.own).mkdir(parents=True)
    return found


def test_last_comparison_of_each_table_is_kept(layout: Layout) -> None:
    keep_proofs(layout, [TableReport(A, lsn=Lsn(5)), TableReport(B, missing=1, lsn=Lsn(5))])
    keep_proofs(layout, [TableReport(B, lsn=Lsn(9)), TableReport(A, compared=False, reason="locked", lsn=Lsn(9))])
    found = read_proofs(layout)
    assert {name: (proof.lsn, proof.equal) for name, proof in found.items()} == {A: (5, True), B: (9, True)}


def test_a_difference_that_unpublished_updates_explain_is_no_difference(layout: Layout) -> None:
    keep_proofs(layout, [TableReport(A, extra=1, updates_seen=False, lsn=Lsn(5)), TableReport(C, extra=1, lsn=Lsn(5))])
    assert {name: proof.equal for name, proof in read_proofs(layout).items()} == {A: True, C: False}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"public.a": 1}', b'{"a.b.c": {}}'])
def test_a_damaged_record_is_replaced_by_the_next_comparison(layout: Layout, content: bytes) -> None:
    path_of(layout.proofs).write_bytes(content)
    assert read_proofs(layout) == {}
    keep_proofs(layout, [TableReport(A, lsn=Lsn(5))])
    assert set(read_proofs(layout)) == {A}
