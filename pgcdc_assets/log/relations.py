"""The relations of a stream: which Relation message and catalog facts are in force for which row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Relation, Type
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
        if len(relation_ids) and (relation_ids == relation_ids[0]).all():
            # A large transaction writes to one table for long; finding which there are costs as much as all else here.
            return self._in_force(int(relation_ids[0]), sequence)
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
        if len(schema_ids) == 1:
            return np.full(len(sequence), schema_ids[0], dtype=np.int64)
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
        self._undescribed: dict[int, OverlaidRelation] = {}
        """By relation: what is in force, though the catalog has not been asked about it."""

    def see_type(self, oid: int, payload: bytes) -> None:
        self._types[oid] = payload

    def see(self, relation: Relation, payload: bytes, facts: RelationFacts, sequence: int) -> RelationRecord:
        """A Relation message is in force for its table from frame ``sequence`` on."""
        record = self.know(relation, payload, facts)
        self.add(relation.relation_id, record.schema_id, sequence)
        self._came[relation.relation_id] = sequence
        self._undescribed.pop(relation.relation_id, None)
        return record

    def told(self, seen: OverlaidRelation) -> None:
        """A Relation message of a transaction that is prepared, which the server takes for told to all that follow.

        The transaction may hold a lock on the table until somebody ends it. So the catalog is asked once rows of
        another one come, which a lock would keep away.
        """
        self._undescribed[seen.relation.relation_id] = seen

    @property
    def any_undescribed(self) -> bool:
        return bool(self._undescribed)

    def undescribed(self, relation_ids: Iterable[int]) -> list[OverlaidRelation]:
        """Those of these relations about which the catalog has to be asked."""
        return [self._undescribed[one] for one in relation_ids if one in self._undescribed]

    def in_force(self, relation_id: int) -> bytes | None:
        """The newest Relation message that has been told; None where none was."""
        if relation_id in self._undescribed:
            return self._undescribed[relation_id].payload
        _, schema_ids = self._versions.get(relation_id, ((), ()))
        return self._records[schema_ids[-1]].payload if schema_ids else None

    def know(self, relation: Relation, payload: bytes, facts: RelationFacts) -> RelationRecord:
        """A version that rows refer to, without its being in force for those to come."""
        schema_id = fingerprint(payload, facts)
        oids = {column.type_oid for column in relation.columns}
        encoding = Encoding.of(facts.encoding)
        record = RelationRecord(
            schema_id=schema_id,
            relation_id=relation.relation_id,
            name=TableName(encoding.reread(relation.schema), encoding.reread(relation.name)),
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

    def __init__(self, base: Relations | None = None) -> None:
        """``base``: for a transaction that comes whole at its PREPARE. It is not told again what was told before, and
        what it is told counts for all that follow."""
        super().__init__()
        self._seen: dict[bytes, OverlaidRelation] = {}
        """By Relation message; the place in it is the provisional id."""
        self._places: dict[bytes, int] = {}
        self._types: dict[int, bytes] = {}
        self.base = base

    @classmethod
    def of(cls, payloads: Iterable[bytes], types: Iterable[bytes]) -> Self:
        """From its :attr:`payloads` and :attr:`types`, for rows that have their provisional ids."""
        overlay = cls()
        for payload in types:
            described = decode(payload)
            assert isinstance(described, Type)
            overlay.see_type(described.type_oid, payload)
        for number, payload in enumerate(payloads):
            relation = decode(payload)
            assert isinstance(relation, Relation)
            overlay.see(relation, payload, number)
        return overlay

    def see_type(self, oid: int, payload: bytes) -> None:
        self._types[oid] = payload

    def see(self, relation: Relation, payload: bytes, sequence: int) -> None:
        """A Relation message is in force for the transaction's own rows from frame ``sequence`` on."""
        place = self._places.setdefault(payload, len(self._places))
        self._seen[payload] = OverlaidRelation(relation, payload, sequence)
        self.add(relation.relation_id, place, sequence)

    def inherit(self, relation_ids: Iterable[int]) -> None:
        """Rows of these relations come; what is in force for them may have been told before the transaction."""
        assert self.base is not None
        for relation_id in set(relation_ids) - self.newest().keys():
            if (payload := self.base.in_force(relation_id)) is not None:
                relation = decode(payload)
                assert isinstance(relation, Relation)
                self.see(relation, payload, -1)

    def tell(self) -> None:
        """The transaction is prepared."""
        if self.base is not None:
            for oid, payload in self._types.items():
                self.base.see_type(oid, payload)
            newest = self.newest()
            for place, seen in enumerate(self._seen.values()):
                if seen.sequence >= 0 and newest[seen.relation.relation_id] == place:
                    self.base.told(seen)

    @property
    def types(self) -> list[bytes]:
        """The Type messages."""
        return list(self._types.values())

    @property
    def relations(self) -> list[Relation]:
        """One for each provisional id."""
        return [seen.relation for seen in self._seen.values()]

    @property
    def payloads(self) -> list[bytes]:
        """Their messages."""
        return list(self._seen)

    def known_to(self, relations: Relations, facts: Sequence[RelationFacts]) -> dict[int, int]:
        """The transaction has committed. Returns the final id of each provisional one.

        ``facts`` is what the catalog says now of :attr:`relations`.
        """
        for oid, payload in self._types.items():
            relations.see_type(oid, payload)
        return {
            place: relations.know(seen.relation, seen.payload, known).schema_id
            for place, (seen, known) in enumerate(zip(self._seen.values(), facts, strict=True))
        }

    def promote(self, into: Relations, facts: Sequence[RelationFacts], sequence: int) -> dict[int, int]:
        """As :meth:`known_to`; the transaction came in blocks, and has committed by frame ``sequence``.

        From here on the server takes these relations for told. Where it told others of one after it told this
        transaction, that stays in force.
        """
        final, newest = self.known_to(into, facts), self.newest()
        for place, (seen, known) in enumerate(zip(self._seen.values(), facts, strict=True)):
            relation_id = seen.relation.relation_id
            if newest[relation_id] == place and seen.sequence > into.came(relation_id):
                into.see(seen.relation, seen.payload, known, sequence)
        return final
