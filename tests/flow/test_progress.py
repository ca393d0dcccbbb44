"""Positions of tables, and which tables a consistent point lists, without Spark and without a source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.checks.facts import read_tables
from pgcdc_assets.core.catalog import Catalog, Column, Lineage, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.definition import commit_properties
from pgcdc_assets.errors import LakeError, NotRepairable, UsageError
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.mirror.delta.mirror import STRUCTURE, structured
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.deltatables import commit, opened
from tests.flow.mirrors import OWNER, copied_at_10_applied_to_20, copied_mirror, delta_target
from tests.structure.marked import parsed

RECORDED = Lsn(30)
"""The end of the change log."""


def _table(oid: int, name: str) -> Table:
    return Table(oid, TableName("public", name), (Column(1, "id", PgType(23, "int4")),), key=(1,))


A, B, C = (_table(oid, name) for oid, name in ((1, "a"), (2, "b"), (3, "c")))


@pytest.fixture
def progress(tmp_path: Path) -> TablesProgress:
    layout = Layout.of(tmp_path)
    for table in (A, B, C):
        copied_at_10_applied_to_20(layout, table)
    return TablesProgress(layout, Catalog(OWNER, "p", 180000, (A, B, C)), delta_target(layout, OWNER), Lsn(1), Lsn(1))


def both_published(
    layout: Layout, catalog: Catalog, lsn: Lsn, mirror: Callable[[Layout, Table], None] = copied_at_10_applied_to_20
) -> TablesProgress:
    """The progress of a sync that copied tables A and B at LSN 10, and published a point at ``lsn`` that lists both
    tables."""
    for table in (A, B):
        mirror(layout, table)
    progress = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    progress.copying([A, B], Lsn(10))
    for table in (A, B):
        progress.copied(table, Lsn(10), delta_target(layout, OWNER).version(table.name))
        progress.moved(table.name, lsn)
    assert progress.publish(lsn, RECORDED)
    return progress


def _listed(progress: TablesProgress) -> set[str]:
    newest = progress.points.newest()
    return set() if newest is None else {name.name for name in newest.tables}


def test_point_lists_only_tables_that_have_reached_its_lsn(progress: TablesProgress) -> None:
    assert progress.waiting() == [A, B, C]
    progress.copying([A, B, C], Lsn(10))
    assert not progress.publish(Lsn(10), RECORDED)
    progress.copied(A, Lsn(10), 1)
    progress.copied(B, Lsn(10), 1)
    progress.moved(A.name, Lsn(20), 2)
    assert not progress.publish(Lsn(20), RECORDED)
    # B is below the point, and C is still being copied.
    assert _listed(progress) == {"a"}
    progress.moved(B.name, Lsn(20))
    assert progress.publish(Lsn(20), RECORDED)
    assert _listed(progress) == {"a", "b"}
    newest = progress.points.newest()
    assert newest is not None
    # ``positions`` has the LSN that the Delta log records for each listed version. For B, the point lists version 1,
    # which is the copy at LSN 10.
    assert newest.positions == {A.name: 20, B.name: 10}
    assert progress[C.name].state is TableState.COPYING


def test_table_that_is_set_aside_or_waits_for_a_copy_is_not_listed_in_a_point(progress: TablesProgress) -> None:
    progress.copying([A, B, C], Lsn(10))
    for table in (A, B, C):
        progress.copied(table, Lsn(10), 1)
    assert progress.publish(Lsn(10), RECORDED)
    progress.put_aside(B.name, Lsn(15), "why not")
    for table in (A, C):
        progress.moved(table.name, Lsn(20))
    assert progress.publish(Lsn(20), RECORDED)
    assert _listed(progress) == {"a", "c"}
    progress.request_copy([C.name])
    assert progress.publish(Lsn(20), RECORDED)
    assert _listed(progress) == {"a"}


def test_table_is_not_listed_below_the_lsn_of_its_new_structure(progress: TablesProgress) -> None:
    progress.copying([A, B, C], Lsn(10))
    for table in (A, B, C):
        progress.copied(table, Lsn(10), 2)
        progress.moved(table.name, Lsn(20))
    assert progress.publish(Lsn(20), RECORDED)
    for table in (A, B, C):
        progress.moved(table.name, Lsn(22))
    progress.reshaping(B.name)
    assert not progress.publish(Lsn(22), RECORDED)
    assert _listed(progress) == {"a", "c"}
    assert progress.reshaped(replace(B, lineage=Lineage(1, 1, 25)), 2)
    assert not progress.publish(Lsn(22), RECORDED)
    assert (_listed(progress), progress.listed.shown_from) == ({"a", "c"}, 25)
    for table in (A, B, C):
        progress.moved(table.name, Lsn(25))
    assert progress.publish(Lsn(25), RECORDED)
    assert _listed(progress) == {"a", "b", "c"}


def test_second_point_at_the_same_lsn_lists_the_same_versions(progress: TablesProgress) -> None:
    """The second point still lists a table whose structure is about to change. A third point at this LSN no longer
    lists the table, because the table must be copied again."""
    progress.copying([A, B, C], Lsn(10))
    for table in (A, B, C):
        progress.copied(table, Lsn(10), 2)
        progress.moved(table.name, Lsn(20))
    assert progress.publish(Lsn(20), RECORDED)
    before = progress.points.newest()
    progress.reshaping(B.name)
    assert not progress.publish(Lsn(20), RECORDED)
    after = progress.points.newest()
    assert before is not None
    assert after is not None
    assert (after.tables, after.positions) == (before.tables, before.positions)
    progress.must_copy(B.name, Lsn(20), "its rows may be others")
    progress.publish(Lsn(20), RECORDED)
    assert _listed(progress) == {"a", "c"}


def test_structure_recorded_in_the_mirror_is_used_if_the_sync_died_before_it_saved_the_state(tmp_path: Path) -> None:
    """A sync died right after it had written the new structure in a Delta commit of the mirror."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    both_published(layout, catalog, Lsn(20))
    follows = replace(B, lineage=Lineage(1, 1, 25))
    told = json.dumps({"copy": 10, "table": follows.to_json()})
    commit_properties(opened(layout.mirror(B.name)), {STRUCTURE: told})
    again = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert (again[B.name].table, again[A.name].table) == (follows, A)
    stored = TableStates(layout).get(B.name)
    assert stored is not None
    assert stored.table == follows


