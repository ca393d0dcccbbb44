"""What pgcdc does with a mirror after its table has changed in the catalog. Each case is one situation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.core.catalog import Column, Lineage, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.structure.differences import changes
from pgcdc_assets.structure.record import Strange, TableRecord, TableState, UnreadRows
from pgcdc_assets.structure.verdict import AfterRows, Later, Recopy, Reshape, Rules, SetAside, Stay, Verdict, verdict
from tests.structure.marked import leaf, marks, parsed, remarked

INT = PgType(23, "int4")
ID, A = Column(1, "id", INT), Column(2, "a", INT)
T = Table(1, TableName("public", "t"), (ID, A), key=(1,), marks=marks("1:7 2:7", relfilenode=5, publications="9:1"))
P1, P2 = (leaf(oid, TableName("public", f"p{oid}"), 5, "1:7", ((1, 0),)) for oid in (11, 12))
P = replace(T, partitioned=True, leaves=(P1,))
RENAMED = replace(T, columns=(ID, replace(A, name="b")))
LARGE = replace(RENAMED, key=(), pages=129)
ADDED = remarked(replace(T, columns=(*T.columns, Column(3, "c", INT))), "1:7 2:7 3:9")
REGAINED = remarked(T, publications=parsed("9:2"))
TRUNCATED_UNTOLD = replace(
    T, marks=replace(marks("1:7 2:7", relfilenode=6, traceless=True), publications=T.marks.publications)
)

FOLLOWED = TableRecord(T, TableState.STREAMING, Lsn(20), 3)
PARTED = replace(FOLLOWED, table=P)
ASIDE = replace(FOLLOWED, state=TableState.SET_ASIDE, reason="a row cannot be read")
STRAY, ATTACHED, UNREAD = (
    replace(FOLLOWED, unread=UnreadRows(how, what)) for how, what in (
        (Strange.PARTITION, "a partition came"), (Strange.ATTACHED, "it was a partition for a while"),
        (Strange.STRUCTURE, "column 'b' was dropped"),
    )
)  # fmt: skip
MOVING = replace(FOLLOWED, state=TableState.WAITING, former=TableName("public", "s"))
RESHAPED = replace(UNREAD, table=replace(T, lineage=Lineage(1, 2, 15)))
REWRITE, WORD = Rules("rewrite", 1 << 20), Rules("set_aside", 1 << 20)
BY_ROWS = 'column "a" was renamed to "b"'
TOO_LARGE = f"{BY_ROWS}, its key changed; it has 1 MiB, more than `recopy_bytes`, so pgcdc does not copy it by itself"


def decided(record: TableRecord, now: Table, rules: Rules, **others: Any) -> Verdict:
    return verdict(record, now, changes(record.table, now), rules, **others)


@pytest.mark.parametrize(
    ("record", "now", "rules", "said"),
    [
        pytest.param(FOLLOWED, T, REWRITE, Stay(), id="unchanged"),
        pytest.param(FOLLOWED, remarked(T, relfilenode=6), REWRITE, Stay(), id="truncated"),
        pytest.param(FOLLOWED, REGAINED, REWRITE, Recopy("its publication was changed or created again, or lacked "
                     "the table for some time: changes may be missing"), id="published again"),
        pytest.param(ASIDE, REGAINED, REWRITE, Recopy("its publication was changed or created again, or lacked "
                     "the table for some time: changes may be missing"), id="set aside, published again"),
        pytest.param(FOLLOWED, replace(T, oid=2), WORD, Recopy("was dropped and created again"), id="created again"),
        pytest.param(FOLLOWED, TRUNCATED_UNTOLD, REWRITE, Recopy("public.t has new files, and the catalog does not "
                     "show why: changes may be missing", restructured=True), id="new files"),
        pytest.param(replace(FOLLOWED, refused=True, state=TableState.SET_ASIDE), T, REWRITE,
                     Recopy("can be mirrored now"), id="can be mirrored for the first time"),
        pytest.param(ASIDE, T, REWRITE, Later(), id="set aside"),
        pytest.param(ASIDE, RENAMED, REWRITE, Later(), id="set aside, columns changed"),
        pytest.param(replace(ASIDE, table=P), replace(P, leaves=(P1, P2)), REWRITE,
                     Recopy("has a new partition public.p12"), id="set aside, partition added"),
        pytest.param(replace(FOLLOWED, reshaping=True), RENAMED, REWRITE, Later(), id="reshape not finished"),
        pytest.param(FOLLOWED, RENAMED, REWRITE, Reshape(BY_ROWS), id="column renamed"),
        pytest.param(FOLLOWED, RENAMED, WORD, SetAside(BY_ROWS), id="column renamed, set_aside"),
        pytest.param(FOLLOWED, replace(LARGE, pages=1), REWRITE, Recopy(f"{BY_ROWS}, its key changed",
                     restructured=True), id="key dropped"),
        pytest.param(FOLLOWED, LARGE, REWRITE, SetAside(TOO_LARGE), id="key dropped, large table"),
        pytest.param(PARTED, replace(P, leaves=()), REWRITE, Reshape("lost partition public.p11", leaves=True),
                     id="partition lost"),
        pytest.param(PARTED, replace(P, leaves=(P1, P2)), REWRITE, Recopy(
                     "has a new partition public.p12, with rows in it", restructured=True), id="partition with rows"),
        pytest.param(STRAY, T, REWRITE, Recopy("a partition came"), id="rows of an unknown partition"),
        pytest.param(ATTACHED, RENAMED, REWRITE, Recopy("it was a partition for a while"),
                     id="rows from when the table was a partition"),
        pytest.param(MOVING, RENAMED, REWRITE, Later(), id="table and column renamed"),
        pytest.param(MOVING, replace(T, oid=2), REWRITE, Recopy("was dropped and created again"),
                     id="table renamed and created again"),
        pytest.param(UNREAD, T, WORD, SetAside("column 'b' was dropped"), id="rows that cannot be read, set_aside"),
        pytest.param(UNREAD, T, REWRITE, Reshape("column 'b' was dropped"), id="rows that cannot be read"),
        pytest.param(RESHAPED, T, REWRITE, Recopy("column 'b' was dropped", restructured=True),
                     id="rows that the newest structure cannot read"),
        pytest.param(FOLLOWED, ADDED, REWRITE, AfterRows('has a new column "c"'), id="column added"),
        pytest.param(FOLLOWED, ADDED, WORD, Later(), id="column added, set_aside"),
        pytest.param(replace(FOLLOWED, table=replace(T, key=())), replace(ADDED, key=()), REWRITE, Recopy(
                     'has a new column "c" (it has no key)', restructured=True), id="column added, without a key"),
    ],
)  # fmt: skip
def test_each_situation_of_a_changed_table_leads_to_the_expected_verdict(
    record: TableRecord, now: Table, rules: Rules, said: Verdict
) -> None:
    assert decided(record, now, rules) == said


def test_a_table_that_no_mirror_can_hold_is_always_set_aside() -> None:
    assert decided(STRAY, REGAINED, REWRITE, refusal="it has no column") == SetAside("it has no column", refused=True)


def test_a_new_partition_without_rows_needs_no_copy() -> None:
    now = replace(P, leaves=(P1, P2))
    said = decided(PARTED, now, REWRITE, without_rows=lambda oid: oid == P2.oid)
    assert said == Reshape("has a new partition public.p12", leaves=True)


@pytest.mark.parametrize("now", [RENAMED, ADDED, T], ids=["renamed", "added", "unchanged"])
def test_while_applying_is_paused_the_decision_is_left_to_a_later_catalog_check(now: Table) -> None:
    assert decided(FOLLOWED, now, REWRITE, paused=True) == Later()


def test_a_table_with_missing_changes_is_copied_even_while_applying_is_paused() -> None:
    assert isinstance(decided(FOLLOWED, REGAINED, REWRITE, paused=True), Recopy)
