"""Transform and apply against a real server, log and Delta tables: mirrors equal the source."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pgcdc_assets.mirror.delta.compaction import Compaction
from pgcdc_assets.store.local import path_of
from tests.deltatables import live_files
from tests.mirror.pipeline import Pipeline

pytestmark = pytest.mark.spark


def test_inserts_are_appended_without_a_merge(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10,2), at timestamptz)")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, 'v' || g, g / 4.0, '2024-01-01 12:00+00' FROM generate_series(1, 1000) g")
    done = pipe.turn()
    assert done["t"].inserted == 1000
    assert pipe.content("t").num_rows == 1000
    assert pipe.mirrored("t", ["id", "v", "n"]) == [row[:3] for row in pipe.source("t")]
    history = DeltaTable(path_of(pipe.mirror("t").path)).history(1)[0]
    assert history["operation"] == "WRITE"
    assert pipe.turn() == {}, "nothing new"


def test_updates_deletes_and_inserts_are_merged(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 100) g")
    pipe.turn()
    pipe.transaction(
        "UPDATE t SET v = 'new' WHERE id <= 10", "DELETE FROM t WHERE id BETWEEN 5 AND 15",
        "INSERT INTO t VALUES (200, 'x'), (5, 'again')", "UPDATE t SET id = id + 1000 WHERE id = 20",
        "INSERT INTO t VALUES (300, 'passing')", "DELETE FROM t WHERE id = 300",
    )  # fmt: skip
    done = pipe.turn()["t"]
    assert (done.inserted, done.updated, done.deleted) == (2, 5, 11)
    pipe.same("t")


def big(char: str) -> str:
    """SQL of a text that stands out of line and is not sent when it does not change."""
    return f"(SELECT string_agg('{char}' || md5(i::text), '') FROM generate_series(1, 400) i)"


def test_values_of_many_megabytes(pipe: Pipeline) -> None:
    """Larger than any buffer on the way: sent, kept while its row changes, and sent anew with another key."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, n int, v text)")
    pipe.follow("t")
    for statement in (
        "INSERT INTO t VALUES (1, 1, repeat('ab', 10 << 20)), (2, 1, 'small')",
        "UPDATE t SET n = 2",
        "UPDATE t SET id = 3, v = v || 'c' WHERE id = 1",
    ):
        pipe.run(statement)
        pipe.turn()
        assert pipe.mirrored("t") == pipe.source("t"), statement
    assert pipe.set_aside == {}


def test_unchanged_toast_is_kept_filled_and_looked_up(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pipe.follow("t")
    pipe.run(*(f"INSERT INTO t VALUES ({i}, 0, {big(str(i))})" for i in range(1, 7)))
    pipe.turn()
    pipe.run(
        "UPDATE t SET n = 1 WHERE id = 1",  # kept from the target row
        f"UPDATE t SET v = {big('X')} WHERE id = 2",
        "UPDATE t SET n = 2 WHERE id = 2",  # filled from an image of the turn
        "UPDATE t SET id = 30 WHERE id = 3",  # looked up in the target by the old key
        f"UPDATE t SET v = {big('Y')} WHERE id = 5",
        "DELETE FROM t WHERE id = 5",
        "UPDATE t SET id = 5 WHERE id = 4",  # not Y: that belonged to the row that was deleted
        f"INSERT INTO t VALUES (60, 0, {big('Z')})",
        "UPDATE t SET n = 3 WHERE id = 60",
    )
    done = pipe.turn()["t"]
    assert pipe.parts["t"].masked == (3,)
    assert (done.inserted, done.updated, done.deleted) == (2, 3, 2)
    pipe.same("t")
    assert len(pipe.mirrored("t", ["v"])[0][0]) > 10_000


def test_a_mirror_of_many_turns_has_few_files(pipe: Pipeline) -> None:
    pipe.compaction = Compaction(look_every=2, most_small=3)
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (a int, v text)",
             "ALTER TABLE u REPLICA IDENTITY FULL")  # fmt: skip
    pipe.follow("t, u")
    pipe.run("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 50) g", "INSERT INTO u VALUES (1, 'x'), (1, 'x')")
    for turn in range(8):
        pipe.run(
            f"UPDATE t SET v = 'turn {turn}' WHERE id % 5 = {turn % 5}", f"INSERT INTO t VALUES ({100 + turn}, 'new')"
        )
        pipe.run(f"INSERT INTO u VALUES ({turn}, 'y')", "DELETE FROM u WHERE ctid = (SELECT min(ctid) FROM u)")
        done = pipe.turn()
        for name in ("t", "u"):
            mirror = pipe.mirror(name)
            assert done[name].version == mirror.version
            assert mirror.replay_lsn == pipe.replayed[name]
            assert len(live_files(mirror.path)) <= 5
            pipe.same(name)


