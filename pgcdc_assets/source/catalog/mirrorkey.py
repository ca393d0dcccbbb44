"""Chooses the columns that are the key of a mirror, from the table's indexes and replica identity. Does no I/O.

The stream identifies an old row by the table's replica identity. So the primary key is the mirror's key only if the
replica identity contains all columns of the primary key. Otherwise the identity index is the mirror's key. Deferrable
keys are not used, because one UPDATE (``SET id = -id``) may then swap the keys of two rows. The mirror applies one net
change for each key, and cannot express such a swap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pgcdc_assets.core.catalog import ReplicaIdentity


@dataclass(frozen=True)
class Index:
    """The primary key, or the index of REPLICA IDENTITY USING INDEX."""

    columns: tuple[str, ...]
    primary: bool
    identity: bool
    usable: bool
    """Whether the index can identify rows: it is valid, unique, immediate, not partial and without expressions."""


@dataclass(frozen=True)
class RowIdentity:
    """How the stream identifies the old rows of one relation."""

    replica_identity: ReplicaIdentity
    primary: tuple[str, ...] = ()
    """Columns of the primary key, if it is usable."""
    index: tuple[str, ...] = ()
    """Columns of the identity index, if it is usable."""

    @classmethod
    def of(cls, replica_identity: ReplicaIdentity, indexes: Iterable[Index]) -> RowIdentity:
        usable = [index for index in indexes if index.usable]
        primary = next((index.columns for index in usable if index.primary), ())
        chosen = next((index.columns for index in usable if index.identity), ())
        return cls(replica_identity, primary, chosen)

    @property
    def carried(self) -> tuple[str, ...]:
        """Columns that a key tuple ``K`` contains. Empty if there is no usable key, or if the replica identity is FULL,
        with which the stream contains the whole old row."""
        return {"d": self.primary, "i": self.index}.get(self.replica_identity, ())

    @property
    def publishable(self) -> bool:
        """Whether PostgreSQL accepts updates and deletes on the table while a publication publishes them."""
        return self.replica_identity == "f" or bool(self.carried)

    def delivers(self, key: Sequence[str]) -> bool:
        """Whether every update and delete in the stream contains at least the ``key`` of the old row."""
        return self.replica_identity == "f" or (bool(self.carried) and set(key) <= set(self.carried))

    def candidates(self) -> list[tuple[str, ...]]:
        return [key for key in (self.primary, self.index) if key]


def mirror_key(own: RowIdentity, senders: Sequence[RowIdentity], published: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns of the mirror's key; () if it has no key. ``own``: the table's identity. ``senders``: the
    identities of the relations under whose names the stream sends the rows, which are the table or its leaves.
    ``published``: the published columns. Only the table's own keys are used, because a key that only the leaves have is
    not unique across the leaves."""
    for key in own.candidates():
        if set(key) <= set(published) and all(sender.delivers(key) for sender in senders):
            return key
    return ()


def followable(own: RowIdentity, senders: Sequence[RowIdentity], published: Sequence[str]) -> bool:
    """Whether updates and deletes can be mirrored: by a key or, with REPLICA IDENTITY FULL, by the whole old row."""
    return bool(mirror_key(own, senders, published)) or all(sender.replica_identity == "f" for sender in senders)
