"""Consistent points: their order, searches, large numbers of points, and a table whose newest copy no point lists yet.
Also the saved states of tables."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgcdc_assets.core import retention
from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.formats import FORMAT_PROPERTY
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.errors import LakeError, UnknownFormat
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirrors
from pgcdc_assets.points import ledger
from pgcdc_assets.points.ledger import Merging
from pgcdc_assets.points.points import SCHEMA, ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.deltatables import commit, publish_at

A, B = TableName("public", "a"), TableName('Odd "Schema"', "b.c, d")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.of(tmp_path)


def listed(points: ConsistentPoints, table: TableName) -> int | None:
    listing = points.listing(table)
    return None if listing is None else listing.replay_lsn


def test_points_are_found_by_lsn(layout: Layout) -> None:
    points = ConsistentPoints(layout)
    publish_at(points, 100, {A: 1, B: 1})
    publish_at(points, 200, {A: 2})
    reader = ConsistentPoints(layout)
    publish_at(points, 300, {A: 2, B: 4})
    newest = reader.newest()
    assert newest is not None
    assert (newest.replay_lsn, dict(newest.tables)) == (300, {A: 2, B: 4})
    assert [point.replay_lsn for point in reader.all()] == [100, 200, 300]
    assert reader.at(Lsn(99)) is None
    for asked, found in ((100, 100), (199, 100), (200, 200), (299, 200), (10**9, 300)):
        at = reader.at(Lsn(asked))
        assert at is not None
        assert at.replay_lsn == found
    assert reader.has(Lsn(200))
    assert not reader.has(Lsn(201))
    assert (listed(reader, A), listed(reader, B)) == (300, 300)


def test_the_last_point_that_lists_a_table_is_found_if_later_points_do_not_list_it(layout: Layout) -> None:
    points = ConsistentPoints(layout)
    publish_at(points, 100, {A: 1, B: 1})
    assert listed(points, B) == 100
    publish_at(points, 200, {A: 2})
    points.publish(Lsn(200), {}, {})
    assert (listed(points, A), listed(points, B)) == (200, 100)


def test_no_point_is_published_below_the_newest_point(layout: Layout) -> None:
    points = ConsistentPoints(layout)
    publish_at(points, 200, {A: 1})
    with pytest.raises(LakeError, match="below the newest point"):
        publish_at(points, 199, {A: 1})
    publish_at(points, 200, {A: 1, B: 7})
    newest = points.newest()
    assert newest is not None
    assert set(newest.tables) == {A, B}
    at = points.at(Lsn(200))
    assert at == newest


@pytest.mark.long
def test_the_delta_log_of_points_stays_short(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are tens of thousands of turns a day. The cost of a turn must not grow with the number of turns."""
    for name in ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration"):
        assert ledger._PROPERTIES[name] == "interval 1 hours"
        monkeypatch.setitem(ledger._PROPERTIES, name, "interval 0 seconds")
    points = ConsistentPoints(layout)
    for number in range(1, 150):
        publish_at(points, number, {A: number})
    log = layout.consistent_points / "_delta_log"
    assert len(list(path_of(log).iterdir())) < 2 * 60
    newest = max(path_of(log).glob("*.checkpoint.parquet"))
    assert pq.read_table(newest, columns=["remove"])["remove"].null_count == pq.read_metadata(newest).num_rows
    assert [point.replay_lsn for point in ConsistentPoints(layout).all()] == [Lsn(at) for at in range(1, 150)]


def test_a_point_that_lists_an_older_copy_does_not_apply_to_a_newer_copy(layout: Layout) -> None:
    """The table was first copied at LSN 100, and a point lists it at LSN 300. After that, a second copy is completed,
    at LSN 250. The second copy lacks the changes from LSN 250 to LSN 300."""
    identity = Identity("7", "shop", "pgcdc")
    path = layout.mirror(A)
    DeltaTable.create(path_of(path), pa.schema([("id", pa.int64())]), configuration={IDENTITY: identity.app_id()},
                      raise_if_key_not_exists=False)  # fmt: skip
    points = ConsistentPoints(layout)

    def effective() -> Lsn | None:
        return Mirrors(layout, identity).open(A).effective_replay_lsn(points)

    publish_at(points, 90, {A: 0})
    assert effective() is None
    first = commit(path, [], "append", {identity.app_id("snapshot", A.folder): 100})
    assert effective() == 100
    points.publish(Lsn(300), {A: first}, {A: Lsn(100)})
    assert effective() == 300
    commit(path, [], "append", {"another": 1})
    assert effective() == 300
    commit(path, [], "overwrite", {identity.app_id("snapshot", A.folder): 250})
    assert effective() == 250
    assert listed(points, A) == 300


