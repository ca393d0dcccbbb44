"""The content of a catalog entry for a mirror, and the interface that is implemented for each kind of catalog.

Each entry that pgcdc writes has the property OWNER, which says to which mirror of which source it belongs. Entries
without this property, or with another value, are never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.formats import reading
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.errors import LakeError, RegistryRefused

OWNER: Final = "pgcdc.source"
"""The property of an entry that identifies the mirror, by system identifier, database, slot and table of the source."""

_SQL_NAMES: Final = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
"""The names in SQL of the Delta types whose names in Delta are different."""


@dataclass(frozen=True)
class NamedColumn:
    """A column of an entry. ``field``: its description in the ``schemaString`` of the Delta table."""

    field: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.field["name"])

    @property
    def comment(self) -> str | None:
        return (self.field.get("metadata") or {}).get("comment")

    @property
    def sql_type(self) -> str:
        """The type in SQL, like ``decimal(10,2)`` or ``array<bigint>``."""
        return _in_sql(self.field["type"])


@dataclass(frozen=True)
class NamedTable:
    """The content of an entry: a mirror with the columns of its newest version."""

    name: TableName
    location: Location
    columns: tuple[NamedColumn, ...]
    comment: str | None
    owner: str
    """The value of OWNER."""

    @classmethod
    def of(cls, layout: Layout, identity: Identity, name: TableName) -> Self:
        """Reads the columns from the newest version in the mirror's Delta log, because a user who opens the table by
        its name gets this version."""
        folder = layout.mirror(name)
        newest = DeltaLog(folder, with_files=False).newest()
        if newest is None:
            raise LakeError("no longer has a mirror", thing=f"table {name}")
        with reading(f"schema of Delta table {folder}"):
            columns = tuple(NamedColumn(field) for field in json.loads(newest.metadata["schemaString"])["fields"])
        return cls(name, folder, columns, newest.metadata.get("description"), owner(identity, name))


class Registry(Protocol):
    """A catalog in which mirrors are registered. Every call may be repeated.

    A call raises RegistryUnreachable if the catalog does not answer, so that calls for other tables would fail too. It
    raises RegistryRefused if the catalog refuses only this table. The errors contain names, but no credentials."""

    def put(self, table: NamedTable) -> None:
        """Registers the table, or changes its entry if location, columns or comment differ. Raises RegistryRefused if
        the name belongs to an entry of another owner."""

    def remove(self, name: TableName, owner: str) -> None:
        """Removes the table's entry, unless it has another owner. Deletes no data."""

    def close(self) -> None:
        """Closes the connection to the catalog."""


def owner(identity: Identity, name: TableName) -> str:
    return identity.app_id(str(name))


def refuse_other(properties: Mapping[str, str] | None, table: NamedTable, entry: str) -> None:
    """Raises RegistryRefused if the entry with the table's name does not belong to this mirror. ``properties``: the
    properties of that entry."""
    if (properties or {}).get(OWNER) != table.owner:
        raise RegistryRefused(
            f"the name {entry} is taken by a table that this project did not register", thing=f"table {table.name}",
            do="rename or drop that table in the catalog, or set another `catalog` or `prefix` in `registry`",
        )  # fmt: skip


def _in_sql(of: Any) -> str:
    if isinstance(of, str):
        return _SQL_NAMES.get(of, of)
    if of["type"] == "array":
        return f"array<{_in_sql(of['elementType'])}>"
    if of["type"] == "map":
        return f"map<{_in_sql(of['keyType'])},{_in_sql(of['valueType'])}>"
    parts = ",".join(f"{field['name']}:{_in_sql(field['type'])}" for field in of["fields"])
    return f"struct<{parts}>"
