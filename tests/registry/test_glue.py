"""Registers mirrors in the Glue Data Catalog, which moto simulates. An entry is the mirror's table in the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryRefused, RegistryUnreachable
from pgcdc_assets.registry.glue import Glue
from pgcdc_assets.registry.named import OWNER
from tests.registry.conftest import mirror

ORDERS = TableName("Sales", "Orders")
REGION = "eu-central-1"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        yield boto3.client("glue", region_name=REGION)


def _table(client: Any) -> dict[str, Any]:
    return dict(client.get_table(DatabaseName="shop_sales", Name="orders")["Table"])


def test_entry_has_what_athena_and_spark_need_to_read_a_delta_table(client: Any, tmp_path: Path) -> None:
    table = mirror(tmp_path, ORDERS)
    Glue(REGION, "shop_").put(table)
    found = _table(client)
    storage = found["StorageDescriptor"]
    assert found["Parameters"]["table_type"] == "DELTA"
    assert found["Parameters"]["spark.sql.sources.provider"] == "delta"
    assert found["TableType"] == "EXTERNAL_TABLE"
    assert found["Description"] == "all orders"
    assert storage["Location"] == storage["SerdeInfo"]["Parameters"]["path"] == table.location.uri
    types = {one["Name"]: one["Type"] for one in storage["Columns"]}
    assert types == {
        "id": "bigint", "price": "decimal(10,2)", "at": "timestamp", "seen": "timestamp", "tags": "array<int>",
    }  # fmt: skip


def test_entry_is_written_again_only_if_the_mirror_has_changed(client: Any, tmp_path: Path) -> None:
    glue = Glue(REGION, "shop_")
    for more, versions in ((), 1), ((), 1), (("note",), 2):
        glue.put(mirror(tmp_path, ORDERS, more=more))
        found = client.get_table_versions(DatabaseName="shop_sales", TableName="orders")
        assert len(found["TableVersions"]) == versions
    assert _table(client)["StorageDescriptor"]["Columns"][-1]["Name"] == "note"


def test_names_that_differ_in_case_only_do_not_share_an_entry(client: Any, tmp_path: Path) -> None:
    glue = Glue(REGION, "shop_")
    glue.put(mirror(tmp_path, ORDERS))
    with pytest.raises(RegistryRefused, match=r"the name shop_sales.orders is taken"):
        glue.put(mirror(tmp_path, TableName("Sales", "orders")))
    assert _table(client)["Parameters"][OWNER] == 'pgcdc/7/shop/s/"Sales"."Orders"'


def test_only_an_entry_of_the_same_owner_is_removed(client: Any, tmp_path: Path) -> None:
    glue, table = Glue(REGION, "shop_"), mirror(tmp_path, ORDERS)
    glue.put(table)
    glue.remove(ORDERS, "somebody else")
    assert _table(client)
    for _ in range(2):
        glue.remove(ORDERS, table.owner)
        with pytest.raises(ClientError, match="EntityNotFound"):
            _table(client)


@pytest.mark.parametrize(
    ("error", "kind", "what"),
    [
        (ClientError({"Error": {"Code": "AccessDeniedException"}}, "GetTable"), RegistryRefused, "AccessDenied"),
        (ClientError({"Error": {"Code": "ExpiredTokenException"}}, "GetTable"), RegistryUnreachable, "ExpiredToken"),
        (EndpointConnectionError(endpoint_url="https://glue"), RegistryUnreachable, "EndpointConnectionError"),
    ],
)
def test_error_shows_whether_one_table_is_refused_or_the_registry_is_unreachable(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], what: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", fail)
    with pytest.raises(kind, match=what):
        Glue(REGION, "").put(mirror(tmp_path, ORDERS))
