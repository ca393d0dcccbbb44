"""Tables without a key whose structure changes, and tables whose key changes: they are copied again automatically."""

from __future__ import annotations

import re

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.names import TableName
from tests.flow.rig import Rig, following
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

_MAKE = (
    "CREATE TABLE w (a int, s varchar(20), x text)",
    "ALTER TABLE w REPLICA IDENTITY FULL",
    "INSERT INTO w SELECT g % 5, 's' || g % 3, 'x' || g FROM generate_series(1, 40) g",
    "INSERT INTO w SELECT * FROM w WHERE a < 2",
)
_WRITES = (
    "INSERT INTO w (a, s) VALUES (1, 's1'), (1, 's1'), (NULL, NULL)",
    "UPDATE w SET a = a + 1 WHERE ctid IN (SELECT ctid FROM w WHERE a IN (1, 3) ORDER BY w::text LIMIT 4)",
    "DELETE FROM w WHERE ctid IN (SELECT ctid FROM w ORDER BY w::text DESC LIMIT 3)",
    "DELETE FROM w WHERE ctid IN (SELECT min(ctid) FROM w GROUP BY w::text HAVING count(*) > 1)",
)
"""Statements that work with every structure that has ``a`` and ``s``."""
_APART = ("DELETE FROM w WHERE x IS NULL", "DELETE FROM w v USING w o WHERE v.x = o.x AND v.ctid > o.ctid")
_CHANGES = {
    "w_null": ("ALTER TABLE w ADD q text",),
    "w_add": ("ALTER TABLE w ADD k int NOT NULL DEFAULT 7",),
    "w_drop": ("ALTER TABLE w DROP x",),
    "w_swap": ("ALTER TABLE w RENAME x TO y", "ALTER TABLE w RENAME s TO x", "ALTER TABLE w RENAME y TO s"),
    "w_key": (*_APART, "ALTER TABLE w ADD PRIMARY KEY (x)"),
    "w_serial": ("ALTER TABLE w ADD i serial PRIMARY KEY", "ALTER TABLE w REPLICA IDENTITY DEFAULT"),
}
"""Schema changes by table."""
_ALL = ("public.t", *(f"public.{name}" for name in _CHANGES))


@pytest.fixture
def rig(rig: Rig) -> Rig:
    for name in _CHANGES:
        _on(rig, name, *_MAKE)
    rig.started(batch_seconds=0.1, range_seconds=1)
    rig.observer.copies.clear()
    return rig


def _on(rig: Rig, name: str, *statements: str) -> None:
    """Run the statements in one transaction."""
    rig.commit(*(re.sub(r"\bw\b", name, statement) for statement in statements))


def _copied(rig: Rig) -> list[str]:
    return sorted(copy.table.name for copy in rig.observer.copies)


@pytest.mark.long
def test_schema_change_of_a_table_without_a_key_causes_a_copy(rig: Rig) -> None:
    """With rows before the change, within its transaction and after it."""
    before = Lake(rig.lake).at().lsn
    rig.commit("UPDATE u SET v = 1 WHERE a = 1")
    rig.sync()
    for name, change in _CHANGES.items():
        _on(rig, name, *_WRITES)
        _on(rig, name, *_WRITES[:2], *change, *_WRITES[2:3])
        _on(rig, name, *_WRITES[1:3])
    for _ in range(2):
        rig.sync()
    rig.assert_equal(*_ALL)
    assert _copied(rig) == sorted(_CHANGES)
    assert all(change.copied for change in rig.observer.structures)
    old = Lake(rig.lake).at(before).arrow(TableName("public", "w_drop"))
    assert "x" in old.column_names, "earlier points show the old columns"


@pytest.mark.long
def test_recreated_key_causes_a_copy(rig: Rig) -> None:
    """In between, the key did not identify rows. At the end, none of those rows is left."""
    _on(rig, "w_key", *_APART, "ALTER TABLE w ADD PRIMARY KEY (x)")
    for _ in range(2):
        rig.sync()
    rig.observer.copies.clear()
    _on(rig, "w_key", "ALTER TABLE w DROP CONSTRAINT w_key_pkey", "ALTER TABLE w ALTER x DROP NOT NULL")
    _on(rig, "w_key", "INSERT INTO w SELECT * FROM w",
        "UPDATE w SET a = 12 WHERE ctid IN (SELECT max(ctid) FROM w GROUP BY x)")  # fmt: skip
    _on(rig, "w_key", "DELETE FROM w WHERE a <> 12", "ALTER TABLE w ADD PRIMARY KEY (x)")
    for _ in range(2):
        rig.sync()
        _on(rig, "w_key", "UPDATE w SET s = s || '.' WHERE a = 12")
    rig.sync()
    rig.assert_equal(*_ALL)
    assert _copied(rig) == ["w_key"]


@pytest.mark.long
def test_dropped_key_causes_a_copy_while_a_run_follows(rig: Rig) -> None:
    """A row without a key value may come before the catalog check. The table waits for its copy, and no point lists
    it."""
    _on(rig, "w_key", *_APART, "ALTER TABLE w ADD PRIMARY KEY (x)")
    for _ in range(2):
        rig.sync()
    rig.observer.copies.clear()
    with following(rig) as run:
        wait_for(rig.streaming, what="the stream")
        _on(rig, "w_key", "ALTER TABLE w DROP CONSTRAINT w_key_pkey", "ALTER TABLE w ALTER x DROP NOT NULL")
        _on(rig, "w_key", "INSERT INTO w (a) VALUES (77)")
        run.join(2)
    for _ in range(2):
        rig.sync()
    rig.assert_equal(*_ALL)
    assert _copied(rig) == ["w_key"]