def test_a_commit_with_the_published_version_number_but_another_lsn_is_refused(layout: Layout) -> None:
    """The Delta commit of the published version was lost, and a later commit, with another LSN, has the same number.
    The LSN of the point does not apply to this commit, and readers refuse the commit."""
    identity = Identity("7", "shop", "pgcdc")
    path = layout.mirror(A)
    DeltaTable.create(path_of(path), pa.schema([("id", pa.int64())]), configuration={IDENTITY: identity.app_id()},
                      raise_if_key_not_exists=False)  # fmt: skip
    applied = identity.app_id("64")
    commit(path, [], "append", {identity.app_id("snapshot", A.folder): 100})
    lost = commit(path, [], "append", {applied: 200})
    points = ConsistentPoints(layout)
    points.publish(Lsn(300), {A: lost}, {A: Lsn(200)})
    assert Mirrors(layout, identity).open(A).effective_replay_lsn(points) == 300
    assert Lake(layout.root).at().path(A) == str(path)
    path_of(path / "_delta_log" / f"{lost:020}.json").unlink()
    assert Mirrors(layout, identity).open(A).effective_replay_lsn(points) == 100
    with pytest.raises(LakeError, match="need this commit"):
        Lake(layout.root).at().arrow(A)
    assert commit(path, [], "append", {applied: 250}) == lost
    assert Mirrors(layout, identity).open(A).effective_replay_lsn(points) == 250
    for read in (Lake(layout.root).at().arrow, Lake(layout.root).at().path):
        with pytest.raises(
            LakeError, match=r"public\.a: version 2 records the LSN 0/FA, but recorded 0/C8 when .*, at LSN 0/12C"
        ):
            read(A)