def test_swaps_and_shifts_of_keys(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (a int, b text, v text, PRIMARY KEY (a, b))")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, 'k', 'v' || g FROM generate_series(1, 5) g")
    pipe.turn()
    pipe.transaction(
        "UPDATE t SET a = -1 WHERE a = 1", "UPDATE t SET a = 1 WHERE a = 2", "UPDATE t SET a = 2 WHERE a = -1"
    )
    pipe.transaction(
        "UPDATE t SET b = 'm' WHERE a = 5", "DELETE FROM t WHERE a = 4", "INSERT INTO t VALUES (4, 'k', 'z')"
    )
    pipe.turn()
    pipe.same("t")


def test_a_truncate_overwrites(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 100) g")
    pipe.turn()
    pipe.transaction("INSERT INTO t VALUES (500, 'x')", "TRUNCATE t", "INSERT INTO t VALUES (1, 'after'), (2, 'b')")
    pipe.run("UPDATE t SET v = 'later' WHERE id = 2", "DELETE FROM t WHERE id = 1")
    pipe.turn()
    pipe.same("t")
    assert pipe.mirrored("t") == [("2", "later")]
    pipe.run("TRUNCATE t")
    pipe.turn()
    assert pipe.mirrored("t") == []


def test_multisets_keep_their_duplicates(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (v text, n int)", "ALTER TABLE t REPLICA IDENTITY FULL")
    pipe.follow("t")
    assert pipe.tables["t"].multiset
    pipe.run("INSERT INTO t VALUES ('a', 1), ('a', 1), ('a', 1), ('b', NULL), ('b', NULL), (NULL, NULL)")
    pipe.turn()
    pipe.same("t")
    pipe.run(
        "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE v = 'a')",
        "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE v = 'b')",
        "UPDATE t SET n = 7 WHERE v IS NULL",
        "INSERT INTO t VALUES ('c', 3), ('c', 3)",
        "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE v = 'c')",
    )
    done = pipe.turn()["t"]
    assert (done.inserted, done.updated, done.deleted) == (2, 0, 3)
    pipe.same("t")
    pipe.transaction("TRUNCATE t", "INSERT INTO t VALUES ('d', 4), ('d', 4)")
    pipe.turn()
    pipe.same("t")


def test_leaves_of_a_partitioned_table(pipe: Pipeline) -> None:
    pipe.run(
        "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)",
    )
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, 1 + g % 2, 'v' || g FROM generate_series(1, 10) g")
    pipe.turn()
    pipe.same("t")
    assert set(pipe.mirrored("t", ["k", "_pgcdc_leaf"])) == {("1", "public.t1"), ("2", "public.t2")}
    pipe.transaction(
        "UPDATE t SET k = 1 WHERE id = 1",  # moves to the leaf that is truncated below
        "UPDATE t SET v = 'x' WHERE id IN (3, 4)",
        "TRUNCATE t1",
        "INSERT INTO t VALUES (2, 1, 'again'), (99, 1, 'new')",
    )
    pipe.turn()
    pipe.same("t")
    pipe.run("TRUNCATE t", "INSERT INTO t VALUES (1, 2, 'only')")
    pipe.turn()
    pipe.same("t")


def test_a_nullable_column_appears(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    pipe.follow("t, u")
    pipe.run("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 3) g")
    pipe.turn()
    pipe.run(
        "UPDATE t SET v = 'before' WHERE id = 1",
        "ALTER TABLE t ADD COLUMN at timestamp, ADD COLUMN tags text[]",
        "UPDATE t SET at = '2024-02-03 04:05:06', tags = '{a,b}' WHERE id = 2",
        "INSERT INTO t VALUES (4, 'd', NULL, '{}')",
        "INSERT INTO u VALUES (1)",
    )
    pipe.turn()
    assert pipe.set_aside == {}
    assert [column.name for column in pipe.tables["t"].columns] == ["id", "v", "at", "tags"]
    assert pipe.mirrored("t", ["id", "v"]) == [row[:2] for row in pipe.source("t")]
    assert sorted(tags for tags in pipe.content("t")["tags"].to_pylist() if tags is not None) == [[], ["a", "b"]]
    pipe.run("INSERT INTO t VALUES (5, 'e', NULL, '{z}')")
    pipe.turn()
    assert pipe.content("t").num_rows == 5


def test_a_mirror_that_is_wider_than_the_changes_takes_them(pipe: Pipeline) -> None:
    """As after a run that widened it and died, where the next one goes less far."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    pipe.turn()
    pipe.spark.sql(f"ALTER TABLE delta.`{pipe.mirror('t').path}` ADD COLUMNS (more DECIMAL(9, 2))").collect()
    pipe.run("UPDATE t SET v = 'x' WHERE id = 1", "INSERT INTO t VALUES (3, 'c')")
    pipe.turn()
    pipe.same("t")
    assert pipe.content("t")["more"].null_count == 3


def test_a_mirror_whose_features_ask_for_more_is_set_aside(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
    pipe.follow("t, u")
    pipe.run("INSERT INTO t VALUES (1, 'a')", "INSERT INTO u VALUES (1, 'a')")
    pipe.turn()
    pipe.spark.sql(f"ALTER TABLE delta.`{pipe.mirror('t').path}` ADD CONSTRAINT short CHECK (length(v) < 9)").collect()
    pipe.run("UPDATE t SET v = 'x'", "UPDATE u SET v = 'x'")
    pipe.turn()
    assert pipe.set_aside["t"][1] == "its mirror has a feature that changes cannot be applied to: checkConstraints"
    pipe.same("u")


def test_what_cannot_be_followed_is_set_aside_alone(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
    pipe.follow("t, u")
    pipe.run("INSERT INTO t VALUES (1, 'a')", "INSERT INTO u VALUES (1, 'a')")
    pipe.turn()
    pipe.run("INSERT INTO t VALUES (2, 'b')", "ALTER TABLE t RENAME v TO w", "INSERT INTO t VALUES (3, 'c')",
             "INSERT INTO u VALUES (3, 'c')")  # fmt: skip
    pipe.turn()
    lsn, reason = pipe.set_aside["t"]
    assert reason == "column 'v' was renamed to 'w'"
    assert pipe.mirrored("t") == [("1", "a"), ("2", "b")], "all before the change is applied"
    assert [row["id"] for row in pipe.feed("t")] == [1, 2]
    assert pipe.feed("u")[-1]["_pgcdc_commit_lsn"] > lsn
    pipe.same("u")


def test_a_mirror_that_differs_is_told_and_left_as_it_was(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
    pipe.follow("t, u")
    pipe.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')", "INSERT INTO u VALUES (1, 'a'), (2, 'b')")
    pipe.turn()
    version = pipe.mirror("t").version
    pipe.spark.sql(f"DELETE FROM delta.`{pipe.mirror('t').path}` WHERE id = 2").collect()
    pipe.run("UPDATE t SET v = 'x'", "UPDATE u SET v = 'x'")
    done = pipe.turn()
    assert done["t"].set_aside is not None
    assert "lacks a row" in done["t"].set_aside[1]
    assert pipe.mirrored("t") == [("1", "a")]
    assert pipe.mirror("t").version == version + 1
    pipe.same("u")


def test_an_apply_can_be_repeated_and_resumed(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    start, middle = pipe.replayed["t"], pipe.receive()
    pipe.run("UPDATE t SET v = 'x' WHERE id = 1", "INSERT INTO t VALUES (3, 'c')")
    end = pipe.receive()
    pipe.derive(end)  # and then the process dies: the feed is ahead of the mirror
    assert pipe.turn(middle)["t"].inserted == 2
    assert pipe.mirrored("t") == [("1", "a"), ("2", "b")]
    pipe.replayed["t"] = start  # as after a crash before the point was published
    done = pipe.turn(end)
    assert (done["t"].inserted, done["t"].updated) == (1, 1)
    pipe.replayed["t"] = start
    assert pipe.turn(end) == {}
    pipe.same("t")
    assert len(pipe.feed("t")) == 4


def test_values_and_names_that_fit_nowhere(pipe: Pipeline) -> None:
    pipe.run('CREATE TABLE t ("a key" numeric(5,2) PRIMARY KEY, "x,y" date, "Z;" int[])')
    pipe.follow("t")
    pipe.run("INSERT INTO t VALUES ('NaN', 'infinity', '{1,2}'), (1, '2024-01-01', '{{1},{2}}'), (2, NULL, NULL)")
    pipe.turn()
    pipe.run(
        """UPDATE t SET "x,y" = '4000-01-01 BC' WHERE "a key" = 'NaN'""",
        """UPDATE t SET "Z;" = '{3}' WHERE "a key" = 1""",
        """DELETE FROM t WHERE "a key" = 2""",
    )
    done = pipe.turn()["t"]
    assert (done.inserted, done.updated, done.deleted) == (0, 2, 1)
    rows = {str(row["a key"]): row for row in pipe.content("t").to_pylist()}
    assert dict(rows["None"]["_pgcdc_raw"]) == {"a key": "NaN", "x,y": "4000-01-01 BC"}
    assert (rows["1.00"]["Z;"], rows["1.00"]["_pgcdc_raw"]) == ([3], None)