@pytest.mark.parametrize(("rows_at", "applied"), [(20, True), (21, False)])
def test_columns_that_a_turn_added_belong_to_the_table_once_the_mirror_has_the_turns_rows(
    tmp_path: Path, rows_at: int, applied: bool
) -> None:
    """A sync died after a turn had added a column to the mirror, and before it saved the state. Rows that are not
    applied yet may lack this column."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    both_published(layout, catalog, Lsn(20))
    wider = replace(B, columns=(*B.columns, Column(2, "c", PgType(23, "int4"))))
    commit_properties(opened(layout.mirror(B.name)), structured(wider, Lsn(10), Lsn(rows_at)))
    again = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert again[B.name].table == (wider if applied else B)
    stored = TableStates(layout).get(B.name)
    assert stored is not None
    assert stored.table == again[B.name].table


def test_pgcdc_heal_lets_a_table_that_was_set_aside_continue_from_the_log(
    progress: TablesProgress, tmp_path: Path
) -> None:
    progress.copying([A, B], Lsn(10))
    for table in (A, B):
        progress.copied(table, Lsn(10), 2)
    progress.put_aside(B.name, Lsn(20), "the mirror lacks a row")
    with pytest.raises(UsageError, match="is not set aside, so `pgcdc heal` has nothing to do"):
        progress.heal([A.name])
    progress.heal([B.name])
    healed = progress[B.name]
    assert (healed.state, healed.replay_lsn, healed.reason) == (TableState.CATCHING_UP, Lsn(20), None)
    stored = TableStates(Layout.of(tmp_path)).get(B.name)
    assert stored is not None
    assert stored.state is TableState.CATCHING_UP
    progress.put_aside(B.name, Lsn(20), "again")
    layout = Layout.of(tmp_path)
    progress = TablesProgress(layout, Catalog(OWNER, "p", 180000, (A, B)), delta_target(layout, OWNER), Lsn(1), Lsn(21))
    with pytest.raises(NotRepairable, match="is at 0/14, but the log begins at 0/15"):
        progress.heal([B.name])
    assert progress[B.name].state is TableState.SET_ASIDE


def test_copy_at_an_lsn_below_the_newest_point_publishes_no_lower_point(progress: TablesProgress) -> None:
    progress.copying([A, B, C], Lsn(10))
    for table in (A, B):
        progress.copied(table, Lsn(10), 1)
        progress.moved(table.name, Lsn(30))
    assert progress.publish(Lsn(30), RECORDED)
    progress.copied(C, Lsn(10), 1)
    assert not progress.publish(Lsn(10), RECORDED)
    assert not progress.publish(Lsn(30), RECORDED)
    assert _listed(progress) == {"a", "b"}
    progress.moved(C.name, Lsn(30))
    assert progress.publish(Lsn(30), RECORDED)
    assert _listed(progress) == {"a", "b", "c"}


def test_table_renamed_back_is_listed_from_the_lsn_where_the_catalog_showed_its_old_name_again(tmp_path: Path) -> None:
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    first = both_published(layout, catalog, Lsn(20))
    assert first.gone({A.name}) == [B.name]
    first.moved(A.name, Lsn(21))
    assert first.publish(Lsn(21), RECORDED)
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert first.found([A, B]) == [B.name]
    for progress, end in ((first, 25), (second, 29)):
        assert progress[B.name].listed_from is None
        for table in (A, B):
            progress.moved(table.name, Lsn(end - 2))
        assert not progress.publish(Lsn(end - 2), RECORDED), "there was no catalog check yet"
        progress.listed_from(Lsn(end))
        assert not progress.publish(Lsn(end - 2), RECORDED)
        assert _listed(progress) == {"a"}
        for table in (A, B):
            progress.moved(table.name, Lsn(end))
        if progress is second:
            assert progress.publish(Lsn(end), RECORDED)
            assert _listed(progress) == {"a", "b"}


def test_renamed_table_is_listed_from_the_lsn_where_the_catalog_showed_its_new_name(tmp_path: Path) -> None:
    """In this test, the sync that recorded the new name was killed before it published a point."""
    layout = Layout.of(tmp_path)
    first = both_published(layout, Catalog(OWNER, "p", 180000, (A, B)), Lsn(20))
    renamed = replace(B, name=TableName("public", "z"))
    delta_target(layout, OWNER).rename(B.name, renamed, first[B.name].version, Lsn(20))
    first.states.set(renamed, TableState.CATCHING_UP, Lsn(20))
    first.states.set(B, TableState.MOVED, Lsn(20), "its table was renamed to public.z")
    catalog = Catalog(OWNER, "p", 180000, (A, renamed))
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert second[renamed.name].listed_from is None
    for lsn, listed in ((22, {"a"}), (24, {"a", "z"})):
        for table in (A, renamed):
            second.moved(table.name, Lsn(lsn))
        second.publish(Lsn(lsn), RECORDED)
        assert _listed(second) == listed
        second.listed_from(Lsn(23))


def test_second_point_at_an_lsn_still_lists_a_table_whose_mirror_is_not_renamed_yet(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    before = both_published(layout, Catalog(OWNER, "p", 180000, (A, B)), Lsn(20)).points.newest()
    assert before is not None
    catalog = Catalog(OWNER, "p", 180000, (A, replace(B, name=TableName("public", "z")), C))
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert [entry.former for entry in second.renamed_tables()] == [B.name]
    copied_mirror(layout, OWNER, C.name, 20)
    second.copied(C, Lsn(20), 1)
    second.publish(Lsn(20), RECORDED)
    newest = second.points.newest()
    assert newest is not None
    assert newest.tables == {**before.tables, C.name: 1}


def test_table_that_is_set_aside_stays_set_aside_after_a_rename(tmp_path: Path) -> None:
    """The table stays set aside even if another table gets its former name. Only a copy that the operator requests ends
    this state."""
    layout = Layout.of(tmp_path)
    first = both_published(layout, Catalog(OWNER, "p", 180000, (A, B)), Lsn(20))
    first.put_aside(B.name, Lsn(20), "waits for a word")
    elsewhere, instead = replace(B, name=TableName("public", "z")), replace(C, name=B.name)
    renamed = Catalog(OWNER, "p", 180000, (A, elsewhere, instead))
    for _ in range(2):
        second = TablesProgress(layout, renamed, delta_target(layout, OWNER), Lsn(1), Lsn(1))
        assert [(entry.table, entry.reason) for entry in second.set_aside()] == [(elsewhere, "waits for a word")]
        assert second.waiting() == [instead]
    copied_mirror(layout, OWNER, elsewhere.name, 30)
    second.request_copy([elsewhere.name])
    second.copying([elsewhere], Lsn(30))
    second.copied(elsewhere, Lsn(30), 1)
    for back in (elsewhere, B):
        third = TablesProgress(
            layout, Catalog(OWNER, "p", 180000, (A, back)), delta_target(layout, OWNER), Lsn(1), Lsn(1)
        )
        assert third.set_aside() == []
        assert third.waiting() == []
    assert [entry.former for entry in third.renamed_tables()] == [elsewhere.name]


def test_table_whose_mirror_has_rows_of_another_table_is_copied_again(tmp_path: Path) -> None:
    """The mirror of B was moved to the folder of A's mirror. The stored states of the tables do not show this, because
    they are from before the move."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    first = both_published(layout, catalog, Lsn(20))
    delta_target(layout, OWNER).rename(B.name, replace(B, name=A.name), first[B.name].version, Lsn(20))
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert second.waiting() == [A]
    assert [entry.table for entry in second.followed()] == [B]


