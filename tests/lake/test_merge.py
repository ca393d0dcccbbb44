"""The text of a MERGE, clause by clause; and what Delta makes of it."""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.lake.feed import FeedColumn
from pgcdc_assets.lake.merge import KeyedMerge, MultisetMerge, literal, quoted

ID, B = FeedColumn("id", "id", 1, True), FeedColumn("b%20b", "b b", 2, False)
MERGE = KeyedMerge("/lake/s/t", (ID, B))
LACKS = "CASE WHEN s._pgcdc_present THEN CAST(raise_error('the mirror lacks a row that the source changed') AS BIGINT)"


def clause(sql: str, start: str) -> str:
    found = [line for line in sql.splitlines() if line.startswith(start)]
    assert len(found) == 1, f"{len(found)} clauses begin with {start!r}"
    return found[0]


def test_a_plain_merge() -> None:
    sql = MERGE.sql()
    assert sql.splitlines()[:4] == [
        "MERGE INTO delta.`/lake/s/t` AS t",
        "USING (SELECT * FROM pgcdc_source) AS s",
        "ON t.`id` = s.`id`",
        "WHEN MATCHED AND s._pgcdc_op = 'D' THEN DELETE",
    ]
    update = clause(sql, "WHEN MATCHED THEN UPDATE SET")
    assert "t.`id` = s.`id`, t.`b b` = s.`b%20b`" in update
    assert "t._pgcdc_raw = s._pgcdc_raw" in update
    insert = clause(sql, "WHEN NOT MATCHED AND (s._pgcdc_op = 'U' OR s._pgcdc_present) THEN INSERT")
    assert "(_pgcdc_commit_lsn, _pgcdc_commit_ts, _pgcdc_raw, `id`, `b b`) VALUES" in insert


def test_what_the_target_must_hold_is_checked_as_it_is_written() -> None:
    sql = MERGE.sql()
    assert LACKS in clause(sql, "WHEN NOT MATCHED AND")
    holds = "CASE WHEN NOT s._pgcdc_present THEN CAST(raise_error('the mirror holds a row that the source inserted')"
    assert holds in clause(sql, "WHEN MATCHED THEN")


def test_masked_columns_keep_the_target_s_value_and_its_text() -> None:
    update = clause(replace(MERGE, masked=(2,)).sql(), "WHEN MATCHED THEN")
    assert "t.`b b` = CASE WHEN s._pgcdc_masked_2 THEN t.`b b` ELSE s.`b%20b` END" in update
    assert "map_filter(t._pgcdc_raw, (k, v) -> (k = 'b b' AND s._pgcdc_masked_2))" in update
    assert "t.`id` = s.`id`" in update


def test_values_under_another_key_are_looked_up_in_a_fixed_version() -> None:
    using = clause(replace(MERGE, masked=(2,), lookup_version=7).sql(), "USING")
    assert "LEFT JOIN delta.`/lake/s/t` VERSION AS OF 7 AS o ON o.`id` = s._pgcdc_origin.`id`" in using
    assert "CASE WHEN s._pgcdc_origin IS NOT NULL AND s._pgcdc_masked_2 THEN o.`b b` ELSE s.`b%20b` END" in using
    assert "s._pgcdc_masked_2 AND NOT (s._pgcdc_origin IS NOT NULL) AS _pgcdc_masked_2" in using
    assert "raise_error" in using, "a row that is not there must not become a NULL"


def test_keys_that_do_not_fit_are_compared_by_text() -> None:
    on = clause(replace(MERGE, odd_keys=True).sql(), "ON")
    assert on == (
        "ON t.`id` <=> s.`id` AND try_element_at(t._pgcdc_raw, 'id') <=> try_element_at(s._pgcdc_raw, 'id')"
    )


def test_truncated_leaves_are_emptied_of_what_does_not_come_back() -> None:
    sql = replace(MERGE, has_leaf=True, leaves=("public.a", "public.b'")).sql()
    listed = "('public.a', 'public.b\\'')"
    assert clause(sql, "WHEN NOT MATCHED BY SOURCE") == (
        f"WHEN NOT MATCHED BY SOURCE AND t._pgcdc_leaf IN {listed} THEN DELETE"
    )
    assert "t._pgcdc_leaf = s._pgcdc_leaf" in clause(sql, "WHEN MATCHED THEN")
    assert f"NOT s._pgcdc_present AND t._pgcdc_leaf NOT IN {listed}" in clause(sql, "WHEN MATCHED THEN")


def test_rows_without_a_key_match_nothing() -> None:
    assert clause(KeyedMerge("/t", (replace(ID, key=False),)).sql(), "ON") == "ON false"


def test_copies_are_taken_away_by_their_identity() -> None:
    sql = MultisetMerge("/t", (ID, B), 3).sql()
    using = clause(sql, "USING")
    assert "t._pgcdc_hash = r._pgcdc_hash AND t.`id` <=> r.`id` AND t.`b b` <=> r.`b%20b`" in using
    assert "VERSION AS OF 3" in using
    assert "CASE WHEN found < wanted THEN CAST(raise_error(" in using
    assert clause(sql, "ON") == "ON t._pgcdc_row = s._pgcdc_row"


def test_names_and_texts_are_quoted() -> None:
    assert quoted("a`b") == "`a``b`"
    assert literal("it's \\ here") == "'it\\'s \\\\ here'"
