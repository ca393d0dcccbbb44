"""The relations of a stream: the Relation message and the catalog facts that apply to each row. A Relation message
applies to the rows that follow it, until the next Relation message of the same relation."""

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
    """One version of a relation: its Relation message, with catalog facts. Every batch that has rows of this version
    stores this record."""

    schema_id: int
    relation_id: int
    name: TableName
    payload: bytes
    """The Relation message, byte for byte."""
    facts: RelationFacts
    types: tuple[bytes, ...]
    """The Type messages for the types of its columns. PostgreSQL sends no Type message for a built-in type."""


class _Versions:
    """The ids of the versions of each relation (:class:`RelationRecord`), each with the number of the first frame to
    which the version applies."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[list[int], list[int]]] = {}

    def add(self, relation_id: int, schema_id: int, sequence: int) -> None:
        """Add a version that applies from frame number ``sequence`` on, which must be higher than in earlier calls for
        the same relation."""
        since, schema_ids = self._versions.setdefault(relation_id, ([], []))
        if not schema_ids or schema_ids[-1] != schema_id:
            # Append to ``since`` last: the writing thread first searches ``since``, and then needs the entry in
            # ``schema_ids``.
            schema_ids.append(schema_id)
            since.append(sequence)

    def newest(self) -> dict[int, int]:
        """Maps each relation to the id of its newest version."""
        return {relation_id: schema_ids[-1] for relation_id, (_, schema_ids) in self._versions.items()}

    def schema_ids(self, relation_ids: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of the version that applies to each row. Raises ProtocolError for a row that has no earlier Relation
        message."""
        if len(relation_ids) and (relation_ids == relation_ids[0]).all():
            # A large transaction often writes to only one table. To find the distinct relations would double the time.
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
            raise ProtocolError(f"rows arrived for relation {relation_id} before its Relation message")
        if len(schema_ids) == 1:
            return np.full(len(sequence), schema_ids[0], dtype=np.int64)
        version = np.searchsorted(np.asarray(since), sequence, side="right") - 1
        return np.asarray(schema_ids, dtype=np.int64)[version]


class Relations(_Versions):
    """The relations of one connection. The receiving thread adds versions, the writing thread reads them. A version
    never changes after it was added."""

    def __init__(self) -> None:
        super().__init__()
        self._types: dict[int, bytes] = {}
        self._records: dict[int, RelationRecord] = {}
        self._came: dict[int, int] = {}
        """Maps each relation to the frame number of its current Relation message."""
        self._undescribed: dict[int, OverlaidRelation] = {}
        """The current Relation messages for which the catalog facts must still be read, by relation."""

    def see_type(self, oid: int, payload: bytes) -> None:
        self._types[oid] = payload

    def see(
        self, relation: Relation, payload: bytes, facts: RelationFacts, sequence: int, since: int | None = None
    ) -> RelationRecord:
        """Make the Relation message with frame number ``sequence`` the current message of its table. ``since``: the
        number of the first frame to which it applies, by default ``sequence``."""
        record = self.know(relation, payload, facts)
        self.add(relation.relation_id, record.schema_id, sequence if since is None else since)
        self._came[relation.relation_id] = sequence
        self._undescribed.pop(relation.relation_id, None)
        return record

    def see_undescribed(self, seen: OverlaidRelation) -> None:
        """Make a Relation message of a prepared transaction the current message of its table, because the server does
        not send this message again. The catalog facts are read later: the prepared transaction may lock the table until
        it ends, and the catalog query would wait for this lock. Once another transaction sends rows of the table, the
        table is not locked, and the facts can be read."""
        self._came[seen.relation.relation_id] = seen.sequence
        self._undescribed[seen.relation.relation_id] = seen

    @property
    def any_undescribed(self) -> bool:
        return bool(self._undescribed)

    def undescribed(self, relation_ids: Iterable[int]) -> list[OverlaidRelation]:
        """The current Relation messages of the given relations for which the catalog must still be read."""
        return [self._undescribed[one] for one in relation_ids if one in self._undescribed]

    def in_force(self, relation_id: int) -> bytes | None:
        """The current Relation message of a relation; None if the server has sent no Relation message for it."""
        if relation_id in self._undescribed:
            return self._undescribed[relation_id].payload
        _, schema_ids = self._versions.get(relation_id, ((), ()))
        return self._records[schema_ids[-1]].payload if schema_ids else None

    def know(self, relation: Relation, payload: bytes, facts: RelationFacts) -> RelationRecord:
        """Store a version for :meth:`record`. The version applies to no rows until :meth:`add` is called."""
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
        """The frame number of the relation's current Relation message; -1 if there is no message."""
        return self._came.get(relation_id, -1)


