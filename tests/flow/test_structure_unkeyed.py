"""Tables without a key, mirrored as multisets, whose structure changes: their rows follow, as those with a key do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.names import TableName
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from tests.end_to_end.command import wait_for
from tests.fix_postgres import Database
from tests.flow.rig import Rig, following, rig_of

pytestmark = pytest.mark.spark

_MAKE = (
    """CREATE TABLE w (a int, s varchar(20), n numeric(10,2), l text[], r real[], b bytea, f float8, d date,
                        z timestamptz, x text)""",
    "ALTER TABLE w REPLICA IDENTITY FULL",
    """INSERT INTO w SELECT g % 5, 's' || g % 3, CASE g % 4 WHEN 0 THEN 'NaN'::numeric ELSE g % 2 END,
         ARRAY['a,b', NULL, 'c'], ARRAY[0.0, CASE g % 2 WHEN 0 THEN '-0'::real ELSE 0 END], '\\xff00',
         CASE g % 3 WHEN 0 THEN '-0'::float8 ELSE 0 END,
         CASE g % 2 WHEN 0 THEN 'infinity'::date ELSE '2024-02-29' END, '2024-01-01 00:00+02', 'x' || g
       FROM generate_series(1, 40) g""",
    "INSERT INTO w SELECT * FROM w WHERE a < 2",
)  # fmt: skip
_WRITES = (
    "INSERT INTO w (a, s) VALUES (1, 's1'), (1, 's1'), (NULL, NULL)",
    "UPDATE w SET a = a + 1 WHERE ctid IN (SELECT ctid FROM w WHERE a IN (1, 3) ORDER BY w::text LIMIT 4)",
    "DELETE FROM w WHERE ctid IN (SELECT ctid FROM w ORDER BY w::text DESC LIMIT 3)",
    "DELETE FROM w WHERE ctid IN (SELECT min(ctid) FROM w GROUP BY w::text HAVING count(*) > 1)",
    "UPDATE w SET a = a WHERE ctid IN (SELECT ctid FROM w ORDER BY w::text LIMIT 5)",
)
"""What any structure takes that has ``a`` and ``s``. Rows become equal where what told them apart goes."""
_CHANGES = {
    "add": "ALTER TABLE w ADD k int NOT NULL DEFAULT 7, ADD y numeric(5,1) DEFAULT 'NaN', ADD q text",
    "drop": "ALTER TABLE w DROP x, DROP n, DROP l",
    "rename": "ALTER TABLE w RENAME x TO y; ALTER TABLE w RENAME n TO m; ALTER TABLE w RENAME d TO e",
    "swap": "ALTER TABLE w RENAME x TO y; ALTER TABLE w RENAME s TO x; ALTER TABLE w RENAME y TO s",
    "made anew": "ALTER TABLE w DROP d, ADD d date DEFAULT 'infinity'",
    "longer": "ALTER TABLE w ALTER s TYPE text, ALTER n TYPE numeric(14,2)",
}


Way = Literal["rewrite", "metadata"]
_NAMES = {change: f"w_{change.replace(' ', '_')}" for change in _CHANGES}
_ALL = ("public.t", *(f"public.{name}" for name in _NAMES.values()))


@pytest.fixture
def way() -> Way:
    return "rewrite"


@pytest.fixture
def rig(
    way: Way, database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    """With a table for each of the changes."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], batch_seconds=0.1, range_seconds=1,
                        schema_changes=way)  # fmt: skip
    with rig_of(database, spark, settings) as rig:
        _each(rig, *_MAKE)
        setup(settings, database.conninfo)
        rig.setup()
        rig.sync()
        yield rig


def _each(rig: Rig, *statements: str) -> None:
    """On each of the tables, in a transaction of its own."""
    for name in _NAMES.values():
        _on(rig, name, *statements)


def _on(rig: Rig, name: str, *statements: str) -> None:
    rig.commit(*(re.sub(r"\bw\b", name, one) for statement in statements for one in statement.split("; ")))


def _assert_followed(rig: Rig, changes: int | None) -> None:
    """``changes``: as many were reported; where a run was stopped, the mirror itself tells of the last."""
    rig.assert_equal(*_ALL)
    assert len(rig.observer.copies) == len(_ALL) + 1, [one.what for one in rig.observer.structures]
    assert changes is None or [one.copied for one in rig.observer.structures] == [False] * changes


