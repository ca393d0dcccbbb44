"""Compares mirrors with a real server. The mirrors are written by hand. Equal mirrors pass, and each difference is
named."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgcdc_assets.checks import verify as verify_module
from pgcdc_assets.checks.compare import compare_sides
from pgcdc_assets.checks.report import Example, TableReport, Verdict, VerifyReport
from pgcdc_assets.checks.sides import Comparison, MirrorSide, SourceSide
from pgcdc_assets.checks.verify import SNAPSHOTS, verify
from pgcdc_assets.cli.status_verify import in_a_sentence
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.errors import CopyBlocked, LakeError, UnknownTable
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.snapshot import reading
from pgcdc_assets.source.snapshot.export import Snapshot, exported_snapshot, shown_tables
from pgcdc_assets.structure.record import TableState
from tests.checks import mirrors
from tests.checks.mirrors import Lake, Point, Row

# Every type ------------------------------------------------------------------------------------

KIND_SCHEMA = mirrors.mirror_schema(id=pa.int32(), **{name: kind.type for name, kind in mirrors.KINDS.items()})


@dataclass(frozen=True)
class Kinds:
    """The table with a column of every type, read in one snapshot, and a folder for its mirror."""

    source: SourceSide
    path: Path
    by_files: bool = False

    def compared(self, rows: list[Row], schema: pa.Schema = KIND_SCHEMA) -> TableReport:
        mirrors.write_mirror(self.path, schema, rows)
        mirror = DeltaTable(str(self.path))
        comparison = Comparison.of(self.source.comparison.table, pa.schema(mirror.schema().to_arrow()))
        held = DeltaLog(Location.of(self.path)).newest() if self.by_files else None
        return compare_sides(replace(self.source, comparison=comparison), MirrorSide(mirror, comparison, held))


@pytest.fixture(params=["engine", pytest.param("files", marks=pytest.mark.long)])
def kinds(lake: Lake, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Kinds]:
    lake.script(mirrors.TYPES)
    lake.script(mirrors.source_script("public.kinds"))
    (table,) = lake.catalog().tables
    with exported_snapshot(lake.conninfo) as snapshot:
        comparison = Comparison.of(table, KIND_SCHEMA)
        yield Kinds(SourceSide(lake.conninfo, snapshot.name, comparison), tmp_path / "kinds", request.param == "files")


def test_equal_values_of_every_type_are_compared_as_equal(kinds: Kinds) -> None:
    rows = mirrors.mirror_rows()
    report = kinds.compared(rows)
    assert report.examples == ()
    assert (report.source_rows, report.mirror_rows, report.equal) == (len(rows), len(rows), True)


def test_one_different_value_is_found_in_a_column_of_any_type(kinds: Kinds) -> None:
    for name, kind in mirrors.KINDS.items():
        rows = mirrors.mirror_rows()
        assert rows[0][name] is not None
        rows[0][name] = kind.other
        _one_difference(kinds.compared(rows), key="1", column=name)
    rows = mirrors.mirror_rows()
    rows[0] |= dict.fromkeys(mirrors.KINDS)
    (example,) = kinds.compared(rows).examples
    assert set(example.columns) == set(mirrors.KINDS), "NULL in place of each value"


@pytest.mark.long
def test_a_value_in_place_of_null_is_reported_as_a_difference(kinds: Kinds) -> None:
    nulls = len(mirrors.mirror_rows())
    for name in mirrors.KINDS:
        rows = mirrors.mirror_rows()
        rows[-1][name] = rows[0][name]
        _one_difference(kinds.compared(rows), key=str(nulls), column=name)


@pytest.mark.long
def test_every_value_differs_from_the_next_value_of_its_column(kinds: Kinds) -> None:
    """In the mirror, each row gets the value of the next row of the source. So '' must differ from 'NULL', -0.0 from
    the smallest positive number, {} from {1,NULL,-3}, and so on."""
    for name, kind in mirrors.KINDS.items():
        count = len(kind.values)
        rows = mirrors.mirror_rows()
        fresh = mirrors.mirror_rows()
        for n in range(count):
            rows[n][name] = fresh[(n + 1) % count][name]
            rows[n]["_pgcdc_raw"] = _with_raw(fresh[n], name, fresh[(n + 1) % count])
        if count > 1:
            report = kinds.compared(rows)
            assert (report.different, report.missing, report.extra) == (count, 0, 0), name


@pytest.mark.long
def test_a_value_that_does_not_fit_its_column_in_the_mirror_is_compared_by_its_text(kinds: Kinds) -> None:
    for name, kind in mirrors.KINDS.items():
        for n, value in enumerate(kind.values):
            if value.raw is not None:
                for change in ({}, {name: value.raw + "x"}):
                    rows = mirrors.mirror_rows()
                    others = [pair for pair in rows[n]["_pgcdc_raw"] if pair[0] != name]
                    rows[n]["_pgcdc_raw"] = [*others, *change.items()] or None
                    _one_difference(kinds.compared(rows), key=str(n + 1), column=name)


def test_a_row_with_a_value_and_a_raw_text_for_the_same_column_is_a_difference(kinds: Kinds) -> None:
    rows = mirrors.mirror_rows()
    place = next(n for n, value in enumerate(mirrors.KINDS["ts"].values) if value.raw == "infinity")
    rows[place]["ts"] = rows[1]["ts"]
    _one_difference(kinds.compared(rows), key=str(place + 1), column="ts")


def test_a_mirror_column_of_a_wrong_type_differs_in_every_row_with_a_value(kinds: Kinds) -> None:
    schema = KIND_SCHEMA.set(KIND_SCHEMA.get_field_index("ts"), pa.field("ts", pa.timestamp("us", "UTC")))
    rows = mirrors.mirror_rows()
    for row in rows:
        row["ts"] = row["ts"] and row["ts"].replace(tzinfo=dt.UTC)
    report = kinds.compared(rows, schema)
    assert report.different == len(mirrors.KINDS["ts"].values)
    assert {example.columns for example in report.examples} == {("ts",)}


def test_a_column_that_the_mirror_lacks_differs_in_every_row_with_a_value(kinds: Kinds) -> None:
    rows = mirrors.mirror_rows()
    report = kinds.compared(rows, KIND_SCHEMA.remove(KIND_SCHEMA.get_field_index("c")))
    assert report.different == len(mirrors.KINDS["c"].values)


def _one_difference(report: TableReport, key: str, column: str) -> None:
    assert (report.different, report.missing, report.extra) == (1, 0, 0), column
    assert report.examples == (Example("different", {"id": key}, (column,)),)


def _with_raw(row: Row, name: str, other: Row) -> list[tuple[str, str]] | None:
    kept = [pair for pair in row["_pgcdc_raw"] or [] if pair[0] != name]
    return [*kept, *(pair for pair in other["_pgcdc_raw"] or [] if pair[0] == name)] or None


# Rows ------------------------------------------------------------------------------------------

NOTE_SCHEMA = mirrors.mirror_schema(id=pa.int32(), note=pa.string())


def _notes(*rows: tuple[int, str | None]) -> list[Row]:
    return [{"id": key, "note": note} for key, note in rows]


def test_missing_and_extra_rows_are_counted_and_named(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (id int PRIMARY KEY, note text);INSERT INTO t SELECT i, 'n' || i FROM generate_series(1, 30) i",
    )
    rows = [(i, f"n{i}") for i in range(1, 31)]
    lake.write("t", NOTE_SCHEMA, _notes(*rows[2:], (99, "new"), (30, "n30")))
    report = lake.verify()
    (table,) = report.tables
    assert (table.source_rows, table.mirror_rows) == (30, 30)
    assert (table.missing, table.extra, table.different) == (2, 2, 0)
    named = {(example.kind, example.key["id"]) for example in table.examples}
    assert named == {("missing", "1"), ("missing", "2"), ("extra", "99"), ("extra", "30")}
    assert not report.ok


def test_rows_of_a_table_without_a_key_are_compared_as_a_multiset(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (id int, note text); ALTER TABLE t REPLICA IDENTITY FULL;"
        "INSERT INTO t VALUES (1, 'a'), (1, 'a'), (2, NULL), (NULL, NULL)",
    )
    equal = _notes((2, None), (1, "a"), (None, None), (1, "a"))  # type: ignore[arg-type]
    lake.write("t", NOTE_SCHEMA, equal)
    assert lake.verify().ok
    lake.write("t", NOTE_SCHEMA, [*equal[:3], equal[0]])
    table = lake.only()
    assert (table.missing, table.extra, table.different) == (1, 1, 0)
    assert table.examples == (
        Example("missing", {"id": "1", "note": "a"}),
        Example("extra", {"id": "2", "note": None}),
    )


def test_null_and_empty_text_differ_in_a_table_with_one_column(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (note text); ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (NULL), (''), (NULL)",
    )
    schema = mirrors.mirror_schema(note=pa.string())
    lake.write("t", schema, [{"note": None}, {"note": None}, {"note": ""}])
    assert lake.verify().ok
    lake.write("t", schema, [{"note": None}, {"note": ""}, {"note": ""}])
    assert not lake.verify().ok


def test_composite_keys_may_have_values_outside_the_range_of_the_mirrors_types(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (day date, at timestamptz, y bytea, v int, PRIMARY KEY (y, at, day));"
        "INSERT INTO t VALUES ('infinity', '2024-02-29 12:00+00', '\\xff', 1), ('2024-02-29', '-infinity', '', 2)",
    )
    schema = mirrors.mirror_schema(day=pa.date32(), at=pa.timestamp("us", "UTC"), y=pa.binary(), v=pa.int32())
    at = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)
    day = dt.date(2024, 2, 29)
    rows = [
        {"at": at, "y": b"\xff", "v": 1, "_pgcdc_raw": [("day", "infinity")]},
        {"day": day, "y": b"", "v": 2, "_pgcdc_raw": [("at", "-infinity")]},
    ]
    lake.write("t", schema, rows)
    assert lake.verify().ok
    lake.write("t", schema, [rows[0] | {"v": 7}, rows[1] | {"y": b"\x00"}])
    named = {(example.kind, tuple(example.key.items())) for example in lake.only().examples}
    assert named == {
        ("different", (("day", "infinity"), ("at", "2024-02-29 12:00:00+00"), ("y", "\\xff"))),
        ("missing", (("day", "2024-02-29"), ("at", "-infinity"), ("y", "\\x"))),
        ("extra", (("day", "2024-02-29"), ("at", "as written: -infinity"), ("y", "\\x00"))),
    }


def test_tables_and_columns_with_odd_names_are_compared(lake: Lake) -> None:
    lake.script(
        'CREATE SCHEMA "Odd.Schema";'
        'CREATE TABLE "Odd.Schema"."sel""ect 😀 [a]/b\\c|^%2F~"'
        ' ("Ké\'y" int PRIMARY KEY, "a""b" text, "x.y" text, "select" int);'
        'INSERT INTO "Odd.Schema"."sel""ect 😀 [a]/b\\c|^%2F~" VALUES (1, \'a\', \'b\', 2)',
    )
    kinds = {"Ké'y": pa.int32(), 'a"b': pa.string(), "x.y": pa.string(), "select": pa.int32()}
    row = {"Ké'y": 1, 'a"b': "a", "x.y": "b", "select": 2}
    name = '"Odd.Schema"."sel""ect 😀 [a]/b\\c|^%2F~"'
    lake.write(name, mirrors.mirror_schema(**kinds), [row])
    assert lake.verify(name).ok
    lake.write(name, mirrors.mirror_schema(**kinds), [row | {"x.y": "c", 'a"b': None}])
    assert lake.only().examples == (Example("different", {"Ké'y": "1"}, ('a"b', "x.y")),)


def test_a_row_with_the_wrong_leaf_in_the_mirror_is_reported_as_a_difference(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE t2 (note text, gone int, id int NOT NULL); ALTER TABLE t2 DROP COLUMN gone;"
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20);"
        "INSERT INTO t VALUES (1, 'a'), (11, 'b')",
    )
    schema = NOTE_SCHEMA.append(pa.field("_pgcdc_leaf", pa.string()))
    rows = [row | {"_pgcdc_leaf": leaf} for row, leaf in zip(_notes((1, "a"), (11, "b")), LEAVES, strict=True)]
    lake.write("t", schema, rows)
    assert lake.verify().ok
    lake.write("t", schema, [rows[0], rows[1] | {"_pgcdc_leaf": LEAVES[0]}])
    assert lake.only().examples == (Example("different", {"id": "11"}, ("_pgcdc_leaf",)),)


def test_an_unlogged_leaf_is_not_compared_and_the_report_says_why(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10);"
        "CREATE UNLOGGED TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20);"
        "INSERT INTO t VALUES (1, 'a'), (11, 'b')",
    )
    schema = NOTE_SCHEMA.append(pa.field("_pgcdc_leaf", pa.string()))
    lake.write("t", schema, [row | {"_pgcdc_leaf": LEAVES[0]} for row in _notes((1, "a"))])
    table = lake.only()
    assert (table.verdict, table.source_rows) == (Verdict.EQUAL, 1)
    assert table.reason == "partition public.t2 is UNLOGGED: its rows are not replicated"


def test_a_leaf_renamed_after_the_copy_is_compared_under_its_earlier_name(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10); INSERT INTO t VALUES (1, 'a')",
    )
    (copied,) = lake.catalog().tables
    TableStates(Layout.of(lake.root)).set(copied, TableState.CATCHING_UP, Lsn(1))
    lake.script("ALTER TABLE t1 RENAME TO other")
    schema = NOTE_SCHEMA.append(pa.field("_pgcdc_leaf", pa.string()))
    lake.write("t", schema, [row | {"_pgcdc_leaf": LEAVES[0]} for row in _notes((1, "a"))])
    assert lake.verify().ok


def test_with_publish_via_root_the_column_pgcdc_leaf_is_not_compared(lake: Lake) -> None:
    lake.script(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10); INSERT INTO t VALUES (1, 'a'), (2, 'b');"
        "ALTER PUBLICATION p SET (publish_via_partition_root = true)",
    )
    schema = NOTE_SCHEMA.append(pa.field("_pgcdc_leaf", pa.string()))
    lake.write("t", schema, [row | {"_pgcdc_leaf": None} for row in _notes((1, "a"), (2, "b"))])
    assert lake.verify().ok
    lake.write("t", schema, [row | {"_pgcdc_leaf": LEAVES[0]} for row in _notes((1, "a"), (2, "c"))])
    assert lake.only().different == 1


LEAVES = ("public.t1", "public.t2")
T, U = TableName("public", "t"), TableName("public", "u")


def test_only_published_rows_and_columns_are_compared(lake: Lake, pg_version: int) -> None:
    lake.script(
        "CREATE TABLE t (id int PRIMARY KEY, note text, secret text);"
        "INSERT INTO t VALUES (1, 'a', 'x'), (2, 'b', 'y'), (-3, 'c', 'z');"
        "DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE t (id, note) WHERE (id > 0)",
    )
    lake.write("t", NOTE_SCHEMA, _notes((1, "a"), (2, "b")))
    table = lake.only()
    assert (table.equal, table.source_rows) == (True, 2)


def test_changes_after_the_snapshot_are_not_compared(lake: Lake) -> None:
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t VALUES (1, 'a')")
    lake.write("t", NOTE_SCHEMA, _notes((1, "a")))

    def reach(lsn: Lsn) -> Point:
        lake.script("INSERT INTO t VALUES (2, 'b'); UPDATE t SET note = 'z'")
        return Point(lsn, {TableName("public", "t"): 0})

    settings = Settings(source=lake.conninfo, lake=lake.root)
    assert verify(settings, lake.catalog(), None, reach).ok


@pytest.mark.parametrize(
    ("rows", "ok", "said"),
    [
        ([(1, "a"), (2, "b")], True, "not applied"),
        ([(1, "a"), (2, "b"), (3, "deleted")], True, "cannot be detected"),
        ([(1, "before its update"), (2, "b"), (3, "deleted")], True, "cannot be detected"),
        ([(1, "a")], False, "does not explain all"),
        ([(1, "before its update")], False, "does not explain all"),
    ],
)
def test_only_extra_rows_are_allowed_if_only_inserts_are_published(
    lake: Lake, rows: list[tuple[int, str]], ok: bool, said: str
) -> None:  # fmt: skip
    """A delete on the source leaves an extra row in the mirror. An update leaves an extra row and a missing row. A
    mirror with fewer rows than the source has lost rows."""
    lake.script(
        "CREATE TABLE t (id int, note text); INSERT INTO t VALUES (1, 'a'), (2, 'b');"
        "ALTER PUBLICATION p SET (publish = 'insert')",
    )
    lake.write("t", NOTE_SCHEMA, _notes(*rows))
    report = lake.verify()
    assert report.ok is ok
    assert said in (report.tables[0].reason or "")


def test_a_mirror_is_compared_at_the_version_of_the_point(lake: Lake) -> None:
    """A point may name an older version of the mirror."""
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t VALUES (1, 'a')")
    lake.write("t", NOTE_SCHEMA, _notes((1, "a")))
    lake.write("t", NOTE_SCHEMA, _notes((2, "b")))
    settings = Settings(source=lake.conninfo, lake=lake.root)
    for version, ok in ((0, True), (1, False)):
        point = {TableName("public", "t"): version}
        assert verify(settings, lake.catalog(), None, lambda lsn, point=point: Point(lsn, point)).ok is ok  # type: ignore[misc]


# Reports ---------------------------------------------------------------------------------------


def test_a_table_that_the_point_does_not_list_is_reported_as_not_equal(lake: Lake) -> None:
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text)")
    report = lake.verify()
    assert not report.ok
    assert report.tables[0].reason is not None


def test_an_unreadable_mirror_is_reported_and_the_other_mirror_is_compared(lake: Lake) -> None:
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text); CREATE TABLE u (id int PRIMARY KEY, note text)")
    lake.script("INSERT INTO t VALUES (1, 'a'); INSERT INTO u VALUES (1, 'a')")
    for name in ("t", "u"):
        lake.write(name, NOTE_SCHEMA, _notes((1, "a")))
    for file in lake.path("t").glob("*.parquet"):
        file.unlink()
    broken, whole = lake.verify().tables
    assert (broken.verdict, whole.verdict) == (Verdict.FAILED, Verdict.EQUAL)
    assert broken.reason is not None
    assert broken.reason.startswith("mirror public.t: cannot be read")


def test_a_table_that_is_no_longer_published_is_reported_as_not_equal(lake: Lake) -> None:
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text)")
    lake.write("t", NOTE_SCHEMA, [])
    catalog = lake.catalog()
    lake.script("DROP PUBLICATION p; CREATE PUBLICATION p")
    settings = Settings(source=lake.conninfo, lake=lake.root)
    report = verify(settings, catalog, None, lambda lsn: Point(lsn, {TableName("public", "t"): 0}))
    assert not report.ok
    assert report.tables[0].reason is not None
    assert "is no longer published" in report.tables[0].reason


def test_columns_of_the_source_are_read_from_the_snapshot_not_from_the_saved_catalog(lake: Lake) -> None:
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t VALUES (1, 'a')")
    catalog = lake.catalog()
    lake.script("ALTER TABLE t ADD COLUMN more int; UPDATE t SET more = 5")
    lake.write("t", NOTE_SCHEMA.append(pa.field("more", pa.int32())), [{"id": 1, "note": "a", "more": 6}])
    settings = Settings(source=lake.conninfo, lake=lake.root)
    report = verify(settings, catalog, None, lambda lsn: Point(lsn, {TableName("public", "t"): 0}))
    assert report.tables[0].examples == (Example("different", {"id": "1"}, ("more",)),)


def test_an_unknown_table_is_refused(lake: Lake) -> None:
    with pytest.raises(UnknownTable, match=r"public\.nowhere"):
        lake.verify("nowhere")


def test_a_point_that_is_not_at_the_snapshots_lsn_is_refused(lake: Lake) -> None:
    settings = Settings(source=lake.conninfo, lake=lake.root)
    with pytest.raises(LakeError, match="are at 0/1"):
        verify(settings, lake.catalog(), None, lambda lsn: Point(Lsn(1), {}))


# What is not compared, and why -------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("columns", "key"), [(1599, "PRIMARY KEY"), (1599, "")])
def test_the_widest_possible_table_is_compared(lake: Lake, columns: int, key: str) -> None:
    """The comparison must not select each column twice, which would exceed PostgreSQL's limit of columns in a
    SELECT."""
    lake.script(f"CREATE TABLE t (id int {key}, {', '.join(f'c{n} int' for n in range(columns))})")
    lake.script("INSERT INTO t (id, c7) VALUES (1, 70), (2, 71)")
    names = [f"c{n}" for n in range(columns)]
    schema = mirrors.mirror_schema(id=pa.int32(), **dict.fromkeys(names, pa.int32()))
    empty = dict.fromkeys(names, None)
    lake.write("t", schema, [{"id": 1, **empty, "c7": 70}, {"id": 2, **empty, "c7": 9}])
    report = lake.only()
    assert (report.source_rows, report.mirror_rows) == (2, 2)
    if key:
        assert report.examples == (Example("different", {"id": "2"}, ("c7",)),)
    else:
        assert (report.missing, report.extra) == (1, 1)
        assert {(example.kind, example.key["c7"]) for example in report.examples} == {("missing", "71"), ("extra", "9")}


@pytest.mark.parametrize(
    ("ddl", "why"),
    [
        ("DROP TABLE IF EXISTS t", "is no longer published, or was dropped"),
        ("BEGIN; LOCK TABLE t", "is locked by pid"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_and_the_other_table_is_compared(
    lake: Lake, ddl: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE_SECONDS", 0.3)
    report = _beside(lake, ddl, times=2)
    altered, other = report.tables
    assert (altered.verdict, other.verdict, report.exit_code) == (Verdict.NOT_COMPARED, Verdict.EQUAL, 3)
    assert why in (altered.reason or "")


def test_a_table_is_not_compared_if_a_lock_prevents_the_reading_of_its_row_filter(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*asked: Any) -> Any:
        tables, outdated = shown_tables(*asked)
        return {U: tables[U]}, {**outdated, T: CopyBlocked("is locked, so its row filter cannot be read")}

    monkeypatch.setattr(verify_module, "shown_tables", shown)
    report = _beside(lake)
    locked, other = report.tables
    assert (locked.verdict, other.verdict, report.exit_code) == (Verdict.NOT_COMPARED, Verdict.EQUAL, 3)
    assert "row filter" in (locked.reason or "")


@pytest.mark.parametrize(("ddl", "times"), [("TRUNCATE t; INSERT INTO t VALUES (1, 'a')", 2), ("VACUUM FULL t", 1)])
def test_a_table_truncated_or_rewritten_after_the_snapshot_is_compared_under_a_new_snapshot(
    lake: Lake, ddl: str, times: int
) -> None:
    report = _beside(lake, after_snapshot=ddl, times=times)
    altered, other = report.tables
    assert (altered.verdict, other.verdict, report.exit_code) == (Verdict.EQUAL, Verdict.EQUAL, 0)
    assert altered.lsn is not None
    assert other.lsn is not None
    assert altered.lsn > other.lsn, "the altered table must be compared under a later snapshot"


def test_a_table_truncated_during_the_wait_for_the_mirrors_is_compared(lake: Lake) -> None:
    """The first attempt waits for the mirrors and then reads, so it cannot read the truncated table. verify then takes
    a second snapshot, reads this table first, and waits for the mirrors afterwards. Truncates during this wait do not
    matter."""
    report = _beside(lake, "TRUNCATE t; INSERT INTO t VALUES (1, 'a')")
    assert [table.verdict for table in report.tables] == ["equal", "equal"]


def test_a_difference_is_reported_even_if_its_rows_cannot_be_read_again(lake: Lake) -> None:
    report = _beside(lake, "TRUNCATE t")
    altered, _ = report.tables
    assert (altered.verdict, altered.extra, altered.examples, report.exit_code) == ("differs", 1, (), 1)


def test_the_source_is_read_again_if_the_mirror_changed_its_columns_after_the_first_read(lake: Lake) -> None:
    """verify has read the source's rows for a mirror in which the column ``note`` is text. Then this column of the
    mirror becomes an integer."""
    schema = mirrors.mirror_schema(id=pa.int32(), note=pa.int32())
    points = 0

    def on_reach() -> None:
        nonlocal points
        points += 1
        if points == 2:
            shutil.rmtree(lake.path("t"))
            lake.write("t", schema, [{"id": 1, "note": 5}])

    report = _beside(lake, "TRUNCATE t; INSERT INTO t VALUES (1, '5')", on_reach=on_reach)
    assert points == 3, "verify must read the source again for the new columns"
    assert report.tables[0].verdict is Verdict.DIFFERS


def test_a_table_truncated_after_every_snapshot_is_not_compared(lake: Lake) -> None:
    report = _beside(lake, after_snapshot="TRUNCATE t")
    altered, other = report.tables
    assert (altered.verdict, other.verdict, report.ok, report.exit_code) == ("not_compared", "equal", False, 3)
    assert altered.reason == (
        f"was truncated, rewritten, altered or dropped since the snapshot, in {SNAPSHOTS} attempts; "
        "run `pgcdc verify` again"
    )
    assert in_a_sentence(report) == "no table differs; tables could not be compared: public.t"


def test_the_exit_code_is_1_if_one_table_differs_and_another_cannot_be_compared(lake: Lake) -> None:
    report = _beside(lake, after_snapshot="TRUNCATE t", other="wrong")
    altered, other = report.tables
    assert (altered.verdict, other.verdict, report.exit_code) == ("not_compared", "differs", 1)
    assert in_a_sentence(report) == "tables differ: public.u; tables could not be compared: public.t"


def _beside(
    lake: Lake, ddl: str = "", *, after_snapshot: str = "", times: int = 99, other: str = "a",
    on_reach: Callable[[], None] = lambda: None,
) -> VerifyReport:  # fmt: skip
    """Verifies two tables, t and u, of one row each. ``after_snapshot`` is run right after each of the first ``times``
    snapshots. ``ddl`` is run while verify waits for the mirrors to reach the snapshot's LSN. ``other``: the row of u in
    its mirror."""
    lake.script("CREATE TABLE t (id int PRIMARY KEY, note text); CREATE TABLE u (id int PRIMARY KEY, note text)")
    lake.script("INSERT INTO t VALUES (1, 'a'); INSERT INTO u VALUES (1, 'a')")
    lake.write("t", NOTE_SCHEMA, _notes((1, "a")))
    lake.write("u", NOTE_SCHEMA, _notes((1, other)))
    left = times
    with connect(lake.conninfo, options={"search_path": "public"}) as migrating:

        def run(script: str) -> None:
            for statement in script.split("; ") if script and left > 0 else []:
                migrating.execute(statement.encode())

        @contextmanager
        def snapshot() -> Iterator[Snapshot]:
            nonlocal left
            with exported_snapshot(lake.conninfo) as taken:
                run(after_snapshot)
                left -= 1
                yield taken

        def reach(lsn: Lsn) -> Point:
            run(ddl)
            on_reach()
            return Point(lsn, {T: lake.version("t"), U: lake.version("u")})

        settings = Settings(source=lake.conninfo, lake=lake.root)
        return verify(settings, lake.catalog(), None, reach, snapshot=snapshot)


# Mirrors as Spark writes them -----------------------------------------------------------------------

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.long
def test_mirrors_with_deletion_vectors_and_mapped_columns_are_compared(lake: Lake, spark: SparkSession) -> None:
    lake.script(
        'CREATE TABLE t (id int PRIMARY KEY, "a b" text, "c=(d)" int[]);'
        "INSERT INTO t SELECT i, 'text ' || i, ARRAY[i, NULL] FROM generate_series(1, 100) i WHERE i <> 7;"
        "UPDATE t SET \"a b\" = 'new' WHERE id = 8"
    )
    path = f"delta.`{lake.path('t')}`"
    spark.sql(
        f"CREATE TABLE {path} (id INT, `a b` STRING, `c=(d)` ARRAY<INT>, _pgcdc_commit_lsn BIGINT,"
        " _pgcdc_commit_ts TIMESTAMP, _pgcdc_raw MAP<STRING, STRING>) USING delta"
        " TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name')"
    )
    spark.sql(
        f"INSERT INTO {path} SELECT CAST(id AS INT), concat('text ', id), array(CAST(id AS INT), NULL),"
        " 1, NULL, NULL FROM range(1, 101)"
    )
    spark.sql(f"DELETE FROM {path} WHERE id = 7")
    spark.sql(f"UPDATE {path} SET `a b` = 'new' WHERE id = 8")
    assert DeltaTable(str(lake.path("t"))).deletion_vectors().read_all().num_rows > 0
    report = lake.only()
    assert (report.equal, report.source_rows, report.mirror_rows) == (True, 99, 99)
    spark.sql(f"UPDATE {path} SET `c=(d)` = array(9) WHERE id = 9")
    assert lake.only().examples == (Example("different", {"id": "9"}, ("c=(d)",)),)
