"""The messages of pgoutput: protocol version 1 first, then the additions of versions 2 to 4. Names and fields are as in
PostgreSQL's "Logical Replication Message Formats". Times are microseconds since 1970-01-01 UTC. Texts are read as
UTF-8. If the server has another encoding, :meth:`Encoding.shown` writes the bytes that are not UTF-8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal

from pgcdc_assets.core.catalog import ReplicaIdentity
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.lsn import Lsn


class Unchanged(Enum):
    """Marks a TOAST value that the server did not send because it did not change (``u``)."""

    UNCHANGED = "u"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED

Value = str | Unchanged | None
"""One column of a row image: its text form, NULL, or not sent."""
TupleData = tuple[Value, ...]
OldKind = Literal["K", "O"]
"""Columns of an old tuple: ``K`` only the replica identity (other columns are NULL, which means absent); ``O`` all."""


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
    """Whether the column is part of the replica identity. Under FULL every column is."""
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

    def reread(self, encoding: Encoding) -> Relation:
        """The same message, with its names decoded in the server's encoding."""
        columns = tuple(replace(column, name=encoding.reread(column.name)) for column in self.columns)
        schema, name = encoding.reread(self.schema), encoding.reread(self.name)
        return replace(self, schema=schema, name=name, columns=columns)


@dataclass(frozen=True, slots=True)
class Type:
    """A type that is not built in. For a domain: the domain's OID, with the name of its base type."""

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
    """A message of ``pg_logical_emit_message``. If it is not transactional, it may come between transactions."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The rollback of a streamed transaction (``subxid`` is ``xid``), or of one of its subtransactions. If a
    subtransaction is rolled back, each subtransaction that was released into it gets its own Stream Abort. A Stream
    Abort of a transaction without blocks has no meaning. PostgreSQL 18 sends such Stream Aborts, in protocol version 1
    too: one per subtransaction of a transaction that outgrew ``logical_decoding_work_mem`` and was rolled back before
    it was decoded."""

    xid: int
    subxid: int
    abort_lsn: Lsn | None = None
    abort_ts: int | None = None
    """``abort_lsn`` and ``abort_ts`` are sent only if streaming is parallel. If there is an origin, the time is from
    the origin's clock."""

    @property
    def whole(self) -> bool:
        """Whether the whole transaction is rolled back."""
        return self.subxid == self.xid


Message = Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage | StreamAbort
"""All messages of protocol version 1."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The beginning of a block of a transaction that is still in progress."""

    xid: int
    """The xid of the top transaction."""
    first: bool
    """Whether this is the first block of the xid. Earlier blocks of the xid are then void: the server sends the
    transaction again."""


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The end of a block."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The commit of a streamed transaction. The rows of its aborted subtransactions do not count."""

    xid: int
    flags: int
    """Always 0: no flag is defined."""
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """Replaces Begin if a transaction is sent at its PREPARE."""

    prepare_lsn: Lsn
    """Start of the PREPARE record."""
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Replaces Commit if a transaction is sent at its PREPARE. Never sent again once ``end_lsn`` is confirmed."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """Like Prepare, for a transaction whose content came in blocks."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED. The transaction's place in commit order is this commit, not its PREPARE."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED. It may come for a transaction whose PREPARE was never sent."""

    flags: int
    prepare_end_lsn: Lsn
    """Identifies the PREPARE, because a gid may be used again."""
    rollback_end_lsn: Lsn
    prepare_ts: int
    rollback_ts: int
    xid: int
    gid: str


StreamMessage = StreamStart | StreamStop | StreamCommit
TwoPhaseMessage = BeginPrepare | Prepare | StreamPrepare | CommitPrepared | RollbackPrepared
AnyMessage = Message | StreamMessage | TwoPhaseMessage
"""All messages of all versions."""
