"""Registers mirrors in Unity Catalog. An entry is the mirror's table in the catalog. pgcdc creates, changes and removes
only its own entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryRefused, RegistryUnreachable
from pgcdc_assets.registry.named import OWNER, owner
from pgcdc_assets.registry.unity import TOKEN, UnityCatalog
from tests.registry.conftest import IDENTITY, mirror
from tests.registry.unity import Served
from tests.servers import held_port

ORDERS = TableName("public", "orders")
ENTRY = "shop.public.orders"


def test_entry_has_location_columns_and_comment_of_the_mirror(unity: Served, tmp_path: Path) -> None:
    UnityCatalog(unity.url, "shop").put(mirror(tmp_path, ORDERS))
    found = unity.table(ENTRY)
    assert found is not None
    assert (found["table_type"], found["data_source_format"]) == ("EXTERNAL", "DELTA")
    assert found["storage_location"] == (tmp_path / "public" / "orders").as_uri()
    assert found["comment"] == "all orders"
    assert found["properties"][OWNER] == "pgcdc/7/shop/s/public.orders"
    columns = [(one["name"], one["type_text"], one["type_name"], one["nullable"]) for one in found["columns"]]
    assert columns == [
        ("id", "bigint", "LONG", False),
        ("price", "decimal(10,2)", "DECIMAL", True),
        ("at", "timestamp_ntz", "TIMESTAMP_NTZ", True),
        ("seen", "timestamp", "TIMESTAMP", True),
        ("tags", "array<int>", "ARRAY", True),
    ]
    assert json.loads(found["columns"][1]["type_json"])["type"] == "decimal(10,2)"


def test_the_entry_of_an_unchanged_mirror_stays_the_same(unity: Served, tmp_path: Path) -> None:
    catalog, table = UnityCatalog(unity.url, "shop"), mirror(tmp_path, ORDERS)
    catalog.put(table)
    before = unity.table(ENTRY)
    catalog.put(table)
    assert unity.table(ENTRY) == before


def test_the_entry_is_replaced_if_the_mirror_has_a_new_column(unity: Served, tmp_path: Path) -> None:
    catalog = UnityCatalog(unity.url, "shop")
    catalog.put(mirror(tmp_path, ORDERS))
    catalog.put(mirror(tmp_path, ORDERS, more=("note",)))
    found = unity.table(ENTRY)
    assert found is not None
    assert [one["name"] for one in found["columns"]][-1] == "note"


def test_entry_of_another_owner_is_neither_changed_nor_removed(unity: Served, tmp_path: Path) -> None:
    catalog, table = UnityCatalog(unity.url, "shop"), mirror(tmp_path, ORDERS)
    unity.call("POST", "/schemas", {"name": "public", "catalog_name": "shop"})
    other = {
        "name": "orders", "catalog_name": "shop", "schema_name": "public", "table_type": "EXTERNAL", "columns": [],
        "data_source_format": "DELTA", "storage_location": "file:///elsewhere/orders",
    }  # fmt: skip
    unity.call("POST", "/tables", other)
    with pytest.raises(RegistryRefused, match=r"the name shop.public.orders is taken by a table"):
        catalog.put(table)
    catalog.remove(ORDERS, table.owner)
    found = unity.table(ENTRY)
    assert found is not None
    assert found["storage_location"] == "file:///elsewhere/orders"


def test_own_entry_is_removed_and_removing_it_again_is_no_error(unity: Served, tmp_path: Path) -> None:
    catalog = UnityCatalog(unity.url, "shop")
    catalog.put(mirror(tmp_path, ORDERS))
    for _ in range(2):
        catalog.remove(ORDERS, owner(IDENTITY, ORDERS))
        assert unity.table(ENTRY) is None


def test_error_for_a_missing_catalog_names_the_catalog(unity: Served, tmp_path: Path) -> None:
    with pytest.raises(RegistryUnreachable, match=r"has no catalog nowhere; create it there"):
        UnityCatalog(unity.url, "nowhere").put(mirror(tmp_path, ORDERS))


def test_table_name_that_the_server_refuses_is_an_error_of_this_table_only(unity: Served, tmp_path: Path) -> None:
    with pytest.raises(RegistryRefused, match="INVALID_ARGUMENT"):
        UnityCatalog(unity.url, "shop").put(mirror(tmp_path, TableName("public", "two words")))


def test_server_that_does_not_answer_is_reported_as_unreachable(tmp_path: Path) -> None:
    catalog = UnityCatalog(f"http://127.0.0.1:{held_port()}", "shop")
    with pytest.raises(RegistryUnreachable, match="does not answer: URLError; replication continues"):
        catalog.put(mirror(tmp_path, ORDERS))


def test_token_is_read_from_the_environment_and_appears_in_no_message(
    unity: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unity.real:
        pytest.skip("needs the test's own server")
    monkeypatch.setenv(TOKEN, "hush")
    unity.refuses = 401
    with pytest.raises(RegistryUnreachable) as caught:
        UnityCatalog(unity.url, "shop").put(mirror(tmp_path, ORDERS))
    assert unity.tokens == {"Bearer hush"}
    assert str(caught.value).startswith(
        f"Unity Catalog {unity.url}: answered a GET request with 401 (PERMISSION_DENIED: not yours)"
    )
    assert "hush" not in str(caught.value)
