"""Traps (known difficult cases) in the changes of rows."""

from __future__ import annotations

import psycopg

from tests.flow.rig import Rig
from tests.traps.scenario import Trap

_TOASTED = """CREATE TABLE t (id int PRIMARY KEY, v text, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
INSERT INTO t SELECT g, 'v' || g, repeat(md5(g::text), 200) FROM generate_series(1, 20) g"""


def _begin_order_differs_from_commit_order(rig: Rig, schema: str) -> None:
    """The transaction that begins and writes first commits last. Both transactions also update the row with id 0."""
    assert rig.settings.source is not None
    with psycopg.connect(rig.settings.source) as first, psycopg.connect(rig.settings.source) as second:
        for conn, rows in ((first, (1, 2)), (second, (3, 4)), (first, (5,))):
            for row in rows:
                conn.execute(f"INSERT INTO {schema}.t VALUES ({row}, pg_current_xact_id()::text)")
        second.execute(f"UPDATE {schema}.t SET v = 'second' WHERE id = 0")
        second.commit()
        first.execute(f"UPDATE {schema}.t SET v = v || ', first' WHERE id = 0")
        first.commit()


TRAPS = (
    Trap("unchanged_toast", _TOASTED,
         ("UPDATE t SET v = 'new' WHERE id <= 5", "UPDATE t SET v = v || '!' WHERE id <= 3",
          "UPDATE t SET big = 'short' WHERE id = 2", "UPDATE t SET v = 'again' WHERE id = 2",
          "UPDATE t SET big = NULL WHERE id = 3", "UPDATE t SET v = 'NULL stays' WHERE id = 3")),
    Trap("unchanged_toast_with_a_key_change", _TOASTED,
         ("UPDATE t SET id = id + 100 WHERE id <= 3", "UPDATE t SET v = 'moved', id = id + 1000 WHERE id > 100",
          "UPDATE t SET id = -1 WHERE id = 5; UPDATE t SET id = 5 WHERE id = 6; UPDATE t SET id = 6 WHERE id = -1",
          "UPDATE t SET id = 7777 WHERE id = 7", "UPDATE t SET id = 7 WHERE id = 7777",
          "UPDATE t SET big = repeat('x', 9000) WHERE id = 8; UPDATE t SET id = 88 WHERE id = 8")),
    Trap("toast_value_of_a_deleted_row_is_not_reused", _TOASTED,
         ("UPDATE t SET big = repeat('two', 3000) WHERE id = 2", "DELETE FROM t WHERE id = 2",
          "UPDATE t SET id = 2 WHERE id = 1",
          "UPDATE t SET big = repeat('four', 3000) WHERE id = 4; DELETE FROM t WHERE id = 4; "
          "UPDATE t SET id = 4 WHERE id = 3; UPDATE t SET v = 'was three' WHERE id = 4")),
    Trap("unchanged_toast_with_identity_full", _TOASTED + "; ALTER TABLE t REPLICA IDENTITY FULL",
         ("UPDATE t SET v = 'new' WHERE id <= 5", "UPDATE t SET id = id + 100 WHERE id <= 3", "DELETE FROM t WHERE "
          "id = 101")),
    Trap("texts_that_other_tools_use_for_unchanged_toast",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, '__debezium_unavailable_value'), "
         "(2, 'unchanged-toast-datum'), (3, E'\\\\N'), (4, 'NULL'), (5, ''), (6, NULL)",
         ("UPDATE t SET id = id + 10", "INSERT INTO t SELECT id + 10, v FROM t",
          "INSERT INTO t VALUES (100, '{}'), (101, '\"'), (102, E'a\\tb\\nc\\rd\\\\e'), (103, '__pgcdc_unchanged__')")),
    Trap("a_long_key",
         "CREATE TABLE t (id text PRIMARY KEY, v int); ALTER TABLE t ALTER id SET STORAGE EXTERNAL; "
         "INSERT INTO t SELECT g || repeat('k', 2500), g FROM generate_series(1, 6) g",
         ("UPDATE t SET v = v + 100 WHERE v <= 4", "UPDATE t SET id = 'x' || id WHERE v = 102",
          "DELETE FROM t WHERE v = 103", "UPDATE t SET v = 5000 WHERE v = 5")),
    Trap("key_swap_under_a_deferrable_key",
         "CREATE TABLE t (id int, v text, PRIMARY KEY (id) DEFERRABLE); ALTER TABLE t REPLICA IDENTITY FULL; "
         "INSERT INTO t SELECT g, 'v' || g FROM generate_series(-3, 5) g WHERE g <> 0",
         ("UPDATE t SET id = -id",
          "UPDATE t SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id IN (1, 2)", "DELETE FROM t WHERE id = -3")),
    Trap("keys_swapped_and_shifted_in_one_transaction",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g",
         ("UPDATE t SET id = 0 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2; UPDATE t SET id = 2 WHERE id = 0",
          "UPDATE t SET id = id + 1000; UPDATE t SET id = id - 999")),
    Trap("delete_and_insert_of_one_key",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g",
         ("DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'again')", "DELETE FROM t WHERE id = 2",
          "INSERT INTO t VALUES (2, 'again')", "DELETE FROM t WHERE id = 2",
          "INSERT INTO t VALUES (99, 'comes and goes'); DELETE FROM t WHERE id = 99")),
    Trap("insert_truncate_insert",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'old'); CREATE TABLE u (LIKE t "
         "INCLUDING ALL); INSERT INTO u VALUES (1, 'old')",
         ("INSERT INTO t VALUES (2, 'gone'); TRUNCATE t; INSERT INTO t VALUES (1, 'new'), (3, 'stays')",
          "INSERT INTO u VALUES (2, 'gone')", "TRUNCATE u", "INSERT INTO u VALUES (4, 'stays')")),
    Trap("truncate_of_several_tables",
         "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE child (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
         "t int REFERENCES t); CREATE TABLE other (id serial PRIMARY KEY); INSERT INTO t VALUES (1), (2); "
         "INSERT INTO child (t) VALUES (1), (2); INSERT INTO other DEFAULT VALUES; CREATE TABLE spared (LIKE t); "
         "ALTER TABLE spared ADD PRIMARY KEY (id); INSERT INTO spared VALUES (1)",
         ("INSERT INTO child (t) VALUES (1); TRUNCATE t CASCADE; INSERT INTO t VALUES (5)",
          "INSERT INTO child (t) VALUES (5)",
          "TRUNCATE other, child RESTART IDENTITY; INSERT INTO child (t) VALUES (5)",
          "INSERT INTO other DEFAULT VALUES", "BEGIN; TRUNCATE spared; ROLLBACK")),
    Trap("root_and_leaves_with_different_identities",
         "CREATE TABLE t (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part); "
         "CREATE TABLE t_full PARTITION OF t FOR VALUES IN (1); ALTER TABLE t_full REPLICA IDENTITY FULL; "
         "CREATE TABLE t_key PARTITION OF t FOR VALUES IN (2); "
         "CREATE TABLE t_index (v text, part int NOT NULL, id int NOT NULL); "
         "ALTER TABLE t ATTACH PARTITION t_index FOR VALUES IN (3); "
         "CREATE TABLE t_deep PARTITION OF t DEFAULT PARTITION BY RANGE (id); "
         "CREATE TABLE t_deep_low PARTITION OF t_deep FOR VALUES FROM (0) TO (100); "
         "CREATE TABLE t_deep_high PARTITION OF t_deep DEFAULT; "
         "INSERT INTO t SELECT g, g % 5, 'v' || g FROM generate_series(1, 40) g",
         ("UPDATE t SET v = v || '!' WHERE id % 2 = 0", "UPDATE t SET part = part % 4 + 1 WHERE id <= 20",
          "UPDATE t SET id = id + 200 WHERE id % 3 = 0", "DELETE FROM t WHERE id % 7 = 0")),
    Trap("leaves_with_keys_under_a_root_without_a_key",
         "CREATE TABLE t (id int, part int, v text) PARTITION BY LIST (part); "
         "CREATE TABLE t_1 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES IN (1); "
         "CREATE TABLE t_2 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES IN (2); "
         "ALTER TABLE t_1 REPLICA IDENTITY FULL; ALTER TABLE t_2 REPLICA IDENTITY FULL; "
         "INSERT INTO t SELECT g, g % 2 + 1, 'v' || g FROM generate_series(1, 10) g; INSERT INTO t SELECT g, "
         "(g + 1) % 2 + 1, 'same id, other leaf' FROM generate_series(1, 4) g",
         ("UPDATE t SET v = v || '!' WHERE id <= 3", "UPDATE t SET part = 2, id = id + 50 WHERE part = 1 AND id < 4",
          "DELETE FROM t WHERE id = 6")),
    Trap("a_truncated_leaf",
         "CREATE TABLE t (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part); "
         "CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2); "
         "INSERT INTO t SELECT g, g % 2 + 1, 'v' || g FROM generate_series(1, 10) g",
         ("INSERT INTO t VALUES (100, 1, 'gone'); TRUNCATE t_1", "INSERT INTO t VALUES (1, 1, 'back')",
          "UPDATE t SET v = 'other leaf' WHERE id = 3")),
    Trap("microseconds_in_changes_and_copy",
         "CREATE TABLE t (id int PRIMARY KEY, a timestamptz, b timestamp, c time, d interval); INSERT INTO t VALUES "
         "(1, '2024-01-01 00:00:00.000001+00', '1969-12-31 23:59:59.999999', '12:00:00.123456', '1.000001 s')",
         ("INSERT INTO t SELECT 2, a, b, c, d FROM t",
          "INSERT INTO t VALUES (3, '0001-01-01 00:00:00.000001+00', '9999-12-31 23:59:59.999999', '24:00', '-1 us')",
          "UPDATE t SET a = a + interval '1 us', b = b + interval '1 us' WHERE id = 2")),
    Trap("timestamps_infinity_and_bc",
         "CREATE TABLE t (id int PRIMARY KEY, fits bool, v timestamptz); INSERT INTO t VALUES (1, false, 'infinity'), "
         "(2, false, '0044-03-15 12:00:00 BC'), (3, true, '2024-01-01 00:00:00+00')",
         ("INSERT INTO t SELECT id + 10, fits, v FROM t", "INSERT INTO t VALUES (5, false, '-infinity'), "
          "(6, false, '294276-12-31 23:59:59.999999+00')", "UPDATE t SET v = '-infinity' WHERE id = 2",
          "UPDATE t SET v = 'infinity', fits = false WHERE id = 3",
          "UPDATE t SET v = '2024-01-01 00:00:00+00', fits = true WHERE id = 1")),
    Trap("dates_infinity_and_bc",
         "CREATE TABLE t (id int PRIMARY KEY, fits bool, v date); INSERT INTO t VALUES (1, false, 'infinity'), "
         "(2, true, '0001-01-01')",
         ("INSERT INTO t VALUES (5, false, '-infinity'), (6, false, '0001-12-31 BC'), (7, true, '9999-12-31'), "
          "(8, false, '10000-01-01')",)),
    Trap("numeric_nan",
         "CREATE TABLE t (id int PRIMARY KEY, fits bool, v numeric(10,2)); INSERT INTO t VALUES (1, false, 'NaN'), "
         "(2, true, 1.25)",
         ("INSERT INTO t VALUES (3, false, 'NaN'), (4, true, -99999999.99)", "UPDATE t SET v = 0, fits = true WHERE "
          "id = 1", "UPDATE t SET v = 'NaN', fits = false WHERE id = 2")),
    Trap("numeric_without_bounds",
         "CREATE TABLE t (id int PRIMARY KEY, v numeric, f float8, g float4); INSERT INTO t VALUES (1, 'NaN', 'NaN', "
         "'-Infinity'), (2, 'Infinity', '-0', 1e-45)",
         ("INSERT INTO t SELECT id + 10, v, f, g FROM t", "INSERT INTO t VALUES (3, repeat('9', 300)::numeric, "
          "1.7976931348623157e308, 3.4028235e38), (4, 1.10, 0.1, 0.1)")),
    Trap("arrays_with_other_lower_bounds",
         "CREATE TABLE t (id int PRIMARY KEY, fits bool, v int[]); INSERT INTO t VALUES (1, false, '[2:3]={1,2}'), "
         "(2, true, '{1,NULL,3}')",
         ("INSERT INTO t VALUES (3, false, '[0:0]={7}'), (4, true, '{}'), (5, false, '[-1:0]={1,NULL}')",
          "UPDATE t SET v = '{9}', fits = true WHERE id = 1")),
    Trap("arrays_of_two_dimensions",
         "CREATE TABLE t (id int PRIMARY KEY, fits bool, v text[]); INSERT INTO t VALUES (1, false, '{{a,b},{c,d}}'), "
         "(2, true, ARRAY['a\"b', 'c,d', '{e}', 'NULL', NULL, ''])",
         ("INSERT INTO t VALUES (3, false, '{{\"x,y\",NULL}}'), (4, true, ARRAY[E'\\\\', ' ', E'\\n'])",)),
    Trap("keys_that_do_not_fit_their_delta_type",
         "CREATE TABLE t (id timestamptz PRIMARY KEY, v int); INSERT INTO t VALUES ('infinity', 1), ('-infinity', 2), "
         "('0044-03-15 BC', 3), ('2024-01-01', 4)",
         ("UPDATE t SET v = v + 10", "DELETE FROM t WHERE v IN (12, 13)", "UPDATE t SET id = '2025-01-01' WHERE "
          "id = 'infinity'; DELETE FROM t WHERE v = 14")),
    Trap("keys_of_floats_and_padded_texts",
         "CREATE TABLE t (id float8 PRIMARY KEY, v int); INSERT INTO t VALUES ('NaN', 1), (0, 2), ('Infinity', 3); "
         "CREATE TABLE u (id char(5) PRIMARY KEY, v int); INSERT INTO u VALUES ('a', 1), ('b', 2), ('', 3)",
         ("UPDATE t SET v = v + 10", "UPDATE t SET id = '-0' WHERE id = 0", "DELETE FROM t WHERE id = 'NaN'",
          "UPDATE u SET v = v + 10", "UPDATE u SET id = 'a c' WHERE id = 'a'", "DELETE FROM u WHERE id = ''")),
    Trap("columns_with_odd_names",
         'CREATE TABLE t ("Group" int, "order by" int, "a.b" text, "Ümlaut 🐘" text, "x`y" text, "q""q" text, '
         '"a/b%" text, "A" int, "select" int, "key;,= ()" int, PRIMARY KEY ("Group", "order by")); '
         "INSERT INTO t SELECT g, g, 'a', 'b', 'c', 'd', 'e', g, g, g FROM generate_series(1, 9) g",
         ('UPDATE t SET "Ümlaut 🐘" = \'changed\', "x`y" = NULL WHERE "A" < 4', 'UPDATE t SET "order by" = 100 '
          'WHERE "Group" = 5', 'DELETE FROM t WHERE "select" = 9')),
    Trap("tables_of_the_same_name_in_two_schemas",
         "CREATE TABLE t (id int PRIMARY KEY, other text, columns bool); INSERT INTO t VALUES (1, 'a', true)",
         ("INSERT INTO t VALUES (2, 'b', false)", "UPDATE t SET columns = NULL")),
    Trap("type_messages",
         "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN short AS varchar(5) CHECK (VALUE <> ''); "
         "CREATE DOMAIN price AS numeric(8,2); CREATE TYPE pair AS (a int, b text); "
         "CREATE TABLE t (id int PRIMARY KEY, m mood, s short, p price, c pair, ms mood[], r int4range, h money); "
         "INSERT INTO t VALUES (1, 'sad', 'abc', "
         "1.5, ROW(1, 'x y'), '{sad}', '[1,5)', 12.5)",
         ("INSERT INTO t SELECT 2, m, s, p, c, ms, r, h FROM t", "ALTER TYPE mood ADD VALUE 'happy'",
          "UPDATE t SET m = 'happy', c = ROW(NULL, ',')", "INSERT INTO t (id, m) VALUES (3, 'happy')")),
    Trap("equal_rows_in_a_table_without_a_key",
         "CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t SELECT g % 3, NULL FROM "
         "generate_series(1, 12) g",
         ("DELETE FROM t WHERE ctid IN (SELECT ctid FROM t WHERE a = 1 LIMIT 2)",
          "UPDATE t SET b = 'one' WHERE ctid IN (SELECT ctid FROM t WHERE a = 2 LIMIT 1)",
          "INSERT INTO t SELECT 0, NULL FROM generate_series(1, 3)", "UPDATE t SET a = 1 WHERE b = 'one'",
          "DELETE FROM t WHERE ctid = (SELECT ctid FROM t WHERE a = 0 LIMIT 1); INSERT INTO t VALUES (0, NULL)")),
    Trap("replica_identity_index",
         "CREATE TABLE t (code text NOT NULL UNIQUE, v int); ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key; "
         "INSERT INTO t SELECT 'c' || g, g FROM generate_series(1, 6) g; CREATE TABLE u (id int PRIMARY KEY, code text "
         "NOT NULL UNIQUE, v int); ALTER TABLE u REPLICA IDENTITY USING INDEX u_code_key; INSERT INTO u SELECT g, "
         "'c' || g, g FROM generate_series(1, 6) g",
         ("UPDATE t SET v = 10 WHERE v = 1", "UPDATE t SET code = 'new' WHERE v = 2", "DELETE FROM t WHERE v = 3",
          "UPDATE u SET id = 100 WHERE v = 1", "UPDATE u SET code = 'new' WHERE v = 2",
          "UPDATE u SET id = 200, code = 'both' WHERE v = 4", "DELETE FROM u WHERE v = 3")),
    Trap("table_without_replica_identity",
         "CREATE TABLE t (a int, b text); INSERT INTO t VALUES (1, 'a'), (1, 'a')",
         ("INSERT INTO t VALUES (2, 'b'), (2, 'b')", "TRUNCATE t; INSERT INTO t VALUES (3, NULL)")),
    Trap("generated_columns",
         "CREATE TABLE t (id int PRIMARY KEY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED, b text); "
         "INSERT INTO t (id, a, b) SELECT g, g, 'b' FROM generate_series(1, 5) g",
         ("UPDATE t SET a = a + 10 WHERE id < 3", "INSERT INTO t (id, a) VALUES (10, 10)")),
    Trap("savepoints_and_partial_rollbacks",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g",
         ("BEGIN; INSERT INTO t VALUES (10, 'kept'); SAVEPOINT a; INSERT INTO t VALUES (11, 'lost'); UPDATE t SET v = "
          "'lost'; SAVEPOINT b; DELETE FROM t; ROLLBACK TO b; TRUNCATE t; ROLLBACK TO a; UPDATE t SET v = 'kept' WHERE "
          "id = 1; SAVEPOINT c; UPDATE t SET id = 20 WHERE id = 2; RELEASE c; INSERT INTO t VALUES (11, 'kept too'); "
          "COMMIT", "BEGIN; DELETE FROM t; ROLLBACK",
          "DO $$BEGIN FOR i IN 1..9 LOOP BEGIN UPDATE t SET v = i::text WHERE id = i; IF i % 2 = 0 THEN RAISE "
          "division_by_zero; END IF; EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END$$")),
    Trap("prepared_transactions",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g",
         ("BEGIN; UPDATE t SET v = 'prepared' WHERE id = 1; INSERT INTO t VALUES (10, 'p'); PREPARE TRANSACTION 'a'",
          "BEGIN; DELETE FROM t WHERE id = 2; PREPARE TRANSACTION 'b'",
          "BEGIN; UPDATE t SET id = 30 WHERE id = 3; PREPARE TRANSACTION 'c'",
          "UPDATE t SET v = 'between' WHERE id = 4", "COMMIT PREPARED 'a'", "ROLLBACK PREPARED 'b'"),
         later=("UPDATE t SET v = 'after the first sync' WHERE id = 5", "COMMIT PREPARED 'c'")),
    Trap("logical_messages",
         "CREATE TABLE t (id int PRIMARY KEY)",
         ("SELECT pg_logical_emit_message(false, 'somebody', 'between transactions')",
          "INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'somebody', 'inside'); INSERT INTO t VALUES "
          "(2)", "SELECT pg_logical_emit_message(true, 'somebody', repeat('alone', 1000))")),
    Trap("begin_order_differs_from_commit_order",
         "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (0, 'nobody')",
         (_begin_order_differs_from_commit_order,)),
    Trap("rows_of_copy_merge_and_on_conflict",
         "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, g FROM generate_series(1, 9) g",
         ("INSERT INTO t SELECT g, -g FROM generate_series(5, 15) g ON CONFLICT (id) DO UPDATE SET v = excluded.v",
          "MERGE INTO t USING (VALUES (1), (2), (77)) s(id) ON t.id = s.id WHEN MATCHED AND s.id = 1 THEN DELETE "
          "WHEN MATCHED THEN UPDATE SET v = 0 WHEN NOT MATCHED THEN INSERT VALUES (s.id, 7)",
          "WITH gone AS (DELETE FROM t WHERE id = 3 RETURNING *) INSERT INTO t SELECT id + 300, v FROM gone")),
)  # fmt: skip
OFTEN = frozenset({
    "unchanged_toast_with_a_key_change", "toast_value_of_a_deleted_row_is_not_reused",
    "key_swap_under_a_deferrable_key", "insert_truncate_insert", "truncate_of_several_tables",
    "root_and_leaves_with_different_identities", "microseconds_in_changes_and_copy", "timestamps_infinity_and_bc",
    "columns_with_odd_names", "type_messages", "equal_rows_in_a_table_without_a_key", "table_without_replica_identity",
    "savepoints_and_partial_rollbacks", "prepared_transactions", "logical_messages",
    "begin_order_differs_from_commit_order",
})  # fmt: skip
"""Names of the traps in the default set, which is small because each table costs a MERGE."""
