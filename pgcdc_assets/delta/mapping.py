"""The columns of a table as its metadata states them, with ids and names of their own where files name them otherwise.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md#column-mapping
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake import Schema

MODE: Final = "delta.columnMapping.mode"
HIGHEST: Final = "delta.columnMapping.maxColumnId"
"""Table property: ids go up, also past columns that are gone."""
_ID: Final = "delta.columnMapping.id"
_PHYSICAL: Final = "delta.columnMapping.physicalName"

Field = dict[str, Any]
"""A column in a table's metadata."""


@dataclass(frozen=True)
class Columns:
    """All columns of a table, and the properties that go with them."""

    fields: Sequence[Field]
    properties: Mapping[str, str]

    @classmethod
    def of(cls, schema: pa.Schema, *, mapped: bool, highest: int = 0) -> Columns:
        """``highest``: no id up to this one is given again."""
        fields = _fields(schema)
        return cls(*_with_ids(fields, highest)) if mapped else cls(fields, {})

    def with_more(self, schema: pa.Schema) -> Columns:
        """These columns and the schema's behind them."""
        more = _fields(schema)
        properties: Mapping[str, str] = {}
        if is_mapped(self.properties):
            more, properties = _with_ids(more, int(self.properties[HIGHEST]))
        return Columns([*self.fields, *more], properties)

    @property
    def schema(self) -> Schema:
        return Schema.from_json(self.to_json())

    def to_json(self) -> str:
        return json.dumps({"type": "struct", "fields": list(self.fields)})


def stated(metadata: Mapping[str, Any]) -> Columns:
    """The columns of a table with this metadata."""
    return Columns(json.loads(metadata["schemaString"])["fields"], metadata.get("configuration") or {})


def is_mapped(properties: Mapping[str, str]) -> bool:
    return properties.get(MODE, "none") != "none"


def physical(schema: pa.Schema, columns: Schema) -> pa.Schema:
    """Columns as data files name them. KeyError for one that the table lacks."""
    metadata = {field.name: field.metadata for field in columns.fields}
    return pa.schema([_in_files(field, metadata[field.name]) for field in schema])


def _fields(schema: pa.Schema) -> list[Field]:
    found: list[Field] = json.loads(Schema.from_arrow(schema).to_json())["fields"]
    return found


def _with_ids(fields: Iterable[Field], highest: int) -> tuple[list[Field], dict[str, str]]:
    """The fields with ids behind the highest one that was given."""
    given = [{**field, "metadata": {_ID: number, _PHYSICAL: f"col-{uuid.uuid4()}"}}
             for number, field in enumerate(fields, highest + 1)]  # fmt: skip
    return given, {MODE: "name", HIGHEST: str(highest + len(given))}


def _in_files(field: pa.Field, metadata: Mapping[str, Any]) -> pa.Field:
    name = metadata.get(_PHYSICAL)
    if name is None:
        return field
    return field.with_name(str(name)).with_metadata({"PARQUET:field_id": str(metadata[_ID])})
