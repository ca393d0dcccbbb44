"""The transform, which derives change feeds from the change log: which changes the feeds contain. Most tests use a real
PostgreSQL server."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import dataset
from pgcdc_assets.errors import FeedGap
from pgcdc_assets.feed import messages, task
from pgcdc_assets.feed import table as table_module
from pgcdc_assets.feed import transform as transform_module
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.plan import Followed, Place, Router
from pgcdc_assets.feed.schema import FeedEnd, FeedFile, feed_name, feed_schema
from pgcdc_assets.feed.task import Derivation, FeedTarget, derive
from pgcdc_assets.feed.transform import grouped, transform
from pgcdc_assets.lake.tableat import ChangeFeed
from pgcdc_assets.log import upkeep
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.log.span import LogSpan, facts_of
from pgcdc_assets.mirror.delta import apply
from pgcdc_assets.mirror.delta.applytask import Collapsing
from pgcdc_assets.mirror.delta.rowlookup import Effect
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.successor import successor
from tests.deltatables import commit
from tests.fix_postgres import Database
from tests.log.twins import BATCHES, TABLES, Change, Transaction, spans, twins, whole
from tests.mirror.pipeline import Pipeline

T = TableName("public", "t")


@pytest.fixture
def pipe(database: Database, spark: SparkSession, tmp_path: Path) -> Iterator[Pipeline]:
    with database.connect() as conn:
        yield Pipeline(database, conn, spark, Layout.of(tmp_path / "lake"))


def names(pipe: Pipeline) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(path_of(pipe.layout.changes(T))).file_uris()}


@pytest.mark.spark
def test_a_feed_holds_every_change_in_order(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.transaction("INSERT INTO t VALUES (1, 'a')", "UPDATE t SET v = 'b'", "UPDATE t SET id = 2", "DELETE FROM t")
    pipe.run("TRUNCATE t")
    part = pipe.derive(pipe.receive())[T]
    ops = ["insert", "update_postimage", "update_preimage", "update_postimage", "delete", "truncate"]
    rows = pipe.feed("t")
    assert [row["_pgcdc_op"] for row in rows] == ops
    assert [row["_pgcdc_ordinal"] for row in rows] == [1, 3, 4, 5, 7, 1]
    assert [(row["id"], row["v"]) for row in rows] == [(1, "a"), (1, "b"), (1, None), (2, "b"), (2, None), (None, None)]
    assert len({row["_pgcdc_commit_lsn"] for row in rows}) == 2
    assert len({row["_pgcdc_xid"] for row in rows}) == 2
    assert {row["_pgcdc_origin"] for row in rows} == {None}
    assert part.counts == {op: ops.count(op) for op in ops}
    assert (part.rows, part.key_changes, part.truncates, part.insert_only) == (6, 1, 1, False)


@pytest.mark.spark
def test_a_feed_names_the_origin_of_each_transaction(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY)")
    pipe.follow("t")
    name = f"o_{pipe.database.name}"
    pipe.run("INSERT INTO t VALUES (1)")
    pipe.run(f"SELECT pg_replication_origin_create('{name}')", f"SELECT pg_replication_origin_session_setup('{name}')")
    pipe.run("INSERT INTO t VALUES (2)", "SELECT pg_replication_origin_session_reset()", "INSERT INTO t VALUES (3)")
    pipe.run(f"SELECT pg_replication_origin_drop('{name}')")
    pipe.derive(pipe.receive())
    assert [(row["id"], row["_pgcdc_origin"]) for row in pipe.feed("t")] == [(1, None), (2, name), (3, None)]


@pytest.mark.spark
def test_rows_that_are_in_a_feed_are_derived_again_only_on_request(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY)")
    pipe.follow("t")
    start = pipe.replayed["t"]
    pipe.run("INSERT INTO t VALUES (1)")
    first = pipe.receive()
    pipe.derive(first)
    before = names(pipe)
    pipe.run("INSERT INTO t VALUES (2)")
    end = pipe.receive()
    part = pipe.derive(end)[T]
    assert before < names(pipe)
    assert part.rows == 2, "the rows that were in the feed before count, too"
    kept = names(pipe) - before
    transform(
        pipe.spark,
        LogSpan(pipe.log, LsnRange(start, first)),
        pipe.feeds,
        [Followed(pipe.tables["t"], start)],
        again=True,
    )
    assert kept < names(pipe)
    assert not before & names(pipe)
    assert [row["id"] for row in pipe.feed("t")] == [1, 2]
    assert pipe.feeds.open(pipe.tables["t"]).covered == LsnRange(start, end)


@pytest.mark.spark
def test_rows_that_the_log_no_longer_has_leave_the_range_that_a_feed_covers(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the feed has rows on both sides of the log's start. If a range above the start is derived again, this
    file is replaced, and its rows below the start are lost."""
    monkeypatch.setattr(table_module, "FEWEST_MERGED", 2)
    pipe.run("CREATE TABLE t (id int PRIMARY KEY)")
    pipe.follow("t")
    ends = [_inserted(pipe, number) for number in (1, 2, 3)]
    feed = pipe.feeds.open(pipe.tables["t"])
    assert feed.compact(ends[2]) == 2
    upkeep.forget(pipe.log, ends[0])
    assert (pipe.log.start, feed.forget(ends[0])) == (ends[0], 0)
    _again(pipe, LsnRange(ends[1], ends[2]), ends[2])
    assert [row["id"] for row in pipe.feed("t")] == [2, 3]
    assert pipe.feeds.open(pipe.tables["t"]).covered == LsnRange(ends[0], ends[2])


