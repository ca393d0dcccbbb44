"""The relations of a stream: which Relation message and catalog facts are in force for which row."""

from __future__ import annotations

from bisect import bisect_right
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


class Relations:
    """Filled by the receiving thread, read by the writing one; a version once seen never changes."""

    def __init__(self) -> None:
        self._types: dict[int, bytes] = {}
        self._records: dict[int, RelationRecord] = {}
        self._versions: dict[int, tuple[list[int], list[int]]] = {}

    def see_type(self, oid: int, payload: bytes) -> None:
        self._types[oid] = payload

    def see(self, relation: Relation, payload: bytes, facts: RelationFacts, sequence: int) -> RelationRecord:
        """Note a Relation message, which is in force for its table from frame ``sequence`` on."""
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
        since, schema_ids = self._versions.setdefault(relation.relation_id, ([], []))
        if not schema_ids or schema_ids[-1] != schema_id:
            # The list that is searched grows last, so that the reading thread never finds a hole.
            schema_ids.append(schema_id)
            since.append(sequence)
        return record

    def record(self, schema_id: int) -> RelationRecord:
        return self._records[schema_id]

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
