"""The SQL of an undo, as text. ``test_undo.py`` runs it on a server."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.core.catalog import Column, PgType
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, UsageError
from pgcdc_assets.lake.sqltext import equals, literal, table_identifier, value_text
from tests.lake.onetable import DELETE, INSERT, INT, NAME, TAGS, TEXT, TIME, UPDATE, OneTable, T


@pytest.mark.parametrize(
    ("text", "written"),
    [("a", "'a'"), ("", "''"), ("it's", "'it''s'"), ("a\\b", "E'a\\\\b'"), ("\\'", "E'\\\\'''"), (None, "NULL"),
     ("$undo$", "'$undo$'"), ("a\nb", "'a\nb'")],
)  # fmt: skip
def test_a_literal_means_the_same_for_any_setting_of_the_session(text: str | None, written: str) -> None:
    assert literal(text) == written


def test_identifiers_are_always_quoted() -> None:
    assert table_identifier(TableName("Odd schema", "select")) == '"Odd schema"."select"'


BOXES = PgType(1020, "_box", element=PgType(603, "box", delimiter=";"))


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, PgType(16, "bool"), "true"), (-5, INT, "-5"), (0.1, PgType(701, "float8"), "0.1"),
        (float("nan"), PgType(701, "float8"), "nan"), (float("-inf"), PgType(701, "float8"), "-inf"),
        (Decimal("1E+3"), PgType(1700, "numeric"), "1000"), (b"\x00\xff", PgType(17, "bytea"), "\\x00ff"),
        (date(33, 1, 2), PgType(1082, "date"), "0033-01-02"),
        (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), TIME, "2026-01-02 03:04:05.000006+00:00"),
        (["a", "", "NULL", None, 'q"\\', "x y", "é;"], TAGS, '{a,"","NULL",NULL,"q\\"\\\\","x y",é;}'),
        (["(1,1),(0,0)", None], BOXES, "{(1,1),(0,0);NULL}"), ([], TAGS, "{}"),
        (["a,b"], PgType(1, "d", base=TAGS), '{"a,b"}'),
    ],
)  # fmt: skip
def test_a_value_is_written_as_its_type_reads_it(value: Any, kind: PgType, text: str) -> None:
    assert value_text(value, kind) == text


def test_a_value_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LakeError, match="no SQL can be written"):
        value_text({}, INT)


def test_conditions_are_exact() -> None:
    assert equals("a", None, pa.int32()) == 'pg_catalog.num_nulls("a") = 1'
    assert equals("a", "5", pa.int32()) == "\"a\" = '5'"
    assert equals("a", "-0.0", pa.float64()).endswith("= '-0' COLLATE pg_catalog.\"C\"")
    text = 'pg_catalog.num_nulls("a") = 0 AND pg_catalog.format(\'%s\', "a") = \'x\' COLLATE pg_catalog."C"'
    assert equals("a", "x", pa.string()) == text
    assert equals("a", "x", pa.string(), indexed=True) == f"\"a\" = 'x' AND {text}"


def statements(sql: str) -> list[str]:
    found = [line.strip() for line in sql.splitlines()]
    return [line for line in found if line.startswith(("UPDATE", "INSERT", "DELETE"))]


T_SQL = '"public"."t"'


def found(**values: str) -> str:
    """The condition for a row with these values, of which all but the id are compared as text."""
    names = [column.name for column in T.columns]
    return " AND ".join(equals(name, values.get(name), pa.int32() if name == "id" else pa.string()) for name in names)


def test_undo_of_a_range_reverts_each_row_and_names_its_present_values(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "it's"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE", "n": "NaN"}), (DELETE, {"id": "2"}), (INSERT, {"id": "3"}))
    sql = at.lake.undo(NAME, 100, 200)
    deleted, updated, inserted = statements(sql)
    assert deleted == f"DELETE FROM {T_SQL} WHERE {found(id='3')};"
    assert updated == f'UPDATE {T_SQL} SET "v" = \'one\', "n" = NULL WHERE {found(id="1", v="ONE", n="NaN")};'
    assert inserted == (
        f'INSERT INTO {T_SQL} ("id", "v", "n", "at", "tags") OVERRIDING SYSTEM VALUE '
        f"SELECT '2', 'it''s', NULL, NULL, NULL WHERE NOT EXISTS (SELECT FROM {T_SQL} WHERE \"id\" = '2');"
    )
    assert sql.startswith("DO $undo$\n")
    assert sql.count("GET DIAGNOSTICS") == 3
    assert at.lake.undo(NAME, 100, 100) == ""
    assert statements(at.lake.undo(NAME, 100, key=3)) == statements(sql)[:1]
    assert at.lake.undo(NAME, 100, key={"id": 9}) == ""


def test_the_block_is_quoted_by_a_tag_that_no_value_holds(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "$undo$; DROP TABLE t; $undo1$"}])
    at.turn(200, (DELETE, {"id": "1"}))
    assert at.lake.undo(NAME, 100).startswith("DO $undo2$\n")


def test_undo_of_one_transaction_leaves_the_changes_of_others(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), publish=False)
    at.turn(300, (UPDATE, {"id": "2", "v": "TWO"}))
    (only,) = statements(at.lake.undo(NAME, xid=299))
    assert "\"v\" = 'two' WHERE \"id\" = '2'" in only
    assert at.lake.undo(NAME, commit_lsn=299) == at.lake.undo(NAME, xid=299) == at.lake.undo(NAME, xid=(3 << 32) + 299)
    before = at.lake.undo(NAME, xid=299)
    at.turn(400, (UPDATE, {"id": "2", "v": "later"}))
    assert at.lake.undo(NAME, xid=299) == before, "the nearest point above the transaction decides"
    (only,) = statements(at.lake.undo(NAME, commit_lsn="0/C7"))
    assert "\"v\" = 'one' WHERE \"id\" = '1'" in only


def test_a_transaction_whose_rows_another_one_changed_between_the_points_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}), publish=False)
    at.turn(300, (UPDATE, {"id": "1", "v": "b"}))
    with pytest.raises(LakeError, match=r"same rows by other transactions.*0/64 and 0/12C.*undo the range"):
        at.lake.undo(NAME, commit_lsn=299)
    for unknown in ({"xid": 7}, {"commit_lsn": 150}):
        with pytest.raises(LakeError, match="contains no change"):
            at.lake.undo(NAME, **unknown)
    with pytest.raises(LakeError, match="no consistent point that holds this transaction"):
        at.lake.undo(NAME, commit_lsn=300)


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    with pytest.raises(UsageError, match="undo needs"):
        at.lake.undo(NAME)
    with pytest.raises(UsageError, match="takes a range with or without a key, or a transaction"):
        at.lake.undo(NAME, 100, xid=5)


def test_a_table_that_has_other_columns_now_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (DELETE, {"id": "1"}))
    at.alter(replace(T, columns=(*T.columns, Column(6, "more", TEXT))))
    with pytest.raises(LakeError, match="has other columns now"):
        at.lake.undo(NAME, 100)


def test_composite_keys_are_compared_as_text(tmp_path: Path) -> None:
    """PostgreSQL cannot compare a composite value with a literal."""
    place = PgType(20000, "place", family="c")
    columns = tuple(
        replace(column, type=PgType(1, "d", base=place)) if column.name == "v" else column for column in T.columns
    )
    at = OneTable(tmp_path, [{"id": "1", "v": "(,)"}], replace(T, columns=columns, key=(1, 2)))
    at.turn(200, (DELETE, {"id": "1", "v": "(,)"}))
    (insert,) = statements(at.lake.undo(NAME, 100))
    assert "\"id\" = '1' AND " + equals("v", "(,)", pa.string()) in insert


def test_generated_columns_are_not_written(tmp_path: Path) -> None:
    columns = tuple(replace(column, generated="s") if column.name == "v" else column for column in T.columns)
    at = OneTable(tmp_path, [{"id": "1", "v": "x"}], replace(T, columns=columns))
    at.turn(200, (DELETE, {"id": "1"}))
    (insert,) = statements(at.lake.undo(NAME, 100))
    assert '"v"' not in insert
