"""Table states: the last row of a table is its state, and all stored fields are read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store.local import path_of

TABLE = Table(
    16384,
    TableName("Odd \"Schema'", "Select"),
    (
        Column(1, "größe 🦆", PgType(1700, "numeric", 655366)),
        Column(2, "tags", PgType(1009, "_text", element=PgType(25, "text"))),
    ),
    key=(1,),
)
OTHER = replace(TABLE, oid=16385, name=TableName("public", "t"))


def test_a_lake_without_states_returns_none(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    assert states.all() == {}
    assert states.get(TABLE.name) is None


def test_the_last_row_of_a_table_is_its_state(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    states.set_all([TABLE, OTHER], TableState.COPYING, Lsn(100))
    states.set(TABLE, TableState.CATCHING_UP, Lsn(100))
    states.set(TABLE, TableState.SET_ASIDE, Lsn(1 << 40), "column was dropped")
    again = TableStates(Layout.of(tmp_path)).all()
    assert set(again) == {TABLE.name, OTHER.name}
    row = again[TABLE.name]
    assert (row.state, row.lsn, row.reason) == (TableState.SET_ASIDE, 1 << 40, "column was dropped")
    assert row.table == TABLE
    assert again[OTHER.name].state is TableState.COPYING
    assert again[OTHER.name].table == OTHER


def test_states_that_another_process_wrote_are_read(tmp_path: Path) -> None:
    reader, writer = TableStates(Layout.of(tmp_path)), TableStates(Layout.of(tmp_path))
    writer.set(TABLE, TableState.COPYING, Lsn(1))
    assert reader.get(TABLE.name) is not None
    writer.set(TABLE, TableState.CATCHING_UP, Lsn(1))
    row = reader.get(TABLE.name)
    assert row is not None
    assert row.state is TableState.CATCHING_UP


def test_saving_no_tables_makes_no_commit(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    states.set_all([], TableState.COPYING, Lsn(1))
    assert not path_of(Layout.of(tmp_path).table_states).exists()


def test_pruning_keeps_the_last_row_of_each_table(tmp_path: Path) -> None:
    states = TableStates(Layout.of(tmp_path))
    assert states.prune() == 0
    tables = [TABLE, OTHER]
    states.set_all(tables, TableState.COPYING, Lsn(1))
    states.set(tables[0], TableState.CATCHING_UP, Lsn(2))
    before = states.all()
    assert states.prune() == 1
    assert TableStates(Layout.of(tmp_path)).all() == before
    assert states.prune() == 0
