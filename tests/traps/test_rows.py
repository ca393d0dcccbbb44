"""Traps (known difficult cases) of values, keys and transactions, run together with whole syncs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import merged
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import NotRepairable
from tests.flow.rig import Rig
from tests.traps.rows import OFTEN, TRAPS
from tests.traps.scenario import Played, Trap, empty_rig, play

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def some(
    server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:  # fmt: skip
    with empty_rig(server, spark, tmp_path_factory.mktemp("rows")) as rig:
        yield play(rig, [trap for trap in TRAPS if trap.name in OFTEN], together=True)


@pytest.fixture(scope="module", params=[True, False], ids=["all steps in one turn", "one turn per step"])
def everything(
    request: pytest.FixtureRequest, server: EmbeddedServer, spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Played]:  # fmt: skip
    with empty_rig(server, spark, tmp_path_factory.mktemp("rows")) as rig:
        yield play(rig, TRAPS, together=request.param)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap.name in OFTEN], ids=lambda trap: trap.name)
def test_mirror_equals_the_source_after_the_trap(some: Played, trap: Trap) -> None:
    some.assert_equal(trap)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_mirror_equals_the_source_after_every_trap(everything: Played, trap: Trap) -> None:
    everything.assert_equal(trap)


# Repairs of mirrors that a different engine damaged -------------------------------------------------

T, BAG = TableName("public", "t"), TableName("public", "bag")


@pytest.fixture(scope="module")
def rig(server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A project with a table t of twenty rows, and three ranges: the first range changes the rows with keys 1 to 3, the
    second deletes 4 to 6, the third inserts 21 to 23."""
    with empty_rig(server, spark, tmp_path_factory.mktemp("repair")) as made:
        made.conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE bag (v int); "
                          "ALTER TABLE bag REPLICA IDENTITY FULL; INSERT INTO bag VALUES (1), (1); "
                          "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 20) g")  # fmt: skip
        made.setup()
        made.sync()
        changed = "UPDATE t SET v = 'new' WHERE id <= 3; UPDATE bag SET v = 2"
        added = "INSERT INTO t SELECT g, 'v' || g FROM generate_series(21, 23) g"
        for change in (changed, "DELETE FROM t WHERE id IN (4, 5, 6)", added):
            made.conn.execute(change.encode())
            made.sync()
        yield made


def _damage(path: Path) -> None:
    """In the mirror, changes the rows with keys 1, 21 and 10, deletes 2 and 22, and inserts 4 and 99."""
    table = DeltaTable(path)
    rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())
    # Replace Arrow's view types by the plain types of the table's schema, because Arrow cannot filter view types.
    rows = rows.cast(pa.schema([field.with_type(_plain(field.type)) for field in rows.schema]))
    rows = rows.filter(pc.invert(pc.is_in(rows["id"], pa.array([2, 22], pa.int32()))))
    other = pc.if_else(pc.is_in(rows["id"], pa.array([1, 21, 10], pa.int32())), "damaged", rows["v"])
    place = rows.schema.get_field_index("v")
    rows = rows.set_column(place, "v", other)
    more = rows.slice(0, 2).set_column(0, "id", pa.array([4, 99], pa.int32()))
    write_deltalake(table, pa.concat_tables([rows, more]), mode="overwrite")


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_map(type_):
        return pa.map_(pa.string(), pa.string())
    return pa.string() if type_ == pa.string_view() else type_


def _differing(rig: Rig) -> set[int]:
    """The keys for which the mirror of t and the table t in the source have different rows."""
    mirror = QueryBuilder().register("t", DeltaTable(rig.lake / "public/t"))
    rows = pa.table(mirror.execute("SELECT id, v FROM t").read_all())
    here = {(row["id"], row["v"]) for row in rows.to_pylist()}
    there = set(rig.conn.execute("SELECT id, v FROM t").fetchall())
    return {key for key, _ in here ^ there}


def test_repair_of_a_range_restores_exactly_the_rows_that_changed_in_this_range(rig: Rig) -> None:
    changed, removed, added = (report.span for report in rig.observer.ranges)
    _damage(rig.lake / "public/t")
    assert _differing(rig) == {1, 2, 4, 10, 21, 22, 99}
    rig.engine().repair(T, changed)
    assert _differing(rig) == {4, 10, 21, 22, 99}
    rig.engine().repair(T, added)
    assert _differing(rig) == {4, 10, 99}
    rig.engine().repair(T, removed)
    # The rows with these keys have not changed in any of the three ranges, so only a new copy can restore them.
    assert _differing(rig) == {10, 99}
    with pytest.raises(NotRepairable, match=r"has no key.*pgcdc snapshot"):
        rig.engine().repair(BAG, changed)

    # A backfill of all ranges at once, in any order, has the same result. A second backfill changes nothing.
    _damage(rig.lake / "public/t")
    whole = merged([added, changed, removed])
    for _ in range(2):
        rig.engine().apply_range([T], whole)
        assert _differing(rig) == {10, 99}
    rig.engine().transform_range([T, BAG], whole)
    assert rig.engine().check_range(whole).transactions == 3
