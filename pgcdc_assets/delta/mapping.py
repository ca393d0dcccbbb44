"""The columns of a table in its Delta metadata.

With Delta's column mapping, each column has an id and a physical name, which is its name in the data files. So a column
can be renamed without rewriting the files. With type widening, the metadata lists the earlier types of a column. So its
type can become wider without rewriting the files.
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
"""Table property with the highest column id that was ever given. The id of a removed column is never given again."""
WIDENING: Final = "delta.enableTypeWidening"
_ID: Final = "delta.columnMapping.id"
_PHYSICAL: Final = "delta.columnMapping.physicalName"
_TYPE_CHANGES: Final = "delta.typeChanges"
_COMMENT: Final = "comment"
OURS: Final = "pgcdc.comment"
"""Marks a comment as copied from the source. When the source removes the comment, it is removed here too."""

Field = dict[str, Any]
"""The JSON object of a column in a table's metadata."""


@dataclass(frozen=True)
class Columns:
    """All columns of a table, and the properties that belong to them."""

    fields: Sequence[Field]
    properties: Mapping[str, str]

    @classmethod
    def of(cls, schema: pa.Schema, *, mapped: bool, highest: int = 0) -> Columns:
        """The columns of ``schema`` as new columns, with column mapping if ``mapped``. Their ids are above
        ``highest``."""
        fields = _fields(schema)
        return cls(*_with_ids(fields, highest)) if mapped else cls(fields, {})

    def with_more(self, schema: pa.Schema) -> Columns:
        """These columns, followed by the columns of the schema as new columns."""
        more = _fields(schema)
        properties: Mapping[str, str] = {}
        if is_mapped(self.properties):
            more, properties = _with_ids(more, int(self.properties[HIGHEST]))
        return Columns([*self.fields, *more], properties)

    def followed_by(self, schema: pa.Schema, held: Mapping[str, str], *, mapped: bool) -> Columns:
        """The columns of ``schema``, such that the present data files can stay. ``held`` has an item for each column of
        ``schema`` that exists already: its name in ``schema`` and its present name. The type of such a column may only
        become wider. All other columns are new, and NULL in the files. ``mapped``: turn column mapping on, if it is not
        on."""
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
        """These columns with new comments. ``comments``: by column name, the comment of the source. None removes a
        comment that came from the source, but not a comment of another writer."""
        fields = [_commented(field, comments[field["name"]]) if field["name"] in comments else field
                  for field in self.fields]  # fmt: skip
        return replace(self, fields=fields)

    def commented_as(self, held: Columns, sources: Mapping[str, str]) -> Columns:
        """These columns with the comments of ``held``. ``sources`` maps a column's name here to its name in
        ``held``."""
        known = {field["name"]: {name: value for name, value in field["metadata"].items() if name in (_COMMENT, OURS)}
                 for field in held.fields}  # fmt: skip
        fields = [{**field, "metadata": {**field["metadata"], **known.get(sources.get(field["name"], ""), {})}}
                  for field in self.fields]  # fmt: skip
        return replace(self, fields=fields)

    def _mapped(self) -> Columns:
        """These columns with column mapping. If it is not on yet, each column gets an id, and its present name as its
        physical name."""
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
    """The columns in the metadata of a table."""
    return Columns(json.loads(metadata["schemaString"])["fields"], metadata.get("configuration") or {})


def is_mapped(properties: Mapping[str, str]) -> bool:
    return properties.get(MODE, "none") != "none"


def physical(schema: pa.Schema, columns: Schema) -> pa.Schema:
    """``schema`` with the names and field ids that these columns have in the table's files. ``columns``: the table's
    columns. Raises KeyError for a column that the table does not have."""
    metadata = {field.name: field.metadata for field in columns.fields}
    return pa.schema([_in_files(field, metadata[field.name]) for field in schema])


def _fields(schema: pa.Schema) -> list[Field]:
    found: list[Field] = json.loads(Schema.from_arrow(schema).to_json())["fields"]
    return found


def _with_ids(fields: Iterable[Field], highest: int) -> tuple[list[Field], dict[str, str]]:
    """The fields with new ids above ``highest`` and new physical names, and the properties that the table then
    needs."""
    given = [{**field, "metadata": {_ID: number, _PHYSICAL: f"col-{uuid.uuid4()}"}}
             for number, field in enumerate(fields, highest + 1)]  # fmt: skip
    return given, {MODE: "name", HIGHEST: str(highest + len(given))}


def _commented(of: Field, comment: str | None) -> Field:
    metadata = of["metadata"]
    if comment is None and OURS not in metadata:
        return of
    kept = {name: value for name, value in metadata.items() if name not in (_COMMENT, OURS)}
    return {**of, "metadata": kept if comment is None else {**kept, _COMMENT: comment, OURS: "true"}}


def _as_named(of: Field, ids: Iterator[int]) -> Field:
    """The column with an id, and its present name as its physical name. If its type contains structs, their fields get
    both too."""
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
    """The column ``of`` with the name and type of ``wanted``. Its id and physical name stay the same."""
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
