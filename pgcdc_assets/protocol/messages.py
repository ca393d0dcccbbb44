"""The messages of pgoutput: those of protocol version 1, then what versions 2 to 4 add.

Names and fields are those of PostgreSQL's "Logical Replication Message Formats"; LSNs are
:class:`Lsn`, times are microseconds since 1970-01-01 UTC, texts are decoded from UTF-8. In a name, bytes that are
none stand as :meth:`Encoding.shown` has them: the server's encoding may be another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal

from pgcdc_assets.core.catalog import ReplicaIdentity
from pgcdc_assets.core.encoding import Encoding
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

    def reread(self, encoding: Encoding) -> Relation:
        """With the names as they are in the server's encoding."""
        columns = tuple(replace(column, name=encoding.reread(column.name)) for column in self.columns)
        schema, name = encoding.reread(self.schema), encoding.reread(self.name)
        return replace(self, schema=schema, name=name, columns=columns)


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
    """The rollback of a streamed transaction (``subxid`` is ``xid``), or of one of its subtransactions.

    A released subtransaction of one that is rolled back gets its own. One for a transaction of which no block came
    means nothing: PostgreSQL 18 sends it, to protocol version 1 too, once per subtransaction of a transaction that
    outgrew ``logical_decoding_work_mem`` and was already rolled back when it was decoded.
    """

    xid: int
    subxid: int
    abort_lsn: Lsn | None = None
    abort_ts: int | None = None
    """Both only where streaming is parallel. Where the transaction has an origin, the time is the origin's."""

    @property
    def whole(self) -> bool:
        """Whether nothing is left of the transaction."""
        return self.subxid == self.xid


Message = Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage | StreamAbort
"""What protocol version 1 sends."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A block of a transaction that is still in progress begins."""

    xid: int
    """Of the top transaction."""
    first: bool
    """What came of this xid before is void: a new decoder sends the transaction again from its start."""


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The block ends."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The blocks of a transaction, less its aborted subtransactions, are one that commits here."""

    xid: int
    flags: int
    """Always 0: no flag is defined."""
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """In place of Begin, where a transaction is sent as it is prepared."""

    prepare_lsn: Lsn
    """Start of the PREPARE's record."""
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """In place of Commit. Its content is never sent again once ``end_lsn`` is confirmed."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """As Prepare, of a transaction whose content came in blocks."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED: the transaction belongs where this commits."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED. It may come for a prepare that was never sent."""

    flags: int
    prepare_end_lsn: Lsn
    """Tells apart the prepares of one gid, which may be used again."""
    rollback_end_lsn: Lsn
    prepare_ts: int
    rollback_ts: int
    xid: int
    gid: str


StreamMessage = StreamStart | StreamStop | StreamCommit
TwoPhaseMessage = BeginPrepare | Prepare | StreamPrepare | CommitPrepared | RollbackPrepared
AnyMessage = Message | StreamMessage | TwoPhaseMessage
"""What any version sends."""