@pytest.mark.parametrize("way", ["rewrite", "metadata"])
def test_rows_before_within_and_behind(rig: Rig) -> None:
    before = Lake(rig.lake).at().lsn
    _each(rig, *_WRITES)
    for change, name in _NAMES.items():
        _on(rig, name, *_WRITES[:2], _CHANGES[change], *_WRITES[1:4])
    _each(rig, *_WRITES)
    rig.sync()
    _assert_followed(rig, len(_NAMES))
    _each(rig, *_WRITES)
    # The second change of each, in the rows' second structure.
    for name in _NAMES.values():
        _on(rig, name, "ALTER TABLE w ADD k2 int DEFAULT 3", _WRITES[1], "ALTER TABLE w DROP r", *_WRITES[1:3])
    _each(rig, *_WRITES)
    rig.sync()
    _assert_followed(rig, 2 * len(_NAMES))
    assert "x" in Lake(rig.lake).at(before).arrow(TableName("public", _NAMES["drop"])).column_names


def test_while_a_run_follows(rig: Rig) -> None:
    with following(rig) as run:
        for change, name in _NAMES.items():
            _each(rig, *_WRITES[:2])
            _on(rig, name, _WRITES[1], _CHANGES[change], _WRITES[2])
            run.join(0.4)
            _on(rig, name, *_WRITES)
    rig.sync()
    _assert_followed(rig, None)


def test_a_key_that_comes_with_a_column_or_its_rows_has_the_table_copied(rig: Rig) -> None:
    _on(rig, "w_add", "ALTER TABLE w ADD k int DEFAULT 7", *_WRITES)
    _on(rig, "w_add", "ALTER TABLE w ADD i serial PRIMARY KEY", "ALTER TABLE w REPLICA IDENTITY DEFAULT")
    _on(rig, "w_add", "UPDATE w SET a = 0 WHERE i < 4", "DELETE FROM w WHERE i = 5")
    for _ in range(2):
        rig.sync()
    rig.assert_equal(*_ALL)
    assert [copy.table.name for copy in rig.observer.copies[len(_ALL) + 1 :]] == ["w_add"]


_APART = (
    "DELETE FROM w WHERE x IS NULL", "DELETE FROM w v USING w o WHERE v.x = o.x AND v.ctid > o.ctid",
)  # fmt: skip
_UNDER_KEY = (
    "UPDATE w SET x = x || '!' WHERE a = 2", "DELETE FROM w WHERE x IN ('new', 'newer', 'newest') OR a = 3",
    "INSERT INTO w (a, s, x) VALUES (1, 's1', 'new'), (1, 's1', 'newer')",
    "UPDATE w SET a = 9, x = 'newest' WHERE x = 'new'", "UPDATE w SET s = 'all'",
)  # fmt: skip


@pytest.mark.parametrize("way", ["rewrite", "metadata"])
def test_a_key_that_comes_is_followed(rig: Rig) -> None:
    """As long as old images are whole until a look has shown it."""
    for name in ("w_add", "w_drop"):
        _on(rig, name, *_WRITES, *_APART)
        _on(rig, name, "ALTER TABLE w ADD PRIMARY KEY (x)")
    _on(rig, "w_drop", *_UNDER_KEY)
    rig.sync()
    _assert_followed(rig, 2)
    for name in ("w_add", "w_drop"):
        _on(rig, name, *_UNDER_KEY)
    rig.sync()
    for name in ("w_add", "w_drop"):
        _on(rig, name, "ALTER TABLE w REPLICA IDENTITY DEFAULT", *_UNDER_KEY[:1], "DELETE FROM w WHERE x = 'newer'")
        _on(rig, name, "ALTER TABLE w ADD k int DEFAULT 7", "UPDATE w SET x = 'm', k = 8 WHERE x = 'newest'")
    rig.sync()
    _assert_followed(rig, 4)
    held = Lake(rig.lake).at().arrow("public.w_add").column_names
    assert not [name for name in held if name in ("_pgcdc_row", "_pgcdc_hash")]


def test_rows_that_a_key_does_not_tell_apart_in_the_transaction_that_makes_it(rig: Rig) -> None:
    _on(rig, "w_add", "INSERT INTO w (a, x) VALUES (7, 'same'), (7, 'same')", *_APART[:1])
    _on(rig, "w_add", *_APART, "ALTER TABLE w ADD PRIMARY KEY (x)", "ALTER TABLE w REPLICA IDENTITY DEFAULT",
        *_UNDER_KEY)  # fmt: skip
    for _ in range(2):
        rig.sync()
    rig.assert_equal(*_ALL)
    assert [copy.table.name for copy in rig.observer.copies[len(_ALL) + 1 :]] == ["w_add"]


def test_a_key_that_comes_and_goes_while_a_run_follows(rig: Rig) -> None:
    with following(rig) as run:
        for number in range(3):
            _on(rig, "w_add", *_WRITES, *_APART, "ALTER TABLE w ADD PRIMARY KEY (x)")
            _on(rig, "w_add", *_UNDER_KEY[1:])
            run.join(number * 0.7)
            _on(rig, "w_add", "ALTER TABLE w DROP CONSTRAINT w_add_pkey", "ALTER TABLE w ALTER x DROP NOT NULL")
            _on(rig, "w_add", *_WRITES)
            run.join(number * 0.7)
    for _ in range(2):
        rig.sync()
    rig.assert_equal(*_ALL)


