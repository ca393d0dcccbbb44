"""The relations of a stream: which Relation message and catalog facts are in force for which row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.messages import Relation
from pgcdc_assets.protocol.shape import RelationFacts, fingerprint


@dataclass(frozen=True)
class RelationRecord:
    """One version of a relation, as every batch that uses it carries it."""

    schema_id: int
    relation_id: int
    name: TableName
    payload: bytes
    """The Relation message, byte for byte."""
    facts: RelationFacts
    types: tuple[bytes, ...]
    """The Type messages of its columns' types, as far as PostgreSQL sent any."""


class _Versions:
    """The versions of each relation, and from which frame on each is in force."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[list[int], list[int]]] = {}

    def add(self, relation_id: int, schema_id: int, sequence: int) -> None:
        """``sequence`` grows from call to call."""
        since, schema_ids = self._versions.setdefault(relation_id, ([], []))
        if not schema_ids or schema_ids[-1] != schema_id:
            # The list that is searched grows last, so that the reading thread never finds a hole.
            schema_ids.append(schema_id)
            since.append(sequence)

    def newest(self) -> dict[int, int]:
        """The version of each relation that is in force at the end."""
        return {relation_id: schema_ids[-1] for relation_id, (_, schema_ids) in self._versions.items()}

    def schema_ids(self, relation_ids: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.int64]:
        """The version in force for each row; a row whose relation was never described is a ProtocolError."""
        result = np.zeros(len(relation_ids), dtype=np.int64)
        for relation_id in np.unique(relation_ids).tolist():
            rows = np.flatnonzero(relation_ids == relation_id)
            result[rows] = self._in_force(relation_id, sequence[rows])
        return result

    def _in_force(self, relation_id: int, sequence: NDArray[np.int64]) -> NDArray[np.int64]:
        since, schema_ids = self._versions.get(relation_id, ([], []))
        first = bisect_right(since, int(sequence.min())) if len(sequence) else 0
        if first == 0:
            raise ProtocolError(f"rows came for relation {relation_id} before its Relation message")
        version = np.searchsorted(np.asarray(since), sequence, side="right") - 1
        return np.asarray(schema_ids, dtype=np.int64)[version]


class Relations(_Versions):
    """Filled by the receiving thread, read by the writing one; a version once seen never changes."""

    def __init__(self) -> None:
        super().__init__()
        self._types: dict[int, bytes] = {}
        self._records: dict[int, RelationRecord] = {}
        self._came: dict[int, int] = {}
        """By relation: the frame of the Relation message that is in force."""

    def see_type(self, oid: int, payload: bytes) -> None:
        self._types[oid] = payload

    def see(self, relation: Relation, payload: bytes, facts: RelationFacts, sequence: int) -> RelationRecord:
        """A Relation message is in force for its table from frame ``sequence`` on."""
        record = self.know(relation, payload, facts)
        self.add(relation.relation_id, record.schema_id, sequence)
        self._came[relation.relation_id] = sequence
        return record

    def know(self, relation: Relation, payload: bytes, facts: RelationFacts) -> RelationRecord:
        """A version that rows refer to, without its being in force for those to come."""
        schema_id = fingerprint(payload, facts)
        oids = {column.type_oid for column in relation.columns}
        record = RelationRecord(
            schema_id=schema_id,
            relation_id=relation.relation_id,
            name=TableName(relation.schema, relation.name),
            payload=payload,
            facts=facts,
            types=tuple(self._types[oid] for oid in sorted(oids) if oid in self._types),
        )
        self._records[schema_id] = record
        return record

    def record(self, schema_id: int) -> RelationRecord:
        return self._records[schema_id]

    def came(self, relation_id: int) -> int:
        """The frame of the Relation message that is in force; -1 where none came."""
        return self._came.get(relation_id, -1)


@dataclass(frozen=True)
class OverlaidRelation:
    """A Relation message within a transaction that is in progress."""

    relation: Relation
    payload: bytes
    sequence: int
    """The frame that it came with."""


class Overlay(_Versions):
    """The relations of one transaction in progress, as it sees them itself: it may have changed its tables.

    What they are counts for others, and is known to the catalog, only once the transaction has committed. Until then
    their versions have provisional ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[bytes, OverlaidRelation] = {}
        """By Relation message; the place in it is the provisional id."""
        self._places: dict[bytes, int] = {}
        self._types: dict[int, bytes] = {}
        self.locked = False
        """Whether the catalog could not be asked about some of them before the commit, because of a lock."""

    def see_type(self, oid: int, payload: bytes) -> None:
        self._types[oid] = payload

    def see(self, relation: Relation, payload: bytes, sequence: int) -> None:
        """A Relation message is in force for the transaction's own rows from frame ``sequence`` on."""
        place = self._places.setdefault(payload, len(self._places))
        self._seen[payload] = OverlaidRelation(relation, payload, sequence)
        self.add(relation.relation_id, place, sequence)

    @property
    def relations(self) -> list[Relation]:
        """One for each provisional id."""
        return [seen.relation for seen in self._seen.values()]

    @property
    def payloads(self) -> list[bytes]:
        """Their messages."""
        return list(self._seen)

    def promote(self, into: Relations, facts: Sequence[RelationFacts], sequence: int) -> dict[int, int]:
        """The transaction has committed, by frame ``sequence``. Returns the final id of each provisional one.

        ``facts`` is what the catalog says now of :attr:`relations`. From here on the server takes these relations for
        told. Where it told others of one after it told this transaction, that stays in force.
        """
        for oid, payload in self._types.items():
            into.see_type(oid, payload)
        newest = self.newest()
        final: dict[int, int] = {}
        for place, (seen, known) in enumerate(zip(self._seen.values(), facts, strict=True)):
            relation_id = seen.relation.relation_id
            final[place] = into.know(seen.relation, seen.payload, known).schema_id
            if newest[relation_id] == place and seen.sequence > into.came(relation_id):
                into.see(seen.relation, seen.payload, known, sequence)
        return final
