"""The shape of a relation, which decides how its rows are decoded: its Relation message, and facts from the catalog.
The stream lacks attribute numbers, keys, the base types of domains and the element types of arrays. The log stores
these facts with the Relation messages, so a shape can be made from the log alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, Self

from pgcdc_assets.core.catalog import Column, PgType, ReplicaIdentity, Table
from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Relation, RelationColumn

TEXT = PgType(oid=25, name="text")
"""The type of columns whose type is unknown: the text that PostgreSQL wrote is kept."""


@dataclass(frozen=True)
class RelationFacts:
    """What the catalog showed when the Relation message came. ``table`` is None if the relation was already dropped."""

    table: Table | None
    types: dict[int, PgType] = field(default_factory=dict)
    """The types of the message's columns by OID, resolved (domains, arrays), with typmod -1."""
    encoding: str = UTF8.name
    """The encoding of all texts of the stream: the server's own encoding if we can read it, otherwise UTF8."""

    def to_json(self) -> dict[str, Any]:
        """The form stored in the log, in which the OIDs are texts."""
        return {
            "table": self.table.to_json() if self.table else None,
            "types": {str(oid): asdict(self.types[oid]) for oid in sorted(self.types)},
            **({} if self.encoding == UTF8.name else {"encoding": self.encoding}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        table = Table.from_json(data["table"]) if data["table"] else None
        types = {int(oid): PgType.from_json(item) for oid, item in data["types"].items()}
        return cls(table, types, data.get("encoding", UTF8.name))

    def without_volatile(self) -> Self:
        """The facts that affect decoding: without storage numbers and estimates."""
        return replace(self, table=self.table.without_volatile()) if self.table else self


@dataclass(frozen=True)
class ShapeColumn:
    name: str
    attnum: int | None
    """None if the catalog had no column of this name and type any more."""
    type: PgType
    key: bool
    """Whether the Relation message flags the column as part of the replica identity. Under FULL all columns are."""


@dataclass(frozen=True)
class Shape:
    """A version of a relation, with which some of its rows are decoded. The columns are in the order of the tuples."""

    schema_id: int
    relation_id: int
    table: TableName
    """The relation's name in the Relation message: its name at that point of the stream."""
    columns: tuple[ShapeColumn, ...]
    replica_identity: ReplicaIdentity
    key: tuple[str, ...]
    """Names of the mirror's key columns."""
    catalog_name: TableName | None = None
    """The relation's name when the catalog was read, after the message. None if it was already dropped."""
    root: TableName | None = None
    """For a leaf partition: its root when the catalog was read, which may be newer than the message."""
    root_oid: int | None = None
    attnums: frozenset[int] = frozenset()
    """attnums of the published columns that the relation had when the catalog was read, under any name."""
    live: frozenset[int] = frozenset()
    """Like ``attnums``, with unpublished columns included. Empty if they are not known."""
    key_attnums: tuple[int, ...] = ()
    """attnums of the mirror's key columns."""
    encoding: str = UTF8.name
    """See :attr:`RelationFacts.encoding`."""

    @classmethod
    def resolve(cls, relation_payload: bytes, facts: RelationFacts, lsn: Lsn = ZERO) -> Self:
        """The shape of a Relation message (kind ``R``, byte for byte) under these facts."""
        relation = decode(relation_payload, lsn)
        if not isinstance(relation, Relation):
            raise ProtocolError(f"message of kind {relation_payload[:1]!r} where a Relation belongs", lsn=lsn)
        relation = relation.reread(Encoding.of(facts.encoding))
        name = TableName(relation.schema or "pg_catalog", relation.name)
        known = facts.table
        return cls(
            schema_id=fingerprint(relation_payload, facts),
            relation_id=relation.relation_id,
            table=name,
            columns=_columns(relation, facts),
            replica_identity=relation.replica_identity,
            key=_key(relation, known),
            catalog_name=known.name if known else None,
            root=known.root if known else None,
            root_oid=known.root_oid if known else None,
            attnums=frozenset(column.attnum for column in known.columns) if known else frozenset(),
            live=frozenset(known.live) if known else frozenset(),
            key_attnums=known.key if known else (),
            encoding=facts.encoding,
        )

    @property
    def told_key(self) -> tuple[ShapeColumn, ...]:
        """The primary key's columns according to the message, which flags them under the default identity; empty for
        any other identity. The catalog was read later, and may already show another key."""
        return tuple(column for column in self.columns if column.key) if self.replica_identity == "d" else ()

    @property
    def forgotten(self) -> bool:
        """Whether the relation was dropped before the catalog could be read."""
        return self.catalog_name is None


def fingerprint(relation_payload: bytes, facts: RelationFacts) -> int:
    """The log's ``schema_id``: equal for two relation versions exactly if their rows are decoded in the same way. A
    signed 64-bit integer from SHA-256."""
    known = json.dumps(facts.without_volatile().to_json(), sort_keys=True, separators=(",", ":"))
    # The length separates message and facts, so that two different pairs never give the same bytes.
    digest = sha256(len(relation_payload).to_bytes(8, "big") + relation_payload + known.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _columns(relation: Relation, facts: RelationFacts) -> tuple[ShapeColumn, ...]:
    known = {column.name: column for column in facts.table.columns} if facts.table else {}
    return tuple(_column(column, known.get(column.name), facts.types) for column in relation.columns)


def _column(column: RelationColumn, known: Column | None, types: dict[int, PgType]) -> ShapeColumn:
    """A catalog column of this name but another type is a different column: the catalog is newer than the message."""
    if known is not None and known.type.oid == column.type_oid:
        return ShapeColumn(column.name, known.attnum, replace(known.type, typmod=column.typmod), column.key)
    type_ = types.get(column.type_oid)
    return ShapeColumn(column.name, None, replace(type_, typmod=column.typmod) if type_ else TEXT, column.key)


def _key(relation: Relation, table: Table | None) -> tuple[str, ...]:
    if table is not None:
        return tuple(column.name for column in table.key_columns)
    # The table is already dropped, so only its replica identity is known. Under FULL the replica identity is not a key.
    keyed = relation.replica_identity in ("d", "i")
    return tuple(column.name for column in relation.columns if column.key) if keyed else ()
