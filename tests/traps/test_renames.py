"""Names that change and change back between two catalog checks: rows stay with their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.traps.scenario import Played, Trap, empty_rig, play

pytestmark = pytest.mark.spark

_T = "CREATE TABLE t (id int PRIMARY KEY, a int, b int); INSERT INTO t SELECT g, g, -g FROM generate_series(1, 9) g"
_TWO = f"{_T}; CREATE TABLE u (id int PRIMARY KEY, a int, b int); INSERT INTO u VALUES (1, 100, -100)"
_PARTITIONED = (
    "CREATE TABLE t (id int, part int, a int, b int, PRIMARY KEY (id, part)) PARTITION BY LIST (part); "
    "CREATE TABLE t_1 (b int, a int, part int NOT NULL, id int NOT NULL, PRIMARY KEY (id, part)); "
    "ALTER TABLE t ATTACH PARTITION t_1 FOR VALUES IN (1); CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2); "
    "INSERT INTO t SELECT g, g % 2 + 1, g, -g FROM generate_series(1, 10) g"
)
_SWAP = "ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE x RENAME TO u"
_SWAP_COLUMNS = "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b"

TRAPS = (
    Trap("table_renamed_and_back", _T,
         ("ALTER TABLE t RENAME TO x", "INSERT INTO x VALUES (20, 20, 20); UPDATE x SET a = 99 WHERE id = 1",
          "ALTER TABLE x RENAME TO t", "DELETE FROM t WHERE id = 2")),
    Trap("table_renamed_and_back_in_one_transaction", _T,
         ("ALTER TABLE t RENAME TO x; INSERT INTO x VALUES (20, 20, 20); UPDATE x SET a = 99 WHERE id = 1; "
          "ALTER TABLE x RENAME TO t; DELETE FROM t WHERE id = 2",)),
    Trap("table_in_another_schema_and_back", _T,
         ("CREATE SCHEMA elsewhere; ALTER TABLE t SET SCHEMA elsewhere",
          "INSERT INTO elsewhere.t VALUES (20, 20, 20); DELETE FROM elsewhere.t WHERE id = 3",
          "ALTER TABLE elsewhere.t SET SCHEMA table_in_another_schema_and_back; DROP SCHEMA elsewhere")),
    Trap("tables_swap_names_and_back", _TWO,
         (_SWAP, "INSERT INTO t VALUES (20, 20, 20); UPDATE u SET a = 99 WHERE id = 1", _SWAP,
          "INSERT INTO u VALUES (21, 21, 21)")),
    Trap("tables_swap_names_and_back_in_one_transaction", _TWO,
         (f"{_SWAP}; INSERT INTO t VALUES (20, 20, 20); UPDATE u SET a = 99 WHERE id = 1; {_SWAP}",)),
    Trap("columns_swap_names_and_back", _T,
         (f"{_SWAP_COLUMNS}; INSERT INTO t (id, a, b) VALUES (20, 1, 2); {_SWAP_COLUMNS}",),
         aside="changed names with each other"),
    Trap("columns_of_leaves_swap_names_and_back", _PARTITIONED,
         (f"{_SWAP_COLUMNS}; INSERT INTO t (id, part, a, b) VALUES (20, 1, 1, 2); {_SWAP_COLUMNS}",),
         aside="changed names with each other"),
    Trap("column_renamed_and_back", _T,
         ("ALTER TABLE t RENAME a TO x; INSERT INTO t (id, x) VALUES (20, 1); ALTER TABLE t RENAME x TO a",),
         aside="'a' was dropped or is no longer published"),
    Trap("column_added_dropped_and_added_again", _T,
         ("ALTER TABLE t ADD c int; INSERT INTO t VALUES (20, 1, 2, 3)", "ALTER TABLE t DROP c",
          "ALTER TABLE t ADD c int"),
         aside="appeared beside one that was dropped"),
    Trap("leaf_renamed_and_emptied", _PARTITIONED,
         ("ALTER TABLE t_1 RENAME TO t_other; INSERT INTO t VALUES (21, 1, 1, 1)", "TRUNCATE t_other",
          "INSERT INTO t VALUES (22, 1, 2, 2)")),
    Trap("leaves_swap_names_and_one_is_emptied", _PARTITIONED,
         ("ALTER TABLE t_1 RENAME TO x; ALTER TABLE t_2 RENAME TO t_1; ALTER TABLE x RENAME TO t_2",
          "INSERT INTO t VALUES (21, 1, 1, 1), (21, 2, 1, 1)", "TRUNCATE t_1", "INSERT INTO t VALUES (22, 2, 2, 2)")),
    Trap("root_renamed_and_back", _PARTITIONED,
         ("ALTER TABLE t RENAME TO x", "INSERT INTO x VALUES (20, 1, 20, 20); DELETE FROM x WHERE id < 4",
          "ALTER TABLE x RENAME TO t")),
)  # fmt: skip


@pytest.fixture(scope="module", params=["rewrite", pytest.param("set_aside", marks=pytest.mark.long)])
def played(
    request: pytest.FixtureRequest, server: EmbeddedServer, spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Played]:  # fmt: skip
    with empty_rig(server, spark, tmp_path_factory.mktemp("renames"), schema_changes=request.param) as rig:
        yield play(rig, TRAPS, together=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_mirror_equals_the_source_after_the_trap(played: Played, trap: Trap) -> None:
    if played.rig.settings.schema_changes == "rewrite":
        trap = replace(trap, aside=None)
    played.assert_equal(trap)