def test_a_table_that_was_never_in_a_point_enters_a_point_at_its_mirrors_lsn(tmp_path: Path) -> None:
    """The table had the same name at all LSNs, so a point may list the table at its mirror's LSN. The table should not
    wait for a point at a higher LSN, because a later sync that is not in follow mode may reach no higher LSN."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    for table in (A, B):
        copied_at_10_applied_to_20(layout, table)
    first = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    first.copying([A, B], Lsn(10))
    first.copied(A, Lsn(10), 2)
    first.copied(B, Lsn(10), 2)
    for b_stands_at, listed in ((21, {"a"}), (20, {"a", "b"})):
        second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
        assert second[B.name].listed_from is not None, "no point has listed b yet"
        second.moved(A.name, Lsn(20))
        second.moved(B.name, Lsn(b_stands_at))
        second.publish(Lsn(20), RECORDED)
        assert _listed(second) == listed


def test_partitioned_table_that_changed_after_the_newest_point_waits_for_a_catalog_check(tmp_path: Path) -> None:
    """A sync applied changes up to LSN 20, and was killed before it published a point. It may have found that rows of a
    dropped partition are missing."""
    layout, root = Layout.of(tmp_path), replace(B, partitioned=True)
    first = both_published(layout, Catalog(OWNER, "p", 180000, (A, B)), Lsn(19))
    first.states.set(root, TableState.CATCHING_UP, Lsn(19))
    second = TablesProgress(layout, Catalog(OWNER, "p", 180000, (A, root)), delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert second.needs_catalog_check
    for listed in ({"a"}, {"a", "b"}):
        second.publish(Lsn(20), RECORDED)
        assert _listed(second) == listed
        second.listed_from(Lsn(20))


@pytest.mark.parametrize("listed", [set(), {"a"}])
def test_partitioned_table_that_changed_after_its_copy_waits_for_a_catalog_check(
    tmp_path: Path, listed: set[str]
) -> None:
    """A sync copied the table at LSN 10, applied changes up to LSN 20, and was killed before a point listed the table.
    It may have found that rows of a dropped partition are missing. ``listed``: the tables of the newest point."""
    layout, root = Layout.of(tmp_path), replace(B, partitioned=True)
    catalog = Catalog(OWNER, "p", 180000, (A, root))
    first = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    first.copying([A, root], Lsn(10))
    for table in (A, root):
        copied_at_10_applied_to_20(layout, table)
        first.copied(table, Lsn(10), 2)
    if listed:
        first.moved(A.name, Lsn(20))
        first.publish(Lsn(20), RECORDED)
        assert _listed(first) == listed
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    for expected in ({"a"}, {"a", "b"}):
        second.publish(Lsn(20), RECORDED)
        assert _listed(second) == expected
        second.listed_from(Lsn(20))


def test_table_renamed_back_is_not_listed_at_the_newest_point(tmp_path: Path) -> None:
    """A sync brought the table up to the newest point's LSN, and was killed before it listed the table. At this LSN the
    table had a different name."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    first = both_published(layout, catalog, Lsn(19))
    assert first.gone({A.name}) == [B.name]
    first.moved(A.name, Lsn(20))
    assert first.publish(Lsn(20), RECORDED)
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert second[B.name].replay_lsn == 20
    assert second[B.name].listed_from is None
    second.listed_from(Lsn(22))
    second.publish(Lsn(20), RECORDED)
    assert _listed(second) == {"a"}


