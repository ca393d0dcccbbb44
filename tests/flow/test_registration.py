"""A sync registers its mirrors in a catalog of query engines, here Unity Catalog."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgcdc_assets.checks.status import status
from tests.flow.rig import Rig, U
from tests.registry.unity import Served, unity_server

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


def test_sync_registers_mirrors_and_later_sends_requests_only_for_structure_changes(rig: Rig, unity: Served) -> None:
    """A new column changes the table's entry. The entry of a dropped table is removed when `forget` deletes its
    mirror."""
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
