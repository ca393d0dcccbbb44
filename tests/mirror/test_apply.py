"""Runs transform and apply with a real server, log and Delta tables. The mirrors must equal the source."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.mirror.delta.apply import repair_table
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.store.local import path_of
from tests.mirror.pipeline import Pipeline

pytestmark = pytest.mark.spark


BIG = "(SELECT string_agg('{0}' || md5(i::text), '') FROM generate_series(1, 400) i)"
"""SQL expression for a text that PostgreSQL stores out of line. An UPDATE that leaves such a text unchanged does not
send the text."""


@dataclass(frozen=True)
class Case:
    """A table, its first rows, and the changes that follow in one turn."""

    made: tuple[str, ...]
    rows: str
    changes: tuple[tuple[str, ...], ...]
    """The statements of each transaction."""
    done: tuple[int, int, int] | None = None
    """The numbers of rows that the changes insert, update and delete. None: the test does not check them."""


CASES = {
    "merged": Case(
        ("CREATE TABLE merged (id int PRIMARY KEY, v text)",),
        "INSERT INTO merged SELECT g, 'v' || g FROM generate_series(1, 100) g",
        (("UPDATE merged SET v = 'new' WHERE id <= 10", "DELETE FROM merged WHERE id BETWEEN 5 AND 15",
          "INSERT INTO merged VALUES (200, 'x'), (5, 'again')", "UPDATE merged SET id = id + 1000 WHERE id = 20",
          "INSERT INTO merged VALUES (300, 'passing')", "DELETE FROM merged WHERE id = 300"),),
        (2, 5, 11),
    ),
    "toasted": Case(
        ("CREATE TABLE toasted (id int PRIMARY KEY, n int, v text)",
         "ALTER TABLE toasted ALTER v SET STORAGE EXTERNAL"),
        f"INSERT INTO toasted SELECT g, 0, g || {BIG.format('x')} FROM generate_series(1, 6) g",
        (
            ("UPDATE toasted SET n = 1 WHERE id = 1",),  # v is not sent: it comes from the mirror's row
            (f"UPDATE toasted SET v = {BIG.format('X')} WHERE id = 2",),
            ("UPDATE toasted SET n = 2 WHERE id = 2",),  # v is not sent: it comes from the earlier UPDATE
            ("UPDATE toasted SET id = 30 WHERE id = 3",),  # v is not sent: the mirror has it under the old key
            (f"UPDATE toasted SET v = {BIG.format('Y')} WHERE id = 5",),
            ("DELETE FROM toasted WHERE id = 5",),
            ("UPDATE toasted SET id = 5 WHERE id = 4",),  # row 5 must not get Y, the value of the deleted row
            (f"INSERT INTO toasted VALUES (60, 0, {BIG.format('Z')})",),
            ("UPDATE toasted SET n = 3 WHERE id = 60",),
        ),
        (2, 3, 2),
    ),
    "swapped": Case(
        ("CREATE TABLE swapped (a int, b text, v text, PRIMARY KEY (a, b))",),
        "INSERT INTO swapped SELECT g, 'k', 'v' || g FROM generate_series(1, 5) g",
        (
            ("UPDATE swapped SET a = -1 WHERE a = 1", "UPDATE swapped SET a = 1 WHERE a = 2",
             "UPDATE swapped SET a = 2 WHERE a = -1"),
            ("UPDATE swapped SET b = 'm' WHERE a = 5", "DELETE FROM swapped WHERE a = 4",
             "INSERT INTO swapped VALUES (4, 'k', 'z')"),
        ),
    ),
    "truncated": Case(
        ("CREATE TABLE truncated (id int PRIMARY KEY, v text)",),
        "INSERT INTO truncated SELECT g, 'v' FROM generate_series(1, 100) g",
        (
            ("INSERT INTO truncated VALUES (500, 'x')", "TRUNCATE truncated",
             "INSERT INTO truncated VALUES (1, 'after'), (2, 'b')"),
            ("UPDATE truncated SET v = 'later' WHERE id = 2",), ("DELETE FROM truncated WHERE id = 1",),
        ),
    ),
    "emptied": Case(
        ("CREATE TABLE emptied (id int PRIMARY KEY)",), "INSERT INTO emptied VALUES (1)", (("TRUNCATE emptied",),)
    ),
    "bag": Case(
        ("CREATE TABLE bag (v text, n int)", "ALTER TABLE bag REPLICA IDENTITY FULL"),
        "INSERT INTO bag VALUES ('a', 1), ('a', 1), ('a', 1), ('b', NULL), ('b', NULL), (NULL, NULL)",
        (
            ("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE v = 'a')",),
            ("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE v = 'b')",),
            ("UPDATE bag SET n = 7 WHERE v IS NULL",),
            ("INSERT INTO bag VALUES ('c', 3), ('c', 3)",),
            ("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE v = 'c')",),
        ),
        (2, 0, 3),
    ),
    "spaced_bag": Case(
        ('CREATE TABLE spaced_bag ("a b" text, n int)', "ALTER TABLE spaced_bag REPLICA IDENTITY FULL"),
        "INSERT INTO spaced_bag VALUES ('a', 1), ('a', 1), (NULL, 2)",
        (("DELETE FROM spaced_bag WHERE ctid = (SELECT min(ctid) FROM spaced_bag WHERE n = 1)",),),
        (0, 0, 1),
    ),
    "wiped_bag": Case(
        ("CREATE TABLE wiped_bag (v text, n int)", "ALTER TABLE wiped_bag REPLICA IDENTITY FULL"),
        "INSERT INTO wiped_bag VALUES ('a', 1), ('a', 1)",
        (("TRUNCATE wiped_bag", "INSERT INTO wiped_bag VALUES ('d', 4), ('d', 4)"),),
    ),
    "parts": Case(
        ("CREATE TABLE parts (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
         "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1)",
         "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES IN (2)"),
        "INSERT INTO parts SELECT g, 1 + g % 2, 'v' || g FROM generate_series(1, 10) g",
        (("UPDATE parts SET k = 1 WHERE id = 1",  # the row moves to the leaf that is then truncated
          "UPDATE parts SET v = 'x' WHERE id IN (3, 4)", "TRUNCATE parts_1",
          "INSERT INTO parts VALUES (2, 1, 'again'), (99, 1, 'new')"),),
    ),
}  # fmt: skip


def test_mirrors_equal_the_source_after_a_turn_with_changes_of_every_kind(pipe: Pipeline) -> None:
    for case in CASES.values():
        pipe.run(*case.made)
    pipe.follow(", ".join(CASES))
    for case in CASES.values():
        pipe.run(case.rows)
    done = pipe.turn()
    assert done["merged"].inserted == 100
    assert DeltaTable(path_of(pipe.mirror("merged").path)).history(1)[0]["operation"] == "WRITE", (
        "inserts alone need no merge"
    )
    assert set(pipe.mirrored("parts", ["k", "_pgcdc_leaf"])) == {("1", "public.parts_1"), ("2", "public.parts_2")}
    assert pipe.tables["bag"].multiset
    for name in CASES:
        pipe.same(name)
    for case in CASES.values():
        for statements in case.changes:
            pipe.transaction(*statements)
    done = pipe.turn()
    assert pipe.set_aside == {}
    for name, case in CASES.items():
        pipe.same(name)
        counted = (done[name].inserted, done[name].updated, done[name].deleted)
        assert case.done in (None, counted), f"{name}: {counted}"
    assert pipe.parts["toasted"].masked == (3,)
    assert len(pipe.mirrored("toasted", ["v"])[0][0]) > 10_000
    assert pipe.turn() == {}, "a second turn finds no changes"


def test_an_unsent_value_of_a_partition_without_identity_full_is_kept_when_the_key_changes(pipe: Pipeline) -> None:
    """ALTER TABLE ... REPLICA IDENTITY does not change partitions. The publication sends rows under the root's name:
    the Relation message and the letter of an old tuple then show the root's FULL, but the old tuple has only the key
    columns of the partition."""
    pipe.run(
        "CREATE TABLE p (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE p_key PARTITION OF p FOR VALUES IN (1)", "ALTER TABLE p_key ALTER v SET STORAGE EXTERNAL",
        "CREATE TABLE p_full PARTITION OF p FOR VALUES IN (2)", "ALTER TABLE p_full ALTER v SET STORAGE EXTERNAL",
        "ALTER TABLE p REPLICA IDENTITY FULL", "ALTER TABLE p_full REPLICA IDENTITY FULL",
    )  # fmt: skip
    pipe.follow("p WITH (publish_via_partition_root)")
    pipe.run(f"INSERT INTO p SELECT g, 1 + g % 2, g || {BIG.format('x')} FROM generate_series(1, 8) g")
    pipe.run("INSERT INTO p VALUES (9, 1, NULL), (10, 2, NULL)")
    pipe.turn()
    pipe.run("UPDATE p SET id = id + 1000 WHERE id NOT IN (3, 4)", "DELETE FROM p WHERE id IN (3, 4, 1005, 1006)")
    pipe.turn()
    assert pipe.set_aside == {}
    pipe.same("p")


@pytest.mark.long
def test_values_of_many_megabytes_are_applied(pipe: Pipeline) -> None:
    """The value is larger than every buffer between source and mirror. It is sent once, is not sent when its row
    changes, and is sent again with a new key."""
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


@pytest.mark.long
def test_a_table_whose_mirror_lacks_a_row_is_set_aside_and_the_mirror_is_unchanged(pipe: Pipeline) -> None:
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


def test_a_turn_repeated_after_a_crash_applies_no_change_twice(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    start, middle = pipe.replayed["t"], pipe.receive()
    pipe.run("UPDATE t SET v = 'x' WHERE id = 1", "INSERT INTO t VALUES (3, 'c')")
    end = pipe.receive()
    pipe.derive(end)  # the process dies after this: the feed is ahead of the mirror
    assert pipe.turn(middle)["t"].inserted == 2
    assert pipe.mirrored("t") == [("1", "a"), ("2", "b")]
    pipe.replayed["t"] = start  # the state after a crash before the point was published
    done = pipe.turn(end)
    assert (done["t"].inserted, done["t"].updated) == (1, 1)
    pipe.replayed["t"] = start
    assert pipe.turn(end) == {}
    pipe.same("t")
    assert len(pipe.feed("t")) == 4


# A repair derives the changes of an LSN range again, and applies them to a mirror that has already applied this range


def repaired(pipe: Pipeline, start: Lsn, end: Lsn) -> Applied:
    table, position = pipe.tables["t"], pipe.replayed["t"]
    return repair_table(pipe.spark, pipe.log, pipe.mirrors, table, LsnRange(start, end), position)


def spoiled(pipe: Pipeline, *statements: str) -> None:
    for statement in statements:
        pipe.spark.sql(statement.format(f"delta.`{pipe.mirror('t').path}`")).collect()


@pytest.mark.long
def test_a_repair_is_refused_if_the_log_lacks_a_value_of_a_row_that_the_mirror_lost(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT 1, 1, string_agg(md5(i::text), '') FROM generate_series(1, 400) i")
    pipe.turn()
    start = pipe.replayed["t"]
    pipe.run("UPDATE t SET n = 2")
    pipe.turn()
    spoiled(pipe, "DELETE FROM {} WHERE id = 1")
    with pytest.raises(NotRepairable, match="copy it again"):
        repaired(pipe, start, pipe.replayed["t"])


@pytest.mark.long
@pytest.mark.parametrize("later", [(), ("UPDATE t SET n = 7 WHERE id = 2",)], ids=["lost", "lost and changed later"])
def test_a_repair_is_refused_if_a_row_with_an_unsent_value_has_taken_the_key_of_another_row(
    pipe: Pipeline, later: tuple[str, ...]
) -> None:
    """The mirror loses a range's changes, so that its row 2 is the row that the source has deleted. Later changes are
    applied to this row."""
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pipe.follow("t")
    pipe.run(f"INSERT INTO t SELECT g, 0, g || {BIG.format('x')} FROM generate_series(1, 2) g")
    pipe.turn()
    start, before = pipe.replayed["t"], pipe.mirror("t").version
    pipe.transaction("DELETE FROM t WHERE id = 2", "UPDATE t SET id = 2 WHERE id = 1")
    pipe.turn()
    pipe.same("t")
    end = pipe.replayed["t"]
    spoiled(pipe, f"RESTORE {{}} TO VERSION AS OF {before}")
    pipe.run(*later)
    pipe.turn()
    assert pipe.set_aside == {}
    with pytest.raises(NotRepairable, match=r"changed its key.*copy it again"):
        repaired(pipe, start, end)