def test_unreadable_mirror_delays_no_other_table(tmp_path: Path) -> None:
    """The commit file of a version that a point lists is damaged. Such a file was synced to disk before the point was
    published. So no power cut can have damaged the file, and pgcdc does not remove the version. The reason that is
    reported for the table names the file."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    both_published(layout, catalog, Lsn(20))
    torn = layout.mirror(A.name) / "_delta_log" / f"{2:020}.json"
    path_of(torn).write_bytes(path_of(torn).read_bytes()[:100])
    progress = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert [entry.table for entry in progress.followed()] == [B]
    assert torn.name in (progress[A.name].reason or "")
    assert progress.recovered == {}


def test_rows_changed_by_another_writer_are_reported_until_a_new_copy(tmp_path: Path) -> None:
    """A sync finds the change when it starts or makes a point, and stores it in the table's state. ``status`` reports
    the change even before that."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    first = both_published(layout, catalog, Lsn(20))
    assert first.changed == {}

    rows = pa.table({"id": pa.array([9])})
    write_deltalake(str(layout.mirror(A.name)), rows, mode="append")
    assert [(facts.reason or "")[:14] for facts in read_tables(layout, catalog)] == ["another writer", ""]
    first.moved(A.name, Lsn(25), 3)
    first.moved(B.name, Lsn(25))
    assert first.publish(Lsn(25), RECORDED)
    newest = first.points.newest()
    assert newest is not None
    assert newest.changed.keys() == first.changed.keys() == {A.name}
    write_deltalake(str(layout.mirror(B.name)), rows, mode="append")
    second = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    assert second.changed == {A.name: first.changed[A.name], B.name: second[B.name].reason}
    assert all(facts.reason for facts in read_tables(layout, catalog))
    second.moved(A.name, Lsn(26), table=replace(A, rows=7))
    assert second.changed.keys() == {A.name, B.name}

    for table in (A, B):
        version = commit(
            path_of(layout.mirror(table.name)), [], "overwrite", {OWNER.app_id("snapshot", table.name.folder): 30}
        )
        second.copied(table, Lsn(30), version)
    assert second.publish(Lsn(30), RECORDED)
    for progress in (second, TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))):
        assert progress.changed == {}
    assert not any(facts.reason for facts in read_tables(layout, catalog))


