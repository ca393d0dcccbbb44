"""The messages of pgoutput as dataclasses: first protocol version 1, then the messages that versions 2 to 4 add. Names
and fields are as in PostgreSQL's "Logical Replication Message Formats". Times are microseconds since 1970-01-01 UTC.
Names of schemas, tables and columns are decoded as UTF-8; bytes that are not UTF-8 are replaced as in
:meth:`Encoding.shown`."""

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
"""The value of one column in a tuple: its text form, None for NULL, or UNCHANGED if it is a TOAST value that was not
sent."""
TupleData = tuple[Value, ...]
OldKind = Literal["K", "O"]
"""Kinds of old tuples. ``O`` contains all columns. ``K`` contains only the columns of the replica identity; PostgreSQL
sends NULL for the other columns."""


@dataclass(frozen=True, slots=True)
class Begin:
    final_lsn: Lsn
    """The transaction's ``commit_lsn``, which is the start of its commit record."""
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
    """Whether the column is part of the replica identity. With FULL, this is true for every column."""
    name: str
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class Relation:
    relation_id: int
    schema: str
    """The schema's name. The empty string means ``pg_catalog``."""
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]

    def reread(self, encoding: Encoding) -> Relation:
        """A copy of this message, with its names decoded in the server's encoding."""
        columns = tuple(replace(column, name=encoding.reread(column.name)) for column in self.columns)
        schema, name = encoding.reread(self.schema), encoding.reread(self.name)
        return replace(self, schema=schema, name=name, columns=columns)


@dataclass(frozen=True, slots=True)
class Type:
    """Names a type that is not built in. For a domain, ``type_oid`` is the domain's OID, but the name is the name of
    its base type."""

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
    """A message that ``pg_logical_emit_message`` wrote to the WAL. If it is not transactional, the server may send it
    between transactions."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The rollback of a transaction that was sent in progress (``subxid`` equals ``xid``), or of one of its
    subtransactions. If a subtransaction is rolled back, the server also sends a Stream Abort for each subtransaction
    inside it that was released.

    A Stream Abort of a transaction that was never sent must be ignored. PostgreSQL 18 sends such messages even in
    protocol version 1: if a transaction became larger than ``logical_decoding_work_mem`` and was rolled back before it
    was decoded, the server sends a Stream Abort for each subtransaction."""

    xid: int
    subxid: int
    abort_lsn: Lsn | None = None
    abort_ts: int | None = None
    """``abort_lsn`` and ``abort_ts`` are sent only if the option streaming is parallel, and are None otherwise. If the
    transaction has an origin, ``abort_ts`` is a time of the origin's clock."""

    @property
    def whole(self) -> bool:
        """Whether the complete transaction is rolled back."""
        return self.subxid == self.xid


Message = Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage | StreamAbort
"""All messages of protocol version 1."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The beginning of a block of a transaction that is still in progress."""

    xid: int
    """The xid of the top transaction."""
    first: bool
    """Whether this is the first block of the transaction. If so, earlier blocks with this xid must be dropped, because
    the server sends the transaction again from its start."""


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The end of a block."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The commit of a transaction that was sent in progress. Rows of its aborted subtransactions were also sent, and
    are not part of the commit."""

    xid: int
    flags: int
    """Always 0: no flag is defined."""
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """Sent instead of Begin if a transaction is sent at its PREPARE."""

    prepare_lsn: Lsn
    """Start of the PREPARE record."""
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Sent instead of Commit if a transaction is sent at its PREPARE. After ``end_lsn`` is confirmed, the server does
    not send the transaction's content again."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare(Prepare):
    """Like Prepare, for a transaction whose content was sent in blocks."""


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED. The LSN of this commit, not of the PREPARE, decides the transaction's place in commit order."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED. The server may send it for a transaction whose PREPARE it never sent."""

    flags: int
    prepare_end_lsn: Lsn
    """The end of the PREPARE record. It identifies the PREPARE, because a gid may be used again."""
    rollback_end_lsn: Lsn
    prepare_ts: int
    rollback_ts: int
    xid: int
    gid: str


StreamMessage = StreamStart | StreamStop | StreamCommit
TwoPhaseMessage = BeginPrepare | Prepare | CommitPrepared | RollbackPrepared
AnyMessage = Message | StreamMessage | TwoPhaseMessage
"""All messages of all versions."""
