"""The choice of a mirror's key: pure rules over the facts of indexes and replica identities.

The stream names an old row by its replica identity. So the key is the primary key only if that identity carries it,
else the identity index. A deferrable key does not count: with it ``SET id = -id`` lets two rows swap keys within one
statement, which no net effect per key can follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pgcdc_assets.core.catalog import ReplicaIdentity


@dataclass(frozen=True)
class Index:
    """The primary key, or the index of REPLICA IDENTITY USING INDEX. ``columns``: key columns' names."""

    columns: tuple[str, ...]
    primary: bool
    identity: bool
    usable: bool
    """Valid, unique, immediate, not partial, without expressions."""


@dataclass(frozen=True)
class RowIdentity:
    """How the stream names old rows of one relation."""

    replica_identity: ReplicaIdentity
    primary: tuple[str, ...] = ()
    """Columns of a usable primary key."""
    index: tuple[str, ...] = ()
    """Columns of a usable identity index."""

    @classmethod
    def of(cls, replica_identity: ReplicaIdentity, indexes: Iterable[Index]) -> RowIdentity:
        usable = [index for index in indexes if index.usable]
        primary = next((index.columns for index in usable if index.primary), ())
        chosen = next((index.columns for index in usable if index.identity), ())
        return cls(replica_identity, primary, chosen)

    @property
    def carried(self) -> tuple[str, ...]:
        """Columns of a key tuple ``K``; none for FULL (whole rows) and without an identity."""
        return {"d": self.primary, "i": self.index}.get(self.replica_identity, ())

    @property
    def publishable(self) -> bool:
        """Whether PostgreSQL accepts updates of the table if these are published."""
        return self.replica_identity == "f" or bool(self.carried)

    def delivers(self, key: Sequence[str]) -> bool:
        """Whether every update and delete names its old row by at least ``key``."""
        return self.replica_identity == "f" or (bool(self.carried) and set(key) <= set(self.carried))

    def candidates(self) -> list[tuple[str, ...]]:
        return [key for key in (self.primary, self.index) if key]


def mirror_key(own: RowIdentity, senders: Sequence[RowIdentity], published: Sequence[str]) -> tuple[str, ...]:
    """The key of a table whose rows arrive from ``senders`` (itself, or its leaves); () for none.

    Only a root's own candidates count: a key that only leaves have is not unique over all of them.
    """
    for key in own.candidates():
        if set(key) <= set(published) and all(sender.delivers(key) for sender in senders):
            return key
    return ()


def followable(own: RowIdentity, senders: Sequence[RowIdentity], published: Sequence[str]) -> bool:
    """Whether updates and deletes can be mirrored: by a key, or as a multiset of whole rows."""
    return bool(mirror_key(own, senders, published)) or all(sender.replica_identity == "f" for sender in senders)