def test_healed_table_is_still_reported_as_changed_by_another_writer_until_a_new_copy(tmp_path: Path) -> None:
    """The change is below the version that the newest point lists, so a new run does not read its commit again."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))

    def started() -> TablesProgress:
        return TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))

    def healed() -> TablesProgress:
        progress = started()
        progress.put_aside(A.name, Lsn(25), "why not")
        progress = started()
        assert progress.changed == {}
        progress.heal([A.name])
        return progress

    first = both_published(layout, catalog, Lsn(20))
    write_deltalake(str(layout.mirror(A.name)), pa.table({"id": pa.array([9])}), mode="append")
    first.moved(A.name, Lsn(25), 3)
    first.moved(B.name, Lsn(25))
    assert first.publish(Lsn(25), RECORDED)
    second = healed()
    assert second.changed == started().changed == first.changed
    second.listed_from(Lsn(26))
    second.moved(A.name, Lsn(26))
    second.moved(B.name, Lsn(26))
    assert second.publish(Lsn(26), RECORDED)
    newest = second.points.newest()
    assert newest is not None
    assert newest.changed == first.changed

    version = commit(path_of(layout.mirror(A.name)), [], "overwrite", {OWNER.app_id("snapshot", A.name.folder): 30})
    second.copied(A, Lsn(30), version)
    assert healed().changed == {}


def test_point_that_records_the_change_by_another_writer_stays_while_the_table_can_be_healed(tmp_path: Path) -> None:
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    progress = both_published(layout, catalog, Lsn(20))
    write_deltalake(str(layout.mirror(A.name)), pa.table({"id": pa.array([9])}), mode="append")
    progress.moved(A.name, Lsn(25), 3)
    progress.moved(B.name, Lsn(25))
    assert progress.publish(Lsn(25), RECORDED)
    progress.put_aside(A.name, Lsn(25), "why not")
    assert (A.name in progress.needed_listings, B.name in progress.needed_listings) == (True, True)
    later = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(26))
    assert A.name not in later.needed_listings, "the log lacks changes, so `heal` refuses the table"


@pytest.mark.parametrize("set_aside", [False, True])
def test_point_published_again_keeps_its_version_of_a_mirror_that_another_writer_changed(
    tmp_path: Path, set_aside: bool
) -> None:
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    progress = both_published(layout, catalog, Lsn(20))
    write_deltalake(str(layout.mirror(A.name)), pa.table({"id": pa.array([9])}), mode="append")
    version = commit(path_of(layout.mirror(B.name)), [], "append", {})
    if set_aside:
        progress.put_aside(A.name, Lsn(20), "why not")
    progress.republish({A.name: 3, B.name: version})
    newest = progress.points.newest()
    assert newest is not None
    assert (newest.tables, newest.changed) == ({A.name: 2, B.name: version}, {})


@pytest.mark.parametrize(
    ("began", "start", "state"),
    [(1, 1, TableState.CATCHING_UP), (1, 20, TableState.CATCHING_UP), (1, 21, TableState.WAITING),
     (11, 11, TableState.WAITING)],
)  # fmt: skip
def test_table_below_the_start_of_the_log_is_copied_again(
    tmp_path: Path, began: int, start: int, state: TableState
) -> None:
    """The table was copied at LSN 10 and is at LSN 20. It can continue without a copy only if the log already existed
    at LSN 10 (``began``) and still has all changes above LSN 20 (``start``)."""
    layout = Layout.of(tmp_path)
    copied_at_10_applied_to_20(layout, A)
    TableStates(layout).set(A, TableState.CATCHING_UP, Lsn(10))
    progress = TablesProgress(
        layout, Catalog(OWNER, "p", 180000, (A,)), delta_target(layout, OWNER), Lsn(began), Lsn(start)
    )
    assert progress[A.name].state is state


def test_no_point_is_above_the_log(progress: TablesProgress) -> None:
    progress.copying([A, B, C], Lsn(10))
    for table in (A, B, C):
        progress.copied(table, Lsn(10), 1)
        progress.moved(table.name, Lsn(RECORDED + 1))
    with pytest.raises(LakeError, match=f"at {Lsn(RECORDED + 1)}, above the end of the change log, {RECORDED}"):
        progress.publish(Lsn(RECORDED + 1), RECORDED)
    assert progress.points.newest() is None
    assert progress.publish(Lsn(RECORDED + 1), Lsn(RECORDED + 1))


def test_table_with_new_columns_is_not_listed_before_its_mirror_has_them(progress: TablesProgress) -> None:
    """Row messages may contain the new columns even below the LSN at which a catalog check first showed the columns. So
    no point lists the table until its mirror has the columns. Another catalog check is needed when the mirror has
    reached this LSN."""
    progress.copying([A, B, C], Lsn(10))
    for table in (A, B, C):
        progress.copied(table, Lsn(10), 2)
        progress.moved(table.name, Lsn(20))
    assert progress.columns_came(B.name, parsed("1:7 2:7"), lambda: Lsn(25)) == 25
    assert progress.columns_came(B.name, parsed("1:7 2:7"), lambda: Lsn(30)) == 25, (
        "the LSN of the first catalog check that showed the column"
    )
    assert not progress.publish(Lsn(20), RECORDED)
    assert _listed(progress) == {"a", "c"}
    assert not progress.needs_catalog_check
    progress.moved(B.name, Lsn(25))
    assert progress.needs_catalog_check
    assert progress.columns_came(B.name, parsed("1:7 2:7 3:9"), lambda: Lsn(35)) == 35, (
        "a further new column has its own LSN"
    )
    assert not progress.needs_catalog_check
    progress.unchanged(B.name, B)
    progress.moved(B.name, Lsn(40))
    assert not progress.needs_catalog_check


class Reached:
    """An empty set of tables. The first ``in`` test starts a thread that runs ``done``, and waits at most 0.5 s for the
    thread's end."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.thread = Thread(target=done)

    def __contains__(self, name: object) -> bool:
        self.thread.start()
        self.thread.join(0.5)
        return False


def test_catalog_check_keeps_the_state_of_a_copy_that_starts_during_the_check(progress: TablesProgress) -> None:
    """The copy's thread sets the state while the sync's main thread records the columns."""
    begins = Reached(lambda: progress.copying([B], Lsn(10)))
    progress.note_columns([B], begins)
    begins.thread.join()
    assert progress[B.name].state is TableState.COPYING


def test_table_without_changes_counts_as_unchanged_since_the_lsn_in_its_mirrors_delta_log(tmp_path: Path) -> None:
    """A later run takes this LSN from the Delta log of the mirror. It does not take the higher LSN of the newest point,
    because that point is higher only because other tables have changed."""
    layout, catalog = Layout.of(tmp_path), Catalog(OWNER, "p", 180000, (A, B))
    both_published(layout, catalog, Lsn(30))
    progress = TablesProgress(layout, catalog, delta_target(layout, OWNER), Lsn(1), Lsn(1))
    found = []
    for lsn, version in ((30, None), (50, None), (60, 7), (70, None), (80, None)):
        progress.moved(A.name, Lsn(lsn), version)
        found.append((progress[A.name].replay_lsn, progress[A.name].unchanged_from))
    assert found == [(30, 20), (50, 20), (60, None), (70, 60), (80, 60)]
