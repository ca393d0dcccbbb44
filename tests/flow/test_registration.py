"""A sync registers its mirrors in a catalog. A catalog that is down does not stop it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from deltalake import DeltaTable

from pgcdc_assets.checks.status import status
from tests.flow.rig import Rig, U, following
from tests.ports import held_port
from tests.registry.unity import Served, unity_server
from tests.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture
def unity() -> Iterator[Served]:
    with unity_server() as served:
        yield served


def _register(rig: Rig, url: str) -> Rig:
    rig.settings = rig.settings.model_copy(update={"registry": {"unity": url, "catalog": "shop"}, "batch_seconds": 0.1})
    return rig


def _columns(unity: Served, name: str) -> list[str] | None:
    """The names of the entry's columns, without the mirror's own columns."""
    found = unity.table(name)
    return None if found is None else [
        one["name"] for one in found["columns"] if not one["name"].startswith("_pgcdc")
    ]  # fmt: skip


def _warnings(rig: Rig) -> list[str]:
    return [f"{one.thing} {one.what}" for one in status(rig.settings).problems if "not up to date" in one.what]


def test_sync_registers_tables_and_only_changes_of_structure_ask_again(rig: Rig, unity: Served) -> None:
    """A new column, a dropped table and a deleted mirror each change the catalog. Changed rows send no request."""
    _register(rig, unity.url).started()
    assert _columns(unity, "shop.public.t") == ["id", "v", "big"]
    found = unity.table("shop.public.u")
    assert found is not None
    assert found["storage_location"] == rig.settings.layout.mirror(U).uri

    before = len(unity.requests)
    rig.conn.execute("UPDATE t SET v = 'w' WHERE id = 1")
    rig.sync()
    assert len(unity.requests) == before

    rig.conn.execute("ALTER TABLE t ADD note text")
    rig.conn.execute("INSERT INTO t (id, note) VALUES (100, 'n')")
    rig.sync()
    assert _columns(unity, "shop.public.t") == ["id", "v", "big", "note"]

    rig.conn.execute("DROP TABLE u")
    rig.sync()
    assert unity.table("shop.public.u") is not None
    rig.engine().forget([U])
    assert unity.table("shop.public.u") is None
    assert not _warnings(rig)


def test_catalog_that_is_down_is_a_warning_until_it_answers(rig: Rig, unity: Served) -> None:
    _register(rig, f"http://127.0.0.1:{held_port()}").started()
    rig.assert_equal()
    assert any("registry is not up to date: Unity Catalog" in one for one in _warnings(rig))
    _register(rig, unity.url).sync()
    assert _columns(unity, "shop.public.t") == ["id", "v", "big"]
    assert not _warnings(rig)


def test_follow_mode_goes_on_while_the_catalog_hangs(rig: Rig, unity: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is not answered holds up no turn."""
    asked, answer = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        asked.set()
        answer.wait(60)

    monkeypatch.setattr("pgcdc_assets.registry.unity.UnityCatalog.put", hang)
    _register(rig, unity.url).setup()
    with following(rig):
        assert asked.wait(120)
        points = rig.lake / "_pgcdc" / "consistent_points"
        version = DeltaTable(points).version()
        rig.conn.execute("UPDATE t SET v = 'w'")
        wait_for(lambda: DeltaTable(points).version() > version, what="a point while the catalog hangs", seconds=60)
        answer.set()


def test_polars_reads_a_registered_table_by_its_name(rig: Rig, unity: Served) -> None:
    polars = pytest.importorskip("polars")
    _register(rig, unity.url).started()
    catalog = polars.Catalog(unity.url, require_https=False)
    info = catalog.get_table_info("shop", "public", "u")
    frame = polars.scan_delta(info.storage_location).collect()
    assert frame.height == 50
    assert [column.name for column in info.columns] == frame.columns
