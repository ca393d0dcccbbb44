"""The messages of pgoutput, protocol version 1.

Names and fields are those of PostgreSQL's "Logical Replication Message Formats"; LSNs are
:class:`Lsn`, times are microseconds since 1970-01-01 UTC, texts are decoded from UTF-8.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from pgcdc_assets.core.catalog import ReplicaIdentity
from pgcdc_assets.core.lsn import Lsn


class Unchanged(Enum):
    """The one mark of a TOAST value that the server did not send because it did not change (``u``)."""

    UNCHANGED = "u"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED

Value = str | Unchanged | None
"""One column of a row image: its text form, NULL, or not sent."""
TupleData = tuple[Value, ...]
OldKind = Literal["K", "O"]
"""What an old tuple holds: the columns of the replica identity (others NULL, that is absent), or all."""


@dataclass(frozen=True, slots=True)
class Begin:
    final_lsn: Lsn
    """``commit_lsn``: start of the commit record."""
    commit_ts: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    flags: int
    """Always 0: no flag is defined."""
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int


@dataclass(frozen=True, slots=True)
class Origin:
    commit_lsn: Lsn
    """Start of the commit record on the origin server."""
    name: str


@dataclass(frozen=True, slots=True)
class RelationColumn:
    key: bool
    """Part of the replica identity; under FULL every column is."""
    name: str
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class Relation:
    relation_id: int
    schema: str
    """Empty for ``pg_catalog``."""
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """A type that is not built in. For a domain: its own OID under the name of its base type."""

    type_oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Insert:
    relation_id: int
    new: TupleData


@dataclass(frozen=True, slots=True)
class Update:
    relation_id: int
    old_kind: OldKind | None
    old: TupleData | None
    new: TupleData


@dataclass(frozen=True, slots=True)
class Delete:
    relation_id: int
    old_kind: OldKind
    old: TupleData


@dataclass(frozen=True, slots=True)
class Truncate:
    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of ``pg_logical_emit_message``: kind ``M``. If it is not transactional, it may come between
    transactions."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The rollback of a streamed transaction, or of one of its subtransactions.

    PostgreSQL 18 sends it to protocol version 1 too, between transactions: once per subtransaction of a transaction
    that outgrew ``logical_decoding_work_mem`` and was rolled back. Nothing of that transaction is ever sent.
    """

    xid: int
    subxid: int


Message = Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage | StreamAbort
