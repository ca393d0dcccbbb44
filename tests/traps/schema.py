"""Traps (known difficult cases) in schema changes."""

from __future__ import annotations

from tests.traps.scenario import Trap

_T = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g"
_PARTITIONED = (
    "CREATE TABLE t (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part); "
    "CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2); "
    "INSERT INTO t SELECT g, g % 2 + 1, 'v' || g FROM generate_series(1, 10) g"
)
TRAPS = (
    Trap("column_added_nullable", _T,
         ("BEGIN; INSERT INTO t VALUES (10, 'before'); ALTER TABLE t ADD w int; INSERT INTO t VALUES (11, 'after', 1); "
          "COMMIT", "UPDATE t SET w = id WHERE id < 3")),
    Trap("column_added_with_a_default", _T, ("ALTER TABLE t ADD w int DEFAULT 5", "INSERT INTO t VALUES (10, 'x')"),
         aside='"w" was added, and older rows have a value in it'),
    Trap("column_added_with_a_volatile_default", _T,
         ("ALTER TABLE t ADD w float8 DEFAULT random()", "INSERT INTO t VALUES (10, 'x')"),
         aside='rewritten|"w" was added, and older rows may'),
    Trap("column_added_to_a_partitioned_table", _PARTITIONED,
         ("ALTER TABLE t ADD w int DEFAULT 5", "UPDATE t SET v = 'x' WHERE id = 1"),
         aside='"w" was added, and older rows have a value in it'),
    Trap("column_renamed", _T, ("ALTER TABLE t RENAME v TO w", "UPDATE t SET w = 'x' WHERE id = 1"),
         aside='"v" was renamed to "w"'),
    Trap("column_dropped", _T, ("ALTER TABLE t DROP v", "INSERT INTO t VALUES (10)"), aside='"v" was dropped'),
    Trap("column_dropped_and_added_again", _T,
         ("ALTER TABLE t DROP v; ALTER TABLE t ADD v text", "UPDATE t SET v = 'x' WHERE id = 1"),
         aside='"v" was dropped'),
    Trap("type_changed_using", _T,
         ("ALTER TABLE t ALTER v TYPE int USING length(v)", "INSERT INTO t VALUES (10, 10)"), aside="rewritten"),
    Trap("rows_rewritten_without_a_change_of_type", _T, ("ALTER TABLE t ALTER v TYPE text USING v || '!'",),
         aside="rewritten"),
    Trap("generated_expression_changed",
         "CREATE TABLE t (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id * 2) STORED); INSERT INTO t VALUES (1)",
         ("ALTER TABLE t ALTER v SET EXPRESSION AS (id * 3)", "INSERT INTO t VALUES (3)"), aside="rewritten"),
    Trap("key_changed", _T, ("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ALTER v SET NOT NULL; "
                             "ALTER TABLE t ADD PRIMARY KEY (v)", "UPDATE t SET id = 7 WHERE v = 'v1'"),
         aside="key changed"),
    Trap("replica_identity_becomes_full", _T,
         ("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET v = 'x' WHERE id = 1",
          "UPDATE t SET id = 100 WHERE id = 2", "DELETE FROM t WHERE id = 3")),
    Trap("table_rewritten_with_the_same_rows", _T,
         ("UPDATE t SET v = 'x' WHERE id = 1", "VACUUM FULL t", "CLUSTER t USING t_pkey",
          "DELETE FROM t WHERE id = 2")),
    Trap("table_dropped_and_created_again", _T,
         ("INSERT INTO t VALUES (10, 'lost')", "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, "
          "v text, w int); INSERT INTO t VALUES (1, 'new', 1)")),
    Trap("enum_value_renamed",
         "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TABLE t (id int PRIMARY KEY, m mood, ms mood[]); "
         "INSERT INTO t VALUES (1, 'sad', '{sad,ok}'), (2, 'ok', NULL)",
         ("UPDATE t SET m = 'sad' WHERE id = 2", "ALTER TYPE mood RENAME VALUE 'sad' TO 'down'",
          "INSERT INTO t VALUES (3, 'down', '{down}')")),
    Trap("table_renamed", _T, ("ALTER TABLE t RENAME TO u", "UPDATE u SET v = 'x' WHERE id = 1")),
    Trap("table_created_after_the_copy", _T, ("CREATE TABLE u (id int PRIMARY KEY); INSERT INTO u VALUES (1)",)),
    Trap("partition_attached_with_rows", _PARTITIONED,
         ("CREATE TABLE t_3 (id int NOT NULL, v text, part int NOT NULL, PRIMARY KEY (id, part)); "
          "INSERT INTO t_3 SELECT g, 'older', 3 FROM generate_series(1, 5) g",
          "ALTER TABLE t ATTACH PARTITION t_3 FOR VALUES IN (3)", "UPDATE t SET v = 'x' WHERE part = 3 AND id < 3",
          "DELETE FROM t WHERE id = 1")),
    Trap("partition_detached", _PARTITIONED,
         ("UPDATE t SET v = 'x' WHERE id < 4", "ALTER TABLE t DETACH PARTITION t_1", "UPDATE t SET v = 'y'")),
    Trap("partition_dropped", _PARTITIONED, ("DROP TABLE t_1", "UPDATE t SET v = 'y' WHERE id < 5")),
    Trap("partition_created_after_the_copy", _PARTITIONED,
         ("CREATE TABLE t_3 PARTITION OF t FOR VALUES IN (3)", "INSERT INTO t VALUES (100, 3, 'x')",
          "UPDATE t SET part = 3 WHERE part = 2")),
)  # fmt: skip