@pytest.mark.spark
def test_a_range_that_is_derived_again_extends_a_feed_only_if_it_adjoins_the_range_that_the_feed_covers(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table left the publication, and was copied again when it was published again. So the log lacks a change
    between the feed's rows below the copy and its rows above the copy. The rows are then merged into one file."""
    monkeypatch.setattr(table_module, "FEWEST_MERGED", 2)
    pipe.run("CREATE TABLE t (id int PRIMARY KEY)")
    pipe.follow("t")
    start, before = pipe.replayed["t"], _inserted(pipe, 1)
    pipe.run("ALTER PUBLICATION p DROP TABLE t", "INSERT INTO t VALUES (2)", "ALTER PUBLICATION p ADD TABLE t")
    copied = pipe.replayed["t"] = pipe.receive()
    middle, end = _inserted(pipe, 3), _inserted(pipe, 4)
    covered = LsnRange(copied, end)
    feed = pipe.feeds.open(pipe.tables["t"])
    assert (feed.covered, feed.compact(end)) == (covered, 2)
    _again(pipe, LsnRange(middle, end), end)
    assert pipe.feeds.open(pipe.tables["t"]).covered == covered
    assert [row["id"] for row in pipe.feed("t")] == [3, 4], "a row below the copy may be of another table of this name"
    _again(pipe, LsnRange(start, before), end)
    assert [row["id"] for row in pipe.feed("t")] == [1, 3, 4]
    assert pipe.feeds.open(pipe.tables["t"]).covered == covered


@pytest.mark.spark
def test_an_older_range_that_is_derived_again_for_a_new_structure_leaves_the_lsn_of_the_last_change_known(
    pipe: Pipeline,
) -> None:
    """The feed is emptied, and then lacks the changes above the range. But no reader needs to read the mirror again,
    because the table has not changed above the end of the emptied feed."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    start, first, last = pipe.replayed["t"], _inserted(pipe, 1), _inserted(pipe, 2)
    pipe.run("ALTER TABLE t RENAME v TO w")
    (now,) = read_tables(pipe.conn, ["p"])
    table = pipe.tables["t"] = successor(pipe.tables["t"], now, pipe.receive())
    point = pipe.receive()
    _again(pipe, LsnRange(start, first), point)
    assert [row["id"] for row in pipe.feed("t")] == [1]
    assert pipe.feeds.open(table).covered == LsnRange(last, last)
    feed = ChangeFeed.at(pipe.layout, table, pipe.mirror("t").existing, pipe.identity.app_id(), point)
    feed.require(last)
    with pytest.raises(FeedGap):
        feed.require(first)
    assert list(feed.rows(feed.covered)) == []
    _again(pipe, LsnRange(first, last), point)
    assert pipe.feeds.open(table).covered == LsnRange(first, last)


def _inserted(pipe: Pipeline, number: int) -> Lsn:
    """Inserts a row into ``t``, and derives it. Returns the end of the log."""
    pipe.run(f"INSERT INTO t VALUES ({number})")
    end = pipe.receive()
    pipe.derive(end)
    return end


def _again(pipe: Pipeline, span: LsnRange, replay_lsn: Lsn) -> None:
    followed = [Followed(pipe.tables["t"], replay_lsn)]
    transform(pipe.spark, LogSpan(pipe.log, span), pipe.feeds, followed, again=True)


def counted_units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each Spark job of an apply or a repair adds the number of each table's units."""
    units: list[int] = []
    collapsed = apply.collapsed

    def counted(spark: SparkSession, works: Sequence[Sequence[Collapsing]]) -> list[list[Effect]]:
        units.extend(map(len, works))
        return collapsed(spark, works)

    monkeypatch.setattr(apply, "collapsed", counted)
    return units


@pytest.mark.spark
def test_a_repair_divides_inserts_by_key(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn adds inserts to the mirror without a merge, but a repair merges them."""
    monkeypatch.setattr(transform_module, "BUCKET_ROWS", 100)
    units = counted_units(monkeypatch)
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    start = pipe.replayed["t"]
    pipe.run("INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 1000) g")
    pipe.turn()
    assert units == []
    commit(pipe.mirror("t").path, [], "overwrite", {})
    end = pipe.replayed["t"]
    done = apply.repair_table(pipe.spark, pipe.log, pipe.mirrors, pipe.tables["t"], LsnRange(start, end), end)
    assert units == [10]
    assert done.inserted == 1000
    pipe.same("t")


@pytest.mark.spark
def test_a_feed_has_all_changes_below_a_row_that_cannot_be_followed(pipe: Pipeline) -> None:
    """The row's message is in the same group of messages as the changes of an earlier transaction."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v int)", "ALTER TABLE t REPLICA IDENTITY FULL")
    pipe.follow("t")
    pipe.run("INSERT INTO t VALUES (1, 1), (2, 2)", "UPDATE t SET v = 3 WHERE id = 1",
             "ALTER TABLE t DROP CONSTRAINT t_pkey, ALTER id DROP NOT NULL", "UPDATE t SET id = NULL WHERE id = 2",
             "DELETE FROM t WHERE id IS NULL", "ALTER TABLE t ADD PRIMARY KEY (id)")  # fmt: skip
    part = pipe.derive(pipe.receive())[T]
    assert part.ended is not None
    rows = pipe.feed("t")
    assert [(row["_pgcdc_op"], row["id"], row["v"]) for row in rows] == [
        ("insert", 1, 1), ("insert", 2, 2), ("update_postimage", 1, 3)
    ]  # fmt: skip
    assert rows[-1]["_pgcdc_commit_lsn"] < part.ended.lsn


@pytest.mark.spark
@pytest.mark.parametrize(("kind", "zero", "minus"), [("float8", "0", "-0"), ("float4[]", "{1,0,0}", "{1,-0,-0}")])
def test_zero_and_minus_zero_are_one_key_although_changes_are_divided_by_key(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, kind: str, zero: str, minus: str
) -> None:
    """The two have different texts, but the merge takes them for the same key."""

    def assert_same() -> None:
        mirrored = [repr((row["id"], row["v"])) for row in pipe.content("t").to_pylist()]
        assert sorted(mirrored) == sorted(map(repr, pipe.conn.execute("SELECT id, v FROM t")))
        assert pipe.set_aside == {}

    def turn(first: int, statement: str) -> None:
        number = "ARRAY[g]" if kind.endswith("[]") else "g"
        fill = f"INSERT INTO t SELECT {number}, 0 FROM generate_series({first}, {first + 10}) g"
        pipe.transaction(fill, statement, "UPDATE t SET v = v + 1")
        pipe.turn()
        assert_same()

    monkeypatch.setattr(transform_module, "BUCKET_ROWS", 1)
    pipe.run("SET extra_float_digits = 3", f"CREATE TABLE t (id {kind} PRIMARY KEY, v int)")
    pipe.follow("t")
    turn(100, f"INSERT INTO t VALUES ('{zero}', 1)")
    turn(150, f"UPDATE t SET id = '{minus}' WHERE id = '{zero}'")
    start = pipe.replayed["t"]
    turn(200, f"DELETE FROM t WHERE id = '{zero}'")
    deleted = LsnRange(start, pipe.replayed["t"])
    turn(300, f"INSERT INTO t VALUES ('{zero}', 2)")
    apply.repair_table(pipe.spark, pipe.log, pipe.mirrors, pipe.tables["t"], deleted, pipe.replayed["t"])
    assert_same()


@pytest.mark.long
@pytest.mark.spark
def test_changes_are_divided_by_key_even_if_keys_change(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are divided by key, and the parts are applied separately. If an update changes a key, and does not
    contain the value of an unchanged TOAST column, the changes are not divided. The reason is that this value must be
    looked up under the earlier key."""
    monkeypatch.setattr(transform_module, "BUCKET_ROWS", 100)
    monkeypatch.setattr(task, "HELD_BYTES", 1)
    units = counted_units(monkeypatch)
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v int, big text)", "ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, g, 'small' FROM generate_series(1, 300) g")
    pipe.turn()
    for statements in (
        ("UPDATE t SET v = v + 1", "UPDATE t SET id = id + 1000 WHERE id < 50"),
        ("UPDATE t SET id = -id", "DELETE FROM t WHERE id % 3 = 0", "UPDATE t SET id = -id WHERE id > -200"),
        ("INSERT INTO t VALUES (5000, 1, 'x')", "UPDATE t SET id = 5001, v = 2 WHERE id = 5000",
         "UPDATE t SET id = 5002 WHERE id = 5001", "DELETE FROM t WHERE id = 5002", "UPDATE t SET v = v - 1"),
    ):  # fmt: skip
        pipe.transaction(*statements)
        pipe.turn()
        assert pipe.set_aside == {}
        pipe.same("t")
        assert units.pop() > 1
    pipe.run("UPDATE t SET big = repeat(md5(id::text), 100) WHERE id % 50 = 0")
    pipe.turn()
    pipe.transaction("UPDATE t SET v = v + 1", "UPDATE t SET id = id + 9000 WHERE id % 50 = 0")
    pipe.turn()
    assert units.pop() == 1
    pipe.same("t")


@pytest.mark.long
@pytest.mark.spark
def test_a_feed_is_emptied_after_a_column_got_another_type(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t VALUES (1, 'a')")
    pipe.derive(pipe.receive())
    pipe.run("ALTER TABLE t ALTER v TYPE int USING 1")
    (pipe.tables["t"],) = read_tables(pipe.conn, ["p"])
    pipe.replayed["t"] = pipe.receive()
    pipe.run("INSERT INTO t VALUES (2, 2)")
    part = pipe.derive(pipe.receive())[T]
    assert part.ended is None
    assert [(row["id"], row["v"]) for row in pipe.feed("t")] == [(2, 2)]


@dataclass(frozen=True)
class ForgetfulRouter(Router):
    """A router that assigns no table to a relation with a column ``w``."""

    def place(self, shape: Shape) -> Place:
        forgotten = any(column.name == "w" for column in shape.columns)
        return Place(None) if forgotten else super().place(shape)


@pytest.mark.spark
def test_a_table_is_set_aside_if_its_feed_lacks_a_row_of_the_log(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    pipe.follow("t, u")
    pipe.run("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    middle = pipe.receive()
    pipe.run("ALTER TABLE t ADD w int", "INSERT INTO t VALUES (2, 2), (3, 3)", "INSERT INTO u VALUES (2)")
    end, start = pipe.receive(), pipe.replayed["t"]
    router = ForgetfulRouter.of(pipe.tables.values())
    followed = [Followed(table, start) for table in pipe.tables.values()]
    before = transform(pipe.spark, LogSpan(pipe.log, LsnRange(start, middle)), pipe.feeds, followed, router=router)
    assert before[T].ended is None
    parts = transform(pipe.spark, LogSpan(pipe.log, LsnRange(start, end)), pipe.feeds, followed, router=router)
    reason = f"the log has 2 rows of the table in {middle}..{end}, but 0 were written to the feed"
    assert parts[T].ended == FeedEnd(middle, reason)
    assert [row["id"] for row in pipe.feed("t")] == [1]
    assert parts[TableName("public", "u")].ended is None
    assert [row["id"] for row in pipe.feed("u")] == [1, 2]


@pytest.mark.spark
def test_rows_in_the_log_are_counted_by_table_even_if_a_turn_ends_inside_a_batch(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    pipe.follow("t, u")
    start = pipe.replayed["t"]
    pipe.run("INSERT INTO t VALUES (1), (2)", "UPDATE t SET id = 3 WHERE id = 1")
    middle = pipe.lsn("pg_current_wal_insert_lsn()")
    pipe.run("INSERT INTO t VALUES (4)", "INSERT INTO u VALUES (1)", "TRUNCATE t, u")
    end = pipe.receive()
    (batch,) = [batch for batch in pipe.log.batches(start) if batch.transactions]
    assert batch.start < middle < batch.end
    t, u = (pipe.tables[name].oid for name in "tu")
    whole = LogSpan(pipe.log, LsnRange(start, end))
    assert whole.rows == {t: {"I": 3, "U": 1, "T": 1}, u: {"I": 1, "T": 1}}
    assert whole.part(LsnRange(start, middle)).rows == {t: {"I": 2, "U": 1}}
    assert whole.part(LsnRange(middle, end)).rows == {t: {"I": 1, "T": 1}, u: {"I": 1, "T": 1}}
    pipe.turn(middle)
    pipe.turn(end)
    assert pipe.set_aside == {}
    pipe.same("t")


def test_segments_are_distributed_evenly_among_tasks() -> None:
    def segment(name: str, size: int) -> Segment:
        return Segment(
            Location.of(Path(name)), size, 1, Lsn(9), Lsn(1), Lsn(int(name)), Lsn(9), 1, 1, False, datetime.now(UTC)
        )

    small = [segment(str(n), 1000) for n in range(9)]
    assert [len(group) for group in grouped(small, 4)] == [9], "few bytes need only one task"
    large = [segment(str(n), 8 << 20) for n in range(9)]
    assert sorted(len(group) for group in grouped(large, 4)) == [2, 2, 2, 3]
    assert [s.path.name for group in grouped(large, 4) for s in group] == [str(n) for n in range(9)]


@pytest.mark.parametrize("left", ["a b", "a%20b", "a%2520b", "a%b", "_pgcdc_op", "%5Fpgcdc_op", "a,b", "naïve", "a=b"])
@pytest.mark.parametrize("right", ["a b", "a%20b", "a%2520b", "a%b", "_pgcdc_op", "%5Fpgcdc_op", "a,b", "naïve", "a=b"])
def test_different_columns_have_different_names_in_a_feed(left: str, right: str) -> None:
    assert (feed_name(left) == feed_name(right)) == (left == right)
    assert not set(feed_name(left)) & set(" ,;{}()\n\t=")
    assert not feed_name(left).startswith("_pgcdc")


# Rows that were written to the log before their commit give the same feeds as rows that were written at their commit

INSERTS = tuple(Change("I", 1 + at % 2, 0, at % 3, bytes([at])) for at in range(12))
HISTORY = (
    (Transaction(INSERTS, (1,), files=3), Transaction((Change("T", 2, 0, 0, b""), Change("M", 1, 0, 1, b"m")), (1,))),
    (Transaction((Change("I", 1, 0, 1, b"x"), Change("I", 1, 0, 0, b"y")), (1,), "elsewhere"),),
)


def _derived(log: ChangeLog, span: LsnRange) -> tuple[dict[TableName, list[Any]], Any]:
    """The feed rows that one task derives from the log between two LSNs, and the task's other results."""
    router = Router.of(TABLES.values())
    shapes = log.shapes(span).values()
    task = Derivation(
        segments=tuple(segment.file for segment in log.segments(span)),
        targets={t.name: FeedTarget(t, log.layout.changes(t.name), span) for t in TABLES.values()},
        routes={
            s.schema_id: Route.of(s, t) for s in shapes for t in TABLES.values() if router.place(s).table == t.name
        },
    )
    for target in task.targets.values():
        path_of(target.folder).mkdir(parents=True, exist_ok=True)
    done = derive(pickle.loads(pickle.dumps(task)))
    feeds = {t.name: _rows(log, t.name, done.files.get(t.name, []), feed_schema(t)) for t in TABLES.values()}
    return feeds, (done.ended, done.taken)


def _rows(log: ChangeLog, name: TableName, files: list[FeedFile], schema: pa.Schema) -> list[Any]:
    folder = log.layout.changes(name)
    rows = dataset([folder / file.report.path for file in files], schema).to_table()
    return sorted(rows.to_pylist(), key=str)


def test_rows_written_before_their_commit_give_the_same_feeds_for_a_fixed_history(tmp_path: Path) -> None:
    plain, early = twins(tmp_path, HISTORY)
    for span in spans(plain):
        assert _derived(early, span) == _derived(plain, span)
        assert _messages(early, span) == _messages(plain, span)


@pytest.mark.long
@settings(max_examples=10)
@given(BATCHES)
def test_rows_written_before_their_commit_give_the_same_feeds_for_any_history(batches: list[list[Transaction]]) -> None:
    """Compares the feeds of the tables, the feed of logical messages, and the ids of the structures that the rows
    have."""
    with TemporaryDirectory() as folder:
        plain, early = twins(Path(folder), batches)
        ids = set(plain.shapes(whole(plain)))
        assert facts_of(early, ids) == facts_of(plain, ids)
        for span in spans(plain):
            assert _derived(early, span) == _derived(plain, span)
            assert _messages(early, span) == _messages(plain, span)
            for one in ids:
                used = [LogSpan(log, span).used({one}, {1, 2, 3}) for log in (early, plain)]
                assert used[0] == used[1]
            # Rows that were written before their commit are stored with provisional schema_ids from 0 to 5. Readers
            # must not see these ids, but only the final ids.
            assert LogSpan(early, span).used(set(range(6)), {1, 2, 3}) == set()


def _messages(log: ChangeLog, span: LsnRange) -> tuple[list[Any], Any]:
    path_of(log.layout.messages).mkdir(parents=True, exist_ok=True)
    files, taken = messages.derived(log.layout.messages, LogSpan(log, span))
    rows = dataset([log.layout.messages / file.path for file in files], messages.SCHEMA).to_table()
    # The rows are sorted here, because readers of the feed sort them as well.
    return sorted(rows.to_pylist(), key=str), taken
