"""Copies tables of every kind from a real server. The rows that psycopg reads from the source equal the rows that
delta-rs reads from the mirror."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, PgcdcError
from pgcdc_assets.mirror.delta.copy import TABLES_PER_JOB, copy_tables
from pgcdc_assets.mirror.delta.copytask import BlockReader
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.source.catalog.tables import read_catalog
from pgcdc_assets.source.snapshot.export import exported_snapshot
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import path_of
from tests.deltatables import commit
from tests.fix_postgres import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = Identity("7000000000000000001", "shop", "pgcdc")


@dataclass
class Copying:
    """A source database and a lake."""

    spark: SparkSession
    database: Database
    layout: Layout

    def run(self, ddl: str, *params: Any) -> None:
        with self.database.connect() as conn:
            conn.execute(ddl.encode(), params or None)

    def copy(self, *names: TableName, also: Callable[[], None] | None = None) -> list[CopyReport]:
        """Copies the tables and returns the reports. ``also`` runs between the snapshot and the copy."""
        reports: list[CopyReport] = []
        with exported_snapshot(self.database.conninfo) as snapshot:
            with snapshot.reading() as conn:
                catalog = read_catalog(conn, SOURCE, ["p"])
            if also is not None:
                also()
            tables = [table for table in catalog.tables if table.name in names]
            assert len(tables) == len(names)
            failed = copy_tables(self.spark, self.database.conninfo, tables, self.mirrors, snapshot, reports.append)
            for error in failed.values():
                raise error
        return sorted(reports, key=lambda report: report.table)

    def mirror(self, name: TableName) -> Mirror:
        return self.mirrors.open(name)

    @property
    def mirrors(self) -> Mirrors:
        return Mirrors(self.layout, SOURCE)

    def rows(self, name: TableName) -> pa.Table:
        """The mirror as delta-rs reads it."""
        table = DeltaTable(path_of(self.layout.mirror(name)))
        return pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())

    def source(self, query: str) -> list[tuple[Any, ...]]:
        options = "-c TimeZone=UTC -c DateStyle=ISO -c bytea_output=hex -c IntervalStyle=postgres"
        with self.database.connect(options=options) as conn:
            return conn.execute(query.encode()).fetchall()


def tuples(table: pa.Table, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


@pytest.fixture
def copying(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[Copying]:
    return Copying(spark, database, Layout.of(tmp_path / "lake"))  # type: ignore[return-value]


pytestmark = pytest.mark.spark

WIDE = """
CREATE TABLE wide (
    id bigint PRIMARY KEY, b bool, i2 smallint, i4 int, f4 real, f8 float8, n numeric(38, 10), free numeric,
    d date, ts timestamp, tz timestamptz, t text, v varchar(10), u uuid, j jsonb, raw bytea, ints int[], texts text[],
    nums numeric(6, 2)[], span interval, gen int GENERATED ALWAYS AS (i2 * 2) STORED
);
INSERT INTO wide VALUES
(1, true, -32768, 2147483647, 'NaN', 'Infinity', 1234567890123456789012345678.0123456789, 'NaN', '0001-01-01',
 '9999-12-31 23:59:59.999999', '2024-02-29 12:00:00.000001+05:45', E'a,"b"\\n\\\\N\\r\\t', '', gen_random_uuid(),
 '{"k": "ü🦆"}', '\\x00ff', '{1,NULL,3}', ARRAY['', 'NULL', NULL, 'a"b\\c', ','], '{1.50}', '1 mon 2 days'),
