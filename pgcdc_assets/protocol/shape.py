"""The shape of a relation: its columns, their types and its key, as needed to decode its rows.

A shape is made from a Relation message and from facts of the catalog, because the message lacks attribute numbers, the
mirror's key, the base types of domains and the element types of arrays. The receiver reads these facts when the message
arrives, and the change log stores both. So a shape can be made without the source."""

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
"""The type used for columns whose type is unknown. Their values are stored as the text that PostgreSQL sent."""


@dataclass(frozen=True)
class RelationFacts:
    """What the catalog showed about a relation when it was read, shortly after the Relation message arrived. ``table``
    is None if the relation was dropped before that."""

    table: Table | None
    types: dict[int, PgType] = field(default_factory=dict)
    """By OID: the types of the message's columns, the base types of domains and the element types of arrays. All these
    types have typmod -1."""
    encoding: str = UTF8.name
    """The encoding of all texts in the stream: the server's own encoding if pgcdc can read it, otherwise UTF8."""

    def to_json(self) -> dict[str, Any]:
        """The form in which the change log stores the facts. OIDs of types are text, because they are keys of a JSON
        object."""
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
        """The facts without the parts that do not affect decoding, such as relfilenodes and estimates of sizes."""
        return replace(self, table=self.table.without_volatile()) if self.table else self


@dataclass(frozen=True)
class ShapeColumn:
    name: str
    attnum: int | None
    """None if the catalog no longer had a column with this name and type when it was read."""
    type: PgType
    key: bool
    """Whether the Relation message marks the column as part of the replica identity. FULL marks all columns."""


@dataclass(frozen=True)
class Shape:
    """One version of a relation, needed to decode the rows that the stream sends after its Relation message. The
    columns are in the order of the values in a tuple."""

    schema_id: int
    relation_id: int
    table: TableName
    """The relation's name in the Relation message. It is the name that the relation had at this place in the stream."""
    columns: tuple[ShapeColumn, ...]
    replica_identity: ReplicaIdentity
    key: tuple[str, ...]
    """Names of the mirror's key columns."""
    catalog_name: TableName | None = None
    """The relation's name when the catalog was read, which is after the message. None if the relation was already
    dropped."""
    root: TableName | None = None
    """For a leaf partition: its root table when the catalog was read, which is after the message."""
    root_oid: int | None = None
    attnums: frozenset[int] = frozenset()
    """attnums of the published columns that the relation had when the catalog was read."""
    live: frozenset[int] = frozenset()
    """attnums of all columns that the relation had when the catalog was read, published or not. Empty if not known."""
    key_attnums: tuple[int, ...] = ()
    """attnums of the mirror's key columns."""
    encoding: str = UTF8.name
    """See :attr:`RelationFacts.encoding`."""

    @classmethod
    def resolve(cls, relation_payload: bytes, facts: RelationFacts, lsn: Lsn = ZERO) -> Self:
        """Makes the shape from the bytes of a Relation message and from the catalog's facts. Raises ProtocolError if
        the message is not a Relation message."""
        relation = decode(relation_payload, lsn)
        if not isinstance(relation, Relation):
            raise ProtocolError(f"message of kind {relation_payload[:1]!r} instead of a Relation message", lsn=lsn)
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
        """The columns of the primary key when the Relation message was sent. The message marks them only if the replica
        identity is DEFAULT; otherwise the result is empty. :attr:`key` comes from the catalog, which was read later and
        may already show a newer key."""
        return tuple(column for column in self.columns if column.key) if self.replica_identity == "d" else ()

    @property
    def forgotten(self) -> bool:
        """Whether the relation was dropped before the catalog was read."""
        return self.catalog_name is None


def fingerprint(relation_payload: bytes, facts: RelationFacts) -> int:
    """Computes the log's ``schema_id``, a signed 64-bit integer from a SHA-256 hash. Two versions of a relation have
    the same ``schema_id`` exactly if their Relation messages and all facts that affect decoding are equal."""
    known = json.dumps(facts.without_volatile().to_json(), sort_keys=True, separators=(",", ":"))
    # The message's length is hashed first, so that two different pairs of message and facts never have the same bytes.
    digest = sha256(len(relation_payload).to_bytes(8, "big") + relation_payload + known.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _columns(relation: Relation, facts: RelationFacts) -> tuple[ShapeColumn, ...]:
    known = {column.name: column for column in facts.table.columns} if facts.table else {}
    return tuple(_column(column, known.get(column.name), facts.types) for column in relation.columns)


def _column(column: RelationColumn, known: Column | None, types: dict[int, PgType]) -> ShapeColumn:
    """Finds the column's attnum and type. The catalog is newer than the message. So if the catalog's column of this
    name has another type, it is treated as a different column, and the attnum is not known."""
    if known is not None and known.type.oid == column.type_oid:
        return ShapeColumn(column.name, known.attnum, replace(known.type, typmod=column.typmod), column.key)
    type_ = types.get(column.type_oid)
    return ShapeColumn(column.name, None, replace(type_, typmod=column.typmod) if type_ else TEXT, column.key)


def _key(relation: Relation, table: Table | None) -> tuple[str, ...]:
    if table is not None:
        return tuple(column.name for column in table.key_columns)
    # The relation was dropped before the catalog was read, so the message's key flags are all that is known. With FULL
    # they mark every column, and so do not show the key.
    keyed = relation.replica_identity in ("d", "i")
    return tuple(column.name for column in relation.columns if column.key) if keyed else ()
