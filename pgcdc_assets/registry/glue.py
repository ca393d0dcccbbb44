"""Registers mirrors in the Glue Data Catalog of AWS. boto3 takes credentials and endpoint from the environment.

The entries have the form that Spark and Trino write for Delta tables. These engines read a table's columns from its
Delta log. So the columns in an entry are only for people who browse the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryRefused, RegistryUnreachable, SettingsError
from pgcdc_assets.registry.named import OWNER, NamedTable, refuse_other

_MISSING: Final = "EntityNotFoundException"
_FOR_ALL: Final = ("ExpiredToken", "UnrecognizedClient", "InvalidSignature", "Throttling", "InternalService")
"""The beginnings of error codes that do not depend on the table, so that a request for any other table would get them
too."""
_SECONDS: Final = 10
_SEQUENCE_FILE: Final = {
    "InputFormat": "org.apache.hadoop.mapred.SequenceFileInputFormat",
    "OutputFormat": "org.apache.hadoop.hive.ql.io.HiveSequenceFileOutputFormat",
}
"""The formats that Spark and Trino write into entries of tables that Hive itself cannot read."""
_SERDE: Final = "org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe"


def database(prefix: str, name: TableName) -> str:
    """The name of the Glue or Hive database that contains the table's entry. Glue and Hive keep names in lower case."""
    return f"{prefix}{name.schema}".lower()


def table_input(table: NamedTable, location: str) -> dict[str, Any]:
    """The entry of a Delta table in the form of Glue's ``TableInput``, which is also the form of a Hive metastore."""
    columns = [
        # Hive has only one type of timestamps, so timestamp_ntz becomes timestamp.
        {"Name": column.name, "Type": column.sql_type.replace("timestamp_ntz", "timestamp"),
         "Comment": (column.comment or "")[:255]}
        for column in table.columns
    ]  # fmt: skip
    return {
        "Name": table.name.name.lower(),
        "Description": (table.comment or "")[:2048],
        "TableType": "EXTERNAL_TABLE",
        "Parameters": {
            "EXTERNAL": "TRUE", "table_type": "DELTA", "spark.sql.sources.provider": "delta", OWNER: table.owner,
        },
        "StorageDescriptor": {
            "Columns": columns, "Location": location, **_SEQUENCE_FILE,
            "SerdeInfo": {
                "SerializationLibrary": _SERDE, "Parameters": {"serialization.format": "1", "path": location},
            },
        },
    }  # fmt: skip


class Glue:
    """The Glue Data Catalog of one region. ``prefix``: a text put before the schema's name in each database's name."""

    def __init__(self, region: str, prefix: str) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            do = "install it: pip install 'pgcdc_assets[glue]'"
            raise SettingsError("needs the package boto3", thing="setting `registry`", do=do) from None
        once = Config(connect_timeout=_SECONDS, read_timeout=_SECONDS, retries={"total_max_attempts": 2})
        self._client: Any = boto3.client("glue", region_name=region, config=once)
        self._region, self._prefix = region, prefix

    def put(self, table: NamedTable) -> None:
        base, wanted = database(self._prefix, table.name), table_input(table, table.location.uri)
        found = self._ask(self._client.get_table, DatabaseName=base, Name=wanted["Name"])
        if found is None:
            if self._ask(self._client.create_table, DatabaseName=base, TableInput=wanted) is None:
                self._ask(self._client.create_database, DatabaseInput={"Name": base})
                self._ask(self._client.create_table, DatabaseName=base, TableInput=wanted)
            return
        refuse_other(found["Table"].get("Parameters"), table, f"{base}.{wanted['Name']}")
        if not _shows(found["Table"], wanted):
            self._ask(self._client.update_table, DatabaseName=base, TableInput=wanted)

    def remove(self, name: TableName, owner: str) -> None:
        key = {"DatabaseName": database(self._prefix, name), "Name": name.name.lower()}
        found = self._ask(self._client.get_table, **key)
        if found is not None and found["Table"].get("Parameters", {}).get(OWNER) == owner:
            self._ask(self._client.delete_table, **key)

    def close(self) -> None:
        self._client.close()

    def _ask(self, call: Callable[..., Any], **request: Any) -> Any:
        """Calls Glue, and returns its answer; None if the database or the table does not exist."""
        from botocore.exceptions import BotoCoreError, ClientError

        thing = f"Glue in {self._region}"
        try:
            return call(**request)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code == _MISSING:
                return None
            kind = RegistryUnreachable if code.startswith(_FOR_ALL) else RegistryRefused
            raise kind(f"answered {code}", thing=thing) from None
        except BotoCoreError as error:
            raise RegistryUnreachable(f"does not answer: {type(error).__name__}", thing=thing) from None


def _shows(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the entry ``found`` has everything that is ``wanted``. It may have more, such as Glue's own
    parameters."""
    for key, value in wanted.items():
        has = found.get(key)
        if isinstance(value, Mapping):
            if not isinstance(has, Mapping) or not _shows(has, value):
                return False
        elif isinstance(value, list):
            if len(has or []) != len(value) or not all(_shows(*pair) for pair in zip(has or [], value, strict=True)):
                return False
        elif (has or "") != value:
            return False
    return True