@dataclass(frozen=True)
class OverlaidRelation:
    """A Relation message that the server sent within a transaction in progress."""

    relation: Relation
    payload: bytes
    sequence: int
    """The number of the message's frame."""


class Overlay(_Versions):
    """The relations of one transaction in progress, as this transaction sees them. The transaction may have altered
    tables, and nobody else sees this before its commit. A final ``schema_id`` depends on the catalog, so until the
    commit each version has a provisional id: 0, 1, 2 and so on."""

    def __init__(self, base: Relations | None = None) -> None:
        """``base``: the relations of the connection, given only for a transaction that is sent in one piece at its
        PREPARE. In such a transaction the server does not repeat Relation messages that it has sent before. The
        transaction's own Relation messages also apply to later transactions."""
        super().__init__()
        self._seen: dict[bytes, OverlaidRelation] = {}
        """Relation messages, by their bytes. The position of a message in this dict is the provisional id of its
        version."""
        self._places: dict[bytes, int] = {}
        self._types: dict[int, bytes] = {}
        self.base = base

    @classmethod
    def of(cls, payloads: Iterable[bytes], types: Iterable[bytes]) -> Self:
        """Makes an overlay from stored :attr:`payloads` and :attr:`types`. The provisional ids stay the same."""
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
        """Add a Relation message. It applies to the transaction's own rows from frame number ``sequence`` on."""
        place = self._places.setdefault(payload, len(self._places))
        self._seen[payload] = OverlaidRelation(relation, payload, sequence)
        self.add(relation.relation_id, place, sequence)

    def inherit(self, relation_ids: Iterable[int]) -> None:
        """Copy the current Relation messages of these relations from ``base``, except for relations whose Relation
        message was sent within the transaction."""
        assert self.base is not None
        for relation_id in set(relation_ids) - self.newest().keys():
            if (payload := self.base.in_force(relation_id)) is not None:
                relation = decode(payload)
                assert isinstance(relation, Relation)
                self.see(relation, payload, -1)

    def pass_on(self) -> None:
        """At the PREPARE: add the transaction's Relation and Type messages to ``base``, if there is a ``base``."""
        if self.base is not None:
            for oid, payload in self._types.items():
                self.base.see_type(oid, payload)
            newest = self.newest()
            for place, seen in enumerate(self._seen.values()):
                if seen.sequence >= 0 and newest[seen.relation.relation_id] == place:
                    self.base.see_undescribed(seen)

    @property
    def types(self) -> list[bytes]:
        """The Type messages, as bytes."""
        return list(self._types.values())

    @property
    def relations(self) -> list[Relation]:
        """The decoded Relation messages, in the order of their provisional ids."""
        return [seen.relation for seen in self._seen.values()]

    @property
    def payloads(self) -> list[bytes]:
        """The Relation messages, as bytes, in the order of their provisional ids."""
        return list(self._seen)

    def known_to(self, relations: Relations, facts: Sequence[RelationFacts]) -> dict[int, int]:
        """Called after the transaction's commit. Adds the transaction's versions to ``relations``, with their final
        ids, and returns a map from provisional to final ids. ``facts``: the catalog's facts for each of
        :attr:`Overlay.relations`."""
        for oid, payload in self._types.items():
            relations.see_type(oid, payload)
        return {
            place: relations.know(seen.relation, seen.payload, known).schema_id
            for place, (seen, known) in enumerate(zip(self._seen.values(), facts, strict=True))
        }

    def promote(self, into: Relations, facts: Sequence[RelationFacts], sequence: int) -> dict[int, int]:
        """Like :meth:`known_to`, for a transaction that was sent in blocks and whose Stream Commit is frame number
        ``sequence``. The server does not send its Relation messages again. So each of them becomes the current message
        of its relation, unless the current message was sent later."""
        final, newest = self.known_to(into, facts), self.newest()
        for place, (seen, known) in enumerate(zip(self._seen.values(), facts, strict=True)):
            relation_id = seen.relation.relation_id
            if newest[relation_id] == place and seen.sequence > into.came(relation_id):
                into.see(seen.relation, seen.payload, known, seen.sequence, since=sequence)
        return final