def test_points_of_another_format_version_are_refused(layout: Layout) -> None:
    create_table(layout.consistent_points, DeltaSchema.from_arrow(SCHEMA), {FORMAT_PROPERTY: "2"}, {}, layout.root)
    points = ConsistentPoints(layout)
    for use in (points.newest, lambda: points.publish(Lsn(200), {A: 2}, {A: Lsn(150)}), Lake(layout.root).at):
        with pytest.raises(UnknownFormat, match=r"ledger .*: has format 2, .* reads format 1; use the version"):
            use()


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4), max_size=9),
    st.integers(0, 10),
    st.sets(st.sampled_from("abcd")),
    st.integers(1, 4),
    st.none() | st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_pruning_keeps_recent_points_the_last_point_of_each_mirror_and_a_point_in_use(
    lists: list[dict[str, int]], at: int, names: set[str], files: int, used: int | None
) -> None:
    """Pruning keeps these points unchanged: the recent points, the newest point, the point in use, and, for each table
    that still has a mirror, the last point that lists the table."""
    with tempfile.TemporaryDirectory() as folder:
        points = ConsistentPoints(Layout.of(Path(folder)), Merging(most_files=files))
        for number, tables in enumerate(lists):
            publish_at(points, number, {TableName("public", name): version for name, version in tables.items()})
        before, followed = points.all(), [TableName("public", name) for name in names]
        said = {name: points.listing(name) for name in followed}
        oldest = before[at].at if at < len(before) else datetime.now(UTC) + timedelta(days=1)
        now = datetime.now(UTC)
        in_use = None if used is None else Lsn(used)
        gone = points.prune(oldest, followed, now, in_use)
        after = points.all()
        assert len(after) == len(before) - gone
        last = [max((p.at for p in before if name in p.tables), default=None) for name in followed]
        kept = [p for p in before if p.at >= oldest or p is before[-1] or p.at in last or p.replay_lsn == in_use]
        assert after == kept
        assert {name: ConsistentPoints(Layout.of(Path(folder))).listing(name) for name in followed} == said
        assert points.prune(oldest, followed, now, in_use) == 0
        promised = {name for point in after for name in point.tables}
        named = {name: {p.tables[name] for p in after if name in p.tables} for name in promised}
        assert points.versions(named) == named


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=12))
@example([(9, 0), (8, 8), (6, 6)])
@settings(max_examples=6, deadline=None)
def test_points_are_found_in_order_after_old_points_were_deleted(rounds: list[tuple[int, int]]) -> None:
    """Deleting old points leaves files with few points between files with many points. Merging these files keeps the
    order of the points."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        merging = Merging(most_files=3, small_rows=5)
        day = timedelta(days=1)
        patch.setattr(retention, "LADDER", ((day, timedelta(days=40_000)),))
        points, lsns = ConsistentPoints(Layout.of(Path(folder)), merging), count(10, 10)
        for added, young in rounds:
            for lsn in islice(lsns, added):
                publish_at(points, lsn, {A: lsn} if lsn > 30 else {A: lsn, B: lsn})
            there = points.all()
            points.prune(datetime(2000, 1, 1, tzinfo=UTC), [A, B], there[max(-young - 1, -len(there))].at + day)
            there = points.all()
            assert [point.replay_lsn for point in there] == sorted({point.replay_lsn for point in there})
            reader = ConsistentPoints(Layout.of(Path(folder)))
            assert reader.oldest() == there[0].replay_lsn
            for point in there:
                assert reader.at(Lsn(point.replay_lsn + 3)) == point
            for name in (A, B):
                mentions = [point for point in there if name in point.tables]
                listing = reader.listing(name)
                assert listing is not None
                assert listing.replay_lsn == mentions[-1].replay_lsn


def test_appending_a_point_costs_no_more_if_there_are_large_files_of_points(layout: Layout) -> None:
    """Large files are never merged again, so they do not add to the cost of a new point. Reading all points does not
    keep these files in memory."""
    points = ConsistentPoints(layout, Merging(most_files=4, small_rows=6))
    for number in range(1, 60):
        publish_at(points, number, {A: number})
    assert sum(file.count >= 6 for file in points._ledger.files()) > 4
    versions = []
    for number in range(60, 80):
        publish_at(points, number, {A: number})
        versions.append(points._ledger.version())
    merges = versions[-1] - versions[0] - 19
    assert merges < 19 // 3
    reader = ConsistentPoints(layout)
    assert reader.oldest() == 1
    assert reader.versions([A, B]) == {A: set(range(1, 80))}
    assert reader.prune(datetime(2000, 1, 1, tzinfo=UTC), [A, B], datetime.now(UTC)) == 0
    at = reader.at(Lsn(3))
    assert at is not None
    assert at.replay_lsn == 3
    assert reader._ledger._read == {}


# Table states ---------------------------------------------------------------------------------------

TABLE = Table(
    16384,
    TableName("Odd \"Schema'", "Select"),
    (
        Column(1, "größe 🦆", PgType(1700, "numeric", 655366)),
        Column(2, "tags", PgType(1009, "_text", element=PgType(25, "text"))),
    ),
    key=(1,),
)
OTHER = replace(TABLE, oid=16385, name=TableName("public", "t"))


def test_state_of_a_table_is_none_in_a_lake_without_states(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    assert states.all() == {}
    assert states.get(TABLE.name) is None


def test_the_state_of_a_table_is_the_last_state_that_was_saved(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    states.set_all([TABLE, OTHER], TableState.COPYING, Lsn(100))
    states.set(TABLE, TableState.CATCHING_UP, Lsn(100))
    states.set(TABLE, TableState.SET_ASIDE, Lsn(1 << 40), "column was dropped")
    again = TableStates(Layout.of(tmp_path)).all()
    assert set(again) == {TABLE.name, OTHER.name}
    row = again[TABLE.name]
    assert (row.state, row.lsn, row.reason) == (TableState.SET_ASIDE, 1 << 40, "column was dropped")
    assert row.table == TABLE
    assert again[OTHER.name].state is TableState.COPYING
    assert again[OTHER.name].table == OTHER


def test_states_that_another_process_saved_are_read(tmp_path: Path) -> None:
    reader, writer = TableStates(Layout.of(tmp_path)), TableStates(Layout.of(tmp_path))
    writer.set(TABLE, TableState.COPYING, Lsn(1))
    assert reader.get(TABLE.name) is not None
    writer.set(TABLE, TableState.CATCHING_UP, Lsn(1))
    row = reader.get(TABLE.name)
    assert row is not None
    assert row.state is TableState.CATCHING_UP


def test_saving_the_states_of_no_tables_makes_no_commit(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    states.set_all([], TableState.COPYING, Lsn(1))
    assert not path_of(Layout.of(tmp_path).table_states).exists()


def test_pruning_of_states_keeps_the_last_row_of_each_table(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    assert states.prune() == 0
    tables = [TABLE, OTHER]
    states.set_all(tables, TableState.COPYING, Lsn(1))
    states.set(tables[0], TableState.CATCHING_UP, Lsn(2))
    before = states.all()
    assert states.prune() == 1
    assert TableStates(Layout.of(tmp_path)).all() == before
    assert states.prune() == 0
