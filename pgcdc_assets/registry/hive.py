"""Registers mirrors in a Hive metastore, through Hive's own client. This client is among Spark's jars, so it runs in
the JVM of the run's Spark session, and no further package is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError, Py4JJavaError

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryRefused, RegistryUnreachable
from pgcdc_assets.registry.glue import database, table_input
from pgcdc_assets.registry.named import OWNER, NamedTable, refuse_other

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkOnDemand

_MISSING: Final = ("NoSuchObjectException", "UnknownDBException", "InvalidObjectException")
"""Hive's exceptions for a missing table or database. ``createTable`` raises InvalidObjectException for a missing
database."""
_OF_ONE: Final = (*_MISSING, "AlreadyExistsException", "InvalidOperationException", "MetaException")
"""Exceptions of a call that creates or changes something, if they concern only this table. Other tables are then still
registered."""
_SECONDS: Final = "10s"


class HiveMetastore:
    """One metastore. ``uri``: ``thrift://host:port``. ``prefix``: a text put before the schema's name in each
    database's name."""

    def __init__(self, uri: str, prefix: str, session: SparkOnDemand) -> None:
        self._uri, self._prefix = uri, prefix
        self._jvm: Any = session()._jvm
        self._hive: Any = self._jvm.org.apache.hadoop.hive.metastore
        self._client: Any = self._ask(self._connected)

    def put(self, table: NamedTable) -> None:
        base, place = database(self._prefix, table.name), _location(table.location)
        wanted = table_input(table, place)
        found = self._ask(lambda: self._client.getTable(base, wanted["Name"]))
        if found is not None:
            refuse_other(found.getParameters(), table, f"{base}.{wanted['Name']}")
            if self._shown(found) != self._shown(self._java(base, wanted)):
                self._ask(lambda: self._client.alter_table(base, wanted["Name"], self._java(base, wanted)), base)
            return
        if self._ask(lambda: self._client.getDatabase(base)) is None:
            made = self._hive.api.Database(base, "", None, {})
            self._ask(lambda: self._client.createDatabase(made), base)
        self._ask(lambda: self._client.createTable(self._java(base, wanted)), base)

    def remove(self, name: TableName, owner: str) -> None:
        base, entry = database(self._prefix, name), name.name.lower()
        found = self._ask(lambda: self._client.getTable(base, entry))
        if found is not None and found.getParameters().get(OWNER) == owner:
            # The last two arguments mean that Hive does not delete the table's files, and that a missing table is no
            # error.
            self._ask(lambda: self._client.dropTable(base, entry, False, True))

    def close(self) -> None:
        self._ask(lambda: self._client.close())

    def _connected(self) -> Any:
        conf = self._jvm.org.apache.hadoop.hive.conf.HiveConf()
        given = {
            "hive.metastore.uris": self._uri, "hive.metastore.client.socket.timeout": _SECONDS,
            "hive.metastore.connect.retries": "1", "hive.metastore.failure.retries": "0",
        }  # fmt: skip
        for key, value in given.items():
            conf.set(key, value)
        return self._hive.HiveMetaStoreClient(conf)

    def _java(self, base: str, wanted: dict[str, Any]) -> Any:
        """The entry as the metastore's own object."""
        api, held = self._hive.api, wanted["StorageDescriptor"]
        table, storage, serde = api.Table(), api.StorageDescriptor(), api.SerDeInfo()
        serde.setSerializationLib(held["SerdeInfo"]["SerializationLibrary"])
        serde.setParameters(held["SerdeInfo"]["Parameters"])
        storage.setCols([api.FieldSchema(one["Name"].lower(), one["Type"], one["Comment"]) for one in held["Columns"]])
        storage.setLocation(held["Location"])
        storage.setInputFormat(held["InputFormat"])
        storage.setOutputFormat(held["OutputFormat"])
        storage.setSerdeInfo(serde)
        storage.setBucketCols([])
        storage.setSortCols([])
        storage.setParameters({})
        table.setDbName(base)
        table.setTableName(wanted["Name"])
        table.setTableType(wanted["TableType"])
        table.setPartitionKeys([])
        comment = {"comment": wanted["Description"]} if wanted["Description"] else {}
        table.setParameters({**wanted["Parameters"], **comment})
        table.setSd(storage)
        return table

    def _shown(self, table: Any) -> tuple[Any, ...]:
        storage, parameters = table.getSd(), table.getParameters()
        columns = [(one.getName(), one.getType(), one.getComment() or "") for one in storage.getCols()]
        return storage.getLocation(), columns, parameters.get("comment")

    def _ask(self, call: Callable[[], Any], made: str | None = None) -> Any:
        """Calls the metastore, and returns its answer; None if the database or table does not exist. ``made``: set if
        the call creates or changes something in this database; a missing database or table is then an error."""
        thing = f"Hive metastore {self._uri}"
        try:
            return call()
        except Py4JJavaError as error:
            kind = str(error.java_exception.getClass().getSimpleName())
            if made is None and kind in _MISSING:
                return None
            if made is not None and kind in _OF_ONE:
                raise RegistryRefused(f"answered {kind}", thing=thing) from None
            raise RegistryUnreachable(f"does not answer: {kind}", thing=thing) from None
        except (Py4JError, OSError) as error:
            raise RegistryUnreachable(f"cannot be queried: {type(error).__name__}", thing=thing) from None


def _location(folder: Location) -> str:
    """The location as Hadoop writes it. A local path becomes a ``file:`` URI, because the metastore's default file
    system may be HDFS."""
    return folder.for_hadoop if "://" in folder.text else folder.uri
