"""Broken tables in a whole sync: the other tables are applied and published, and a new copy repairs a broken table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgcdc_assets.checks.facts import read_tables
from pgcdc_assets.core.layout import DELTA_LOG, Location, checkpoint_name, commit_name
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import load_catalog
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.deltatables import live_files
from tests.flow.rig import Rig
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark

BROKEN = {
    "file": r"part-.*\.parquet: cannot be read: No such file",
    "folder": r"changes/public/folder.*: Not a directory",
    "copied": r"public/copied.*: Not a directory",
}
"""The names of the broken tables, each with a pattern of the reason that is reported for it."""


def _break(rig: Rig) -> None:
    layout = rig.settings.layout
    for added in live_files(_mirror(rig, "file")):
        (_mirror(rig, "file") / added.path).unlink()
    path_of(layout.changes(_name("folder")).parent).mkdir(parents=True, exist_ok=True)
    path_of(layout.changes(_name("folder"))).write_text("in the way")
    rig.conn.execute('ALTER TABLE mapped RENAME "a b" TO ab')
    _mirror(rig, "copied").write_text("in the way")
    rig.conn.execute("CREATE TABLE copied (id int PRIMARY KEY, v text)")


def _name(table: str) -> TableName:
    return TableName("public", table)


def _mirror(rig: Rig, table: str) -> Path:
    return path_of(rig.settings.layout.mirror(_name(table)))


def test_broken_table_does_not_affect_other_tables(rig: Rig) -> None:
    names = [name for name in BROKEN if name != "copied"]
    for name in names:
        rig.conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)".encode())
        rig.conn.execute(f"INSERT INTO {name} VALUES (1, 'a'), (2, 'b')".encode())
    rig.conn.execute('CREATE TABLE mapped (id int PRIMARY KEY, "a b" text)')
    rig.setup()
    rig.sync()
    _break(rig)
    rig.setup()
    for name in names:
        rig.conn.execute(f"UPDATE {name} SET v = 'changed' WHERE id = 1".encode())
    rig.conn.execute("INSERT INTO mapped VALUES (1, 'a')")
    rig.conn.execute("UPDATE t SET v = 'goes on'")

    report = rig.sync()
    told = {name.name: reason for name, reason in report.set_aside}
    assert told.keys() == BROKEN.keys(), told
    for name, pattern in BROKEN.items():
        assert re.search(pattern, told[name]), told[name]
        assert "Traceback" not in told[name]
    rig.assert_equal("public.t", "public.u", "public.mapped")
    point = ConsistentPoints(rig.settings.layout).newest()
    assert point is not None
    assert set(point.tables) == {_name("t"), _name("u"), _name("mapped")}
    assert point.replay_lsn == report.end
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    facts = {facts.name.name: facts for facts in read_tables(rig.settings.layout, catalog)}
    assert {name for name, one in facts.items() if one.state is TableState.SET_ASIDE} == BROKEN.keys()
    assert all(facts[name].reason == told[name] for name in BROKEN)

    _mirror(rig, "copied").unlink()
    report = rig.engine().sync(Bounds(), copy_anew=[_name(name) for name in BROKEN])
    assert report.set_aside == []
    for name in BROKEN:
        rig.conn.execute(f"INSERT INTO {name} VALUES (3, 'back')".encode())
    assert rig.sync().set_aside == []
    rig.assert_equal("public.t", "public.u", *(f"public.{name}" for name in BROKEN))


UNREADABLE = {
    "first_commit": "its first commit is empty, and rests under the newest point",
    "checkpoint": "its checkpoint is torn, and the commits in front of it are gone",
    "feed_checkpoint": "the same of its change feed",
    "feed_commit": "the first commit of its change feed is empty: a power cut may leave it so, and it is begun anew",
}
"""Tables with a damaged Delta log. Each table is named after its damaged file; the value explains the damage."""


def _tear(rig: Rig, table: str) -> None:
    folder = path_of(rig.settings.layout.changes(_name(table))) if table.startswith("feed") else _mirror(rig, table)
    log, number = folder / DELTA_LOG, DeltaTable(folder).version()
    if table.endswith("commit"):
        (log / commit_name(0)).write_bytes(b"")
        return
    make_checkpoint(Location.of(folder), number)
    (log / checkpoint_name(number)).write_bytes(b"PAR1")
    for old in range(number + 1):
        (log / commit_name(old)).unlink(missing_ok=True)


@pytest.mark.long
def test_unreadable_delta_log_is_moved_aside_by_a_new_copy(rig: Rig) -> None:
    """The operator requests the copy by `pgcdc snapshot TABLE`. Until then, the damaged tables are set aside and the
    other tables continue. Only the table ``feed_commit`` is not set aside, because its feed is begun again. After the
    copy, all damaged tables continue."""
    for name in UNREADABLE:
        rig.conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)".encode())
    rig.setup()
    rig.sync()
    for number in range(2):
        for name in UNREADABLE:
            rig.conn.execute(f"INSERT INTO {name} VALUES ({number}, 'a')".encode())
        assert rig.sync().set_aside == []
    for name in UNREADABLE:
        _tear(rig, name)
        rig.conn.execute(f"UPDATE {name} SET v = 'changed'".encode())
    rig.conn.execute("UPDATE t SET v = 'goes on'")
    told = {name.name: reason for name, reason in rig.sync().set_aside}
    assert told.keys() == UNREADABLE.keys() - {"feed_commit"}, told
    rig.assert_equal()

    assert rig.engine().sync(Bounds(), copy_anew=[_name(name) for name in UNREADABLE]).set_aside == []
    titles = [f"public.{name}" for name in UNREADABLE]
    rig.assert_equal(*titles)
    for name in UNREADABLE:
        rig.conn.execute(f"UPDATE {name} SET v = 'back' WHERE id = 1; DELETE FROM {name} WHERE id = 0".encode())
    assert rig.sync().set_aside == []
    rig.assert_equal("public.t", "public.u", *titles)
    point = ConsistentPoints(rig.settings.layout).newest()
    assert point is not None
    assert {_name(name) for name in UNREADABLE} <= set(point.tables)
