"""The columns of a table as its metadata states them, with ids and separate names if files name the columns
differently.

If a column is renamed or its type is widened without a rewrite of the files, the files keep the column's old name, and
the metadata lists its earlier types.
https://github.com/delta-io/delta/blob/master/PROTOCOL.md#column-mapping
https://github.com/delta-io/delta/blob/master/PROTOCOL.md#type-widening
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import pyarrow as pa
from deltalake import Schema

MODE: Final = "delta.columnMapping.mode"
HIGHEST: Final = "delta.columnMapping.maxColumnId"
"""Table property: the highest id. Ids are never reused, even after a column was removed."""
WIDENING: Final = "delta.enableTypeWidening"
_ID: Final = "delta.columnMapping.id"
_PHYSICAL: Final = "delta.columnMapping.physicalName"
_TYPE_CHANGES: Final = "delta.typeChanges"
_COMMENT: Final = "comment"
OURS: Final = "pgcdc.comment"
"""Marks a comment in a column's metadata as the source's: the comment is removed when the source removes it."""

Field = dict[str, Any]
"""A column in a table's metadata."""


@dataclass(frozen=True)
class Columns:
    """All columns of a table, and the properties that belong to them."""

    fields: Sequence[Field]
    properties: Mapping[str, str]

    @classmethod
    def of(cls, schema: pa.Schema, *, mapped: bool, highest: int = 0) -> Columns:
        """``highest``: ids up to this number are not given again."""
        fields = _fields(schema)
        return cls(*_with_ids(fields, highest)) if mapped else cls(fields, {})

    def with_more(self, schema: pa.Schema) -> Columns:
        """These columns, and then the columns of the schema."""
        more = _fields(schema)
        properties: Mapping[str, str] = {}
        if is_mapped(self.properties):
            more, properties = _with_ids(more, int(self.properties[HIGHEST]))
        return Columns([*self.fields, *more], properties)

    def followed_by(self, schema: pa.Schema, held: Mapping[str, str], *, mapped: bool) -> Columns:
        """The columns of ``schema`` over the same files. ``held``: the present names of columns that exist here; all
        other columns are new, and NULL in the files. ``mapped``: files may name columns differently. A column's type
        may only become wider."""
        here = self._mapped() if mapped else self
        told = {field["name"]: field for field in here.fields}
        new = pa.schema([field for field in schema if field.name not in held])
        more = Columns(here.fields, {**self.properties, **here.properties}).with_more(new)
        came = {field["name"]: field for field in more.fields[len(here.fields) :]}
        fields = [came[field["name"]] if field["name"] in came else _renamed(told[held[field["name"]]], field)
                  for field in _fields(schema)]  # fmt: skip
        widened = {WIDENING: "true"} if any(_TYPE_CHANGES in field["metadata"] for field in fields) else {}
        return Columns(fields, {**here.properties, **more.properties, **widened})

    def commented(self, comments: Mapping[str, str | None]) -> Columns:
        """The same columns with these comments. None removes our comment, but not another writer's comment."""
        fields = [_commented(field, comments[field["name"]]) if field["name"] in comments else field
                  for field in self.fields]  # fmt: skip
        return replace(self, fields=fields)

    def commented_as(self, held: Columns, sources: Mapping[str, str]) -> Columns:
        """The same columns with the comments of ``held``. ``sources``: the names that columns have in ``held``."""
        known = {field["name"]: _comment(field) for field in held.fields}
        fields = [{**field, "metadata": {**field["metadata"], **known.get(sources.get(field["name"], ""), {})}}
                  for field in self.fields]  # fmt: skip
        return replace(self, fields=fields)

    def _mapped(self) -> Columns:
        """The same columns, with ids; files name them by their current names."""
        if is_mapped(self.properties):
            return Columns(self.fields, {})
        ids = count(1)
        fields = [_as_named(field, ids) for field in self.fields]
        return Columns(fields, {MODE: "name", HIGHEST: str(next(ids) - 1)})

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
    """Columns as data files name them. KeyError for a column that the table lacks."""
    metadata = {field.name: field.metadata for field in columns.fields}
    return pa.schema([_in_files(field, metadata[field.name]) for field in schema])


def _fields(schema: pa.Schema) -> list[Field]:
    found: list[Field] = json.loads(Schema.from_arrow(schema).to_json())["fields"]
    return found


def _with_ids(fields: Iterable[Field], highest: int) -> tuple[list[Field], dict[str, str]]:
    """The fields with ids above the highest id that was given."""
    given = [{**field, "metadata": {_ID: number, _PHYSICAL: f"col-{uuid.uuid4()}"}}
             for number, field in enumerate(fields, highest + 1)]  # fmt: skip
    return given, {MODE: "name", HIGHEST: str(highest + len(given))}


def _comment(of: Field) -> Field:
    return {name: value for name, value in of["metadata"].items() if name in (_COMMENT, OURS)}


def _commented(of: Field, comment: str | None) -> Field:
    metadata = of["metadata"]
    if comment is None and OURS not in metadata:
        return of
    kept = {name: value for name, value in metadata.items() if name not in (_COMMENT, OURS)}
    return {**of, "metadata": kept if comment is None else {**kept, _COMMENT: comment, OURS: "true"}}


def _as_named(of: Field, ids: Iterator[int]) -> Field:
    """A column with an id, which files name by its present name. Columns of structs inside it also get ids."""
    metadata = {**of["metadata"], _ID: next(ids), _PHYSICAL: of["name"]}
    return {**of, "type": _nested(of["type"], ids), "metadata": metadata}


def _nested(of: Any, ids: Iterator[int]) -> Any:
    if not isinstance(of, dict):
        return of
    inner = {name: _nested(of[name], ids) for name in ("elementType", "keyType", "valueType") if name in of}
    if "fields" in of:
        inner["fields"] = [_as_named(field, ids) for field in of["fields"]]
    return {**of, **inner}


def _renamed(of: Field, wanted: Field) -> Field:
    """A column with the name and type of another column, in the same place of the files."""
    was, is_ = of["type"], wanted["type"]
    if not isinstance(was, str) or was == is_:
        return {**of, "name": wanted["name"]}
    changes = [*of["metadata"].get(_TYPE_CHANGES, ()), {"fromType": was, "toType": is_}]
    return {**of, "name": wanted["name"], "type": is_, "metadata": {**of["metadata"], _TYPE_CHANGES: changes}}


def _in_files(field: pa.Field, metadata: Mapping[str, Any]) -> pa.Field:
    name = metadata.get(_PHYSICAL)
    if name is None:
        return field
    return field.with_name(str(name)).with_metadata({"PARQUET:field_id": str(metadata[_ID])})