(2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
(3, false, 0, 0, -0.0, 5e-324, 'NaN', 1e40, 'infinity', '-infinity', '0044-03-15 00:00:00+00 BC', '\\.', ' ',
 NULL, 'null', '', '{}', '{{a,b},{c,d}}', '{NaN}', '-00:00:01');
CREATE PUBLICATION p FOR TABLE wide;
"""


def test_copied_values_of_every_type_equal_the_values_of_the_source(copying: Copying) -> None:
    copying.run(WIDE)
    name = TableName("public", "wide")
    (report,) = copying.copy(name)
    assert (report.table, report.rows, report.version) == (name, 3, 1)
    found = sorted(copying.rows(name).to_pylist(), key=lambda row: int(row["id"]))
    first, empty, odd = found
    exact = ("id", "b", "i2", "i4", "n", "d", "ts", "tz", "t", "v", "raw", "ints", "texts", "nums")
    (expected,) = copying.source(f"SELECT {', '.join(exact)} FROM wide WHERE id = 1")
    assert tuple(first[name] for name in exact) == expected
    (texts,) = copying.source("SELECT free::text, u::text, j::text, span::text FROM wide WHERE id = 1")
    assert (first["free"], first["u"], first["j"], first["span"]) == texts
    assert str(first["f4"]) == "nan"
    assert first["f8"] == float("inf")
    assert {value for name, value in empty.items() if name != "id" and not name.startswith("_pgcdc")} == {None}
    assert dict(odd["_pgcdc_raw"]) == {
        "n": "NaN", "d": "infinity", "ts": "-infinity", "tz": "0044-03-15 00:00:00+00 BC",
        "texts": "{{a,b},{c,d}}", "nums": "{NaN}",
    }  # fmt: skip
    assert (odd["n"], odd["d"], odd["texts"], odd["nums"]) == (None, None, None, None)
    assert (odd["t"], odd["v"], odd["j"], odd["raw"], odd["ints"]) == ("\\.", " ", "null", b"", [])
    assert odd["f8"] == 5e-324
    assert first["_pgcdc_raw"] is None
    assert [row["_pgcdc_commit_lsn"] for row in found] == [report.consistent_point] * 3
    assert [row["_pgcdc_commit_ts"] for row in found] == [None] * 3
    by_spark = copying.spark.read.format("delta").load(str(copying.layout.mirror(name))).toArrow().sort_by("id")
    assert tuples(by_spark, exact) == [tuple(row[name] for name in exact) for row in found]


def test_copies_of_empty_tables_also_have_the_position_of_the_snapshot(copying: Copying) -> None:
    copying.run("CREATE TABLE empty (id int PRIMARY KEY); CREATE TABLE bare (); INSERT INTO bare DEFAULT VALUES; "
                "CREATE TABLE one (t text); INSERT INTO one VALUES (NULL), (''), (NULL), ('x'); "
                "CREATE PUBLICATION p FOR TABLE empty, bare, one WITH (publish = 'insert, truncate')")  # fmt: skip
    names = [TableName("public", name) for name in ("bare", "empty", "one")]
    reports = copying.copy(*names)
    assert [(report.rows, report.files) for report in reports] == [(1, 1), (0, 0), (4, 1)]
    assert len({report.consistent_point for report in reports}) == 1
    for name in names:
        mirror = copying.mirror(name)
        assert mirror.snapshot_lsn == mirror.replay_lsn == reports[0].consistent_point
    assert Counter(copying.rows(names[2])["t"].to_pylist()) == {None: 2, "": 1, "x": 1}


@pytest.mark.long
def test_a_new_copy_replaces_the_rows_and_the_position_of_the_old_copy(copying: Copying) -> None:
    copying.run("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b'); "
                "CREATE PUBLICATION p FOR TABLE t")  # fmt: skip
    name = TableName("public", "t")
    (first,) = copying.copy(name)
    mirror = copying.mirror(name)
    assert mirror.generation_app_id is not None
    # After the first copy, a commit raises the mirror's position, and a DELETE adds a deletion vector. The new copy
    # must replace both the position and the deletion vector.
    commit(mirror.path, [], "append", {mirror.generation_app_id: first.consistent_point + 1})
    copying.spark.sql(f"DELETE FROM delta.`{mirror.path}` WHERE id = 1").collect()
    copying.run("UPDATE t SET v = 'c' WHERE id = 2; INSERT INTO t VALUES (3, NULL)")
    (again,) = copying.copy(name)
    now = copying.mirror(name)
    assert now.snapshot_lsn == now.replay_lsn == again.consistent_point > first.consistent_point
    assert sorted(tuples(copying.rows(name), ["id", "v"])) == [(1, "a"), (2, "c"), (3, None)]
    # After a copy of the now empty table, the mirror must be empty.
    copying.run("TRUNCATE t")
    (empty,) = copying.copy(name)
    assert (empty.rows, empty.files, copying.rows(name).num_rows) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("ALTER TABLE t DROP v, ADD w numeric(5, 1) DEFAULT 2.5, ALTER id TYPE int", ["id", "w"]),
        ('ALTER TABLE t RENAME v TO "odd, name"', ["id", "odd, name"]),
        ("ALTER TABLE t DROP v; TRUNCATE t", ["id"]),
    ],
)
def test_changed_columns_and_rows_are_copied_in_one_commit(copying: Copying, change: str, names: list[str]) -> None:
    copying.run("CREATE TABLE t (id bigint PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b'); "
                "CREATE PUBLICATION p FOR TABLE t")  # fmt: skip
    name = TableName("public", "t")
    copying.copy(name)
    copying.run(change)
    (again,) = copying.copy(name)
    mirror = copying.mirror(name)
    assert mirror.delta is not None
    assert mirror.delta.configuration["delta.enableDeletionVectors"] == "true"
    assert mirror.version == again.version
    assert mirror.snapshot_lsn == again.consistent_point
    found = copying.rows(name)
    assert found.column_names == [*names, "_pgcdc_commit_lsn", "_pgcdc_commit_ts", "_pgcdc_raw"]
    columns = ", ".join(f'"{column}"' for column in names)
    assert sorted(tuples(found, names)) == sorted(copying.source(f"SELECT {columns} FROM t"))
    assert not list(storage.walk(copying.layout.staging))
    # This copy has the same columns as the copy before it.
    (third,) = copying.copy(name)
    assert third.rows == again.rows
    assert copying.rows(name).num_rows == again.rows


def test_a_failed_copy_of_one_table_does_not_stop_the_copies_of_other_tables(copying: Copying) -> None:
    copying.run('CREATE TABLE good (id int PRIMARY KEY); INSERT INTO good VALUES (1); '
                'CREATE TABLE bad ("Id" int PRIMARY KEY, id int); INSERT INTO bad VALUES (1, 2); '
                "CREATE PUBLICATION p FOR TABLE good, bad")  # fmt: skip
    good, bad = TableName("public", "good"), TableName("public", "bad")
    with pytest.raises(LakeError, match="differ only in case"):
        copying.copy(good, bad)
    assert copying.rows(good)["id"].to_pylist() == [1]
    assert not copying.mirror(bad).exists


def test_a_locked_table_does_not_delay_the_copies_of_other_small_tables(copying: Copying) -> None:
    """One table is locked until several other tables are copied. If their copies waited for the locked table, the lock
    would never be released."""
    names = [TableName("public", f"small{number:02}") for number in range(2 * TABLES_PER_JOB)]
    for name in names:
        copying.run(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)")
    copying.run("CREATE PUBLICATION p FOR ALL TABLES")
    landed: list[CopyReport] = []
    with copying.database.connect() as conn, exported_snapshot(copying.database.conninfo) as snapshot:
        with snapshot.reading() as reading:
            tables = read_catalog(reading, SOURCE, ["p"]).tables
        conn.execute(f"BEGIN; LOCK TABLE {names[0]}".encode())

        def land(report: CopyReport) -> None:
            landed.append(report)
            if len(landed) == TABLES_PER_JOB:
                conn.execute("COMMIT")

        failed = copy_tables(copying.spark, copying.database.conninfo, tables, copying.mirrors, snapshot, land)
    assert not failed
    assert sorted(report.table for report in landed) == names
    assert names[0] in {report.table for report in landed[TABLES_PER_JOB:]}


def test_no_thread_of_a_copy_runs_after_the_copy_has_failed(copying: Copying) -> None:
    """If a thread of the failed copy still ran, it could create a mirror at the same time as the next copy."""
    names = [TableName("public", f"s{number}") for number in range(2 * TABLES_PER_JOB)]
    for name in names:
        copying.run(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    copying.run("CREATE PUBLICATION p FOR ALL TABLES")

    def fail(report: CopyReport) -> None:
        raise KeyboardInterrupt

    with exported_snapshot(copying.database.conninfo) as snapshot:
        with snapshot.reading() as reading:
            tables = read_catalog(reading, SOURCE, ["p"]).tables
        with pytest.raises(KeyboardInterrupt):
            copy_tables(copying.spark, copying.database.conninfo, tables, copying.mirrors, snapshot, fail)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy_")]


def test_an_error_about_an_invalid_block_does_not_show_the_row() -> None:
    table = Table(1, TableName("public", "t"), ())
    table = replace(table, columns=(_text_column(),))
    reader = BlockReader(table, ("_pgcdc_commit_lsn", "_pgcdc_commit_ts", "_pgcdc_raw"), 5)
    secret = secrets.token_hex(8)
    for block in (b'"\xff' + secret.encode() + b'"\n', f'"{secret}","more"\n'.encode()):
        with pytest.raises(PgcdcError) as caught:
            reader.columns(block, None)
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None


def _text_column() -> Any:
    from pgcdc_assets.core.catalog import Column, PgType

    return Column(1, "t", PgType(25, "text"))