_DROP_KEY = ("ALTER TABLE w DROP CONSTRAINT w_add_pkey", "ALTER TABLE w ALTER x DROP NOT NULL")


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_key_that_is_made_anew_after_rows_that_it_does_not_tell_apart(rig: Rig, looks: int) -> None:
    """None of them is there any more when it comes back, and no look has shown it gone. ``looks``: that showed the
    first one; the second has the mirror go on under it."""
    _on(rig, "w_add", *_WRITES, *_APART, "ALTER TABLE w ADD PRIMARY KEY (x)")
    for _ in range(looks):
        rig.sync()
        _on(rig, "w_add", "UPDATE w SET s = 'all' WHERE a < 3")
    _on(rig, "w_add", *_DROP_KEY)
    _on(
        rig,
        "w_add",
        "INSERT INTO w SELECT * FROM w",
        "UPDATE w SET a = 12 WHERE ctid IN (SELECT max(ctid) FROM w GROUP BY x)",
    )
    _on(rig, "w_add", "DELETE FROM w WHERE a <> 12", "ALTER TABLE w ADD PRIMARY KEY (x)")
    for _ in range(3):
        rig.sync()
        _on(rig, "w_add", "UPDATE w SET s = s || '.' WHERE a = 12")
    rig.sync()
    rig.assert_equal(*_ALL)
    assert [copy.table.name for copy in rig.observer.copies[len(_ALL) + 1 :]] in ([], ["w_add"])


@pytest.mark.parametrize("made", ["again", "not again"])
def test_a_key_that_goes_beside_a_run_and_rows_without_it(rig: Rig, made: str) -> None:
    """Such a row is met before a look has shown that the key went: the table is copied, and waits for nobody."""
    _on(rig, "w_add", *_WRITES, *_APART, "ALTER TABLE w ADD PRIMARY KEY (x)")
    for _ in range(2):
        rig.sync()
        _on(rig, "w_add", "UPDATE w SET s = 'all' WHERE a < 3")
    rig.sync()
    with following(rig) as run:
        wait_for(rig.streaming, what="the stream")
        _on(rig, "w_add", *_DROP_KEY)
        _on(rig, "w_add", "INSERT INTO w (a) VALUES (77)")
        if made == "again":
            _on(rig, "w_add", *_APART[:1], "ALTER TABLE w ADD PRIMARY KEY (x)")
        run.join(2)
    for _ in range(2):
        rig.sync()
    rig.assert_equal(*_ALL)
    assert [copy.table.name for copy in rig.observer.copies[len(_ALL) + 1 :]] == ["w_add"]


def test_columns_that_are_kept_tell_no_rows_apart(rig: Rig) -> None:
    rig.settings = rig.settings.model_copy(update={"dropped_columns": "keep"})
    for column in "xd":
        anew = f"ALTER TABLE w ADD {column} int DEFAULT 3"
        _on(rig, "w_add", *_WRITES, f"ALTER TABLE w DROP {column}", *_WRITES[:3], anew, *_WRITES)
        _on(rig, "w_add", "ALTER TABLE w DROP r", *_WRITES)
        rig.sync()
        _on(rig, "w_add", "ALTER TABLE w ADD r real", *_WRITES)
        rig.sync()
    held = Lake(rig.lake).at().arrow("public.w_add")
    names = ["a", "s", "f", "x", "d", "r"]
    rows = rig.conn.execute(f"SELECT {', '.join(names)} FROM w_add".encode()).fetchall()
    assert Counter(zip(*(held[name].to_pylist() for name in names), strict=True)) == Counter(rows)
    assert len(rig.observer.copies) == len(_ALL) + 1
    assert {one.copied for one in rig.observer.structures} == {False}


def test_a_column_without_a_value_is_no_reason_for_points(rig: Rig) -> None:
    """It comes with its first row: for it alone the files are not written anew. Meanwhile nothing is owed."""
    rig.commit("ALTER TABLE w_drop ADD unset int")
    rig.sync()
    before = len(ConsistentPoints(rig.settings.layout).all())
    with following(rig) as run:
        # Several looks, each of which finds the source at another position.
        for _ in range(8):
            rig.conn.execute("CREATE TEMP TABLE other (a int); DROP TABLE other")
            run.join(rig.settings.range_seconds / 2)
    assert len(ConsistentPoints(rig.settings.layout).all()) - before <= 1
    rig.commit("UPDATE w_drop SET unset = 3 WHERE unset IS NULL")
    rig.sync()
    rig.assert_equal(*_ALL)
