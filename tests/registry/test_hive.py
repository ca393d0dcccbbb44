"""Registers mirrors in a Hive metastore. An entry is the mirror's table in the metastore. The metastore is Hive's own
server, from Spark's jars, with a database in memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryUnreachable
from pgcdc_assets.registry.hive import HiveMetastore
from pgcdc_assets.registry.named import OWNER, NamedTable
from pgcdc_assets.spark.session import SparkOnDemand
from tests.registry.conftest import IDENTITY, mirror
from tests.servers import held_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.long]

ORDERS = TableName("Sales", "Orders")
_READS = """
import json, sys
from pgcdc_assets.spark.session import delta_session
uri, query = sys.argv[1:]
session = delta_session({"spark.sql.catalogImplementation": "hive", "spark.hadoop.hive.metastore.uris": uri,
                         "spark.master": "local[1]", "spark.ui.enabled": "false"})
print(json.dumps([list(row) for row in session.sql(query).collect()]))
"""


@pytest.fixture(scope="module")
def metastore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("metastore"), held_port()
    logging = folder / "log4j2.properties"
    logging.write_text("rootLogger.level = warn\n")
    settings = {
        "javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
        "hive.metastore.schema.verification": "false", "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.warehouse.dir": str(folder / "warehouse"), "hive.log4j.file": str(logging),
    }  # fmt: skip
    opened = [f"--add-opens=java.base/{one}=ALL-UNNAMED" for one in ("java.lang", "java.net", "java.util")]
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    command = [
        "java", "-Xmx512m", f"-Dlog4j.configurationFile={logging}", *opened, "-cp", str(jars),
        "org.apache.hadoop.hive.metastore.HiveMetaStore", "-p", str(port),
        *(word for key, value in settings.items() for word in ("--hiveconf", f"{key}={value}")),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for(lambda: server.poll() is not None or _listens(port), seconds=200, what="the metastore")
        assert server.poll() is None, (folder / "log").read_text()[-2000:]
        yield f"thrift://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with closing(socket.socket()) as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _hive(uri: str, spark: SparkSession, prefix: str) -> HiveMetastore:
    return HiveMetastore(uri, prefix, SparkOnDemand(lambda: spark))


def test_spark_with_a_metastore_reads_the_mirror_by_its_name(
    metastore: str, spark: SparkSession, tmp_path: Path
) -> None:
    with closing(_hive(metastore, spark, "read_")) as hive:
        # This table is not made by `mirror`, because Spark cannot open the tables that `mirror` makes. They have a NOT
        # NULL column, and delta-rs does not declare the table feature that such columns need.
        rows = pa.table({"id": pa.array([1, 2], pa.int32()), "note": ["a", "b"]})
        write_deltalake(str(tmp_path / ORDERS.folder), rows)
        hive.put(NamedTable.of(Layout.of(tmp_path), IDENTITY, ORDERS))
    query = "SELECT count(*), max(note) FROM read_sales.orders"
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(tmp_path / "scratch")}
    asked = subprocess.run(
        [sys.executable, "-c", _READS, metastore, query],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr[asked.stderr.find("Traceback") :][:3000]
    assert json.loads(asked.stdout) == [[2, "b"]]


def test_entry_gets_new_columns_and_is_removed_only_by_the_project_that_made_it(
    metastore: str, spark: SparkSession, tmp_path: Path
) -> None:
    with closing(_hive(metastore, spark, "own_")) as hive:
        table = mirror(tmp_path, ORDERS)
        for one in (table, table, mirror(tmp_path, ORDERS, more=("note",))):
            hive.put(one)
        found = hive._client.getTable("own_sales", "orders")
        assert [one.getName() for one in found.getSd().getCols()] == ["id", "price", "at", "seen", "tags", "note"]
        assert found.getTableType() == "EXTERNAL_TABLE"
        assert found.getParameters()[OWNER] == table.owner
        hive.remove(ORDERS, "somebody else")
        assert hive._client.tableExists("own_sales", "orders")
        for _ in range(2):
            hive.remove(ORDERS, table.owner)
            assert not hive._client.tableExists("own_sales", "orders")
    assert (tmp_path / "Sales" / "Orders" / "_delta_log").is_dir()


def test_metastore_that_does_not_answer_is_reported_as_unreachable(spark: SparkSession) -> None:
    with pytest.raises(RegistryUnreachable, match="does not answer"):
        _hive(f"thrift://127.0.0.1:{held_port()}", spark, "")
