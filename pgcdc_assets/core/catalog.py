"""Facts of the source's catalog about its tables, with a JSON form. :mod:`pgcdc_assets.source.catalog.tables` reads
these facts from the source. They are saved in the project directory, for Dagster. The change log stores similar facts
with each Relation message (:class:`pgcdc_assets.protocol.shape.RelationFacts`), because Relation messages lack
attribute numbers, keys and type families."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Files, Marks, TableMarks
from pgcdc_assets.core.names import TableName

T = TypeVar("T")
FromJson = Callable[[Any], Any]
ReplicaIdentity = Literal["d", "n", "f", "i"]
"""pg_class.relreplident: default, nothing, full, index."""


@dataclass(frozen=True)
class PgType:
    """A type as in pg_type. ``base`` is a domain's innermost base type, ``element`` an array's element type."""

    oid: int
    name: str
    typmod: int = -1
    family: str = "b"
    """pg_type.typtype: b base, d domain, e enum, c composite, r range, m multirange, p pseudo."""
    base: PgType | None = None
    element: PgType | None = None
    delimiter: str = ","
    """pg_type.typdelim of the element type: ``;`` for box, ``,`` for all other types."""

    @property
    def stored(self) -> PgType:
        """The base type of a domain, otherwise this type. Values of a domain have the text form of its base type."""
        return self if self.base is None else self.base.stored

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return _from_json(cls, data)


@dataclass(frozen=True)
class Column:
    attnum: int
    name: str
    type: PgType
    not_null: bool = False
    generated: str = ""
    """pg_attribute.attgenerated: '' none, 's' stored, 'v' virtual."""
    missing: str | None = None
    """pg_attribute.attmissingval as text: the column's value in rows that were written before ADD COLUMN ...
    DEFAULT."""


@dataclass(frozen=True)
class Leaf:
    """A leaf partition of a partitioned table (its root). Its rows are written into the mirror of the root."""

    oid: int
    name: TableName
    files: Files
    attached: Marks = ()
    """The pg_inherits rows of the leaf and of its ancestors, by parent. A new row shows an ATTACH PARTITION."""
    numbering: tuple[tuple[int, int], ...] | None = None
    """Maps the leaf's attnums to the root's attnums, in groups of consecutive attnums. A group is a pair: its first
    attnum at the leaf, and the number to add to get the root's attnum. None if the leaf's columns are in a different
    order than the root's columns. A table that was created as a partition has one group, or more groups if the root had
    dropped columns before. While the leaf is attached, added or dropped columns do not change the mapping, because a
    partition's columns change only together with the root's columns."""
    listed: Marks = ()
    """The catalog rows with which publications list this leaf by its own name."""

    def at_root(self, attnum: int) -> int:
        """The root's attnum of a leaf's column."""
        assert self.numbering is not None
        return attnum + next((above for first, above in reversed(self.numbering) if first <= attnum), 0)

    def of_root(self, attnum: int) -> int:
        """The leaf's attnum of a root's column."""
        assert self.numbering is not None
        return attnum - next((above for first, above in reversed(self.numbering) if first + above <= attnum), 0)


@dataclass(frozen=True)
class Outside:
    """A table or leaf partition whose rows logical decoding never sends, even if a publication lists it: for example, a
    foreign table."""

    oid: int
    name: TableName
    why: str
    """The kind of relation, in words: ``is a foreign table``."""
    do: str
    """What to do so that the rows can be mirrored."""

    def __str__(self) -> str:
        return f"partition {self.name} {self.why}: its rows are not replicated"


@dataclass(frozen=True)
class Lineage:
    """The structures that a mirror has had since its table was copied. Messages in the log may use any of these
    structures."""

    number: int
    """How many times the structure has changed since the copy."""
    copied: int
    """The highest attnum of all columns, dropped columns included, when the table was copied."""
    since: int
    """At and above this LSN, the source certainly has the newest structure. New consistent points below this LSN do not
    list the mirror."""
    former: tuple[Column, ...] = ()
    """Former columns: columns that were dropped since the copy, and columns with their earlier names and types."""
    left: tuple[int, ...] = ()
    """OIDs of leaf partitions that were detached or dropped. Rows of these leaves in the log are not applied to the
    mirror."""
    restructured: int = 0
    """For a partitioned table: how many of the changes (``number``) concern columns. All other changes concern only
    leaves."""
    columns_since: int = 0
    """For a partitioned table: like ``since``, but only for changes of columns. 0 if there was no such change."""


@dataclass(frozen=True)
class Table:
    """A published table. For a partitioned table (a root), ``leaves`` lists the partitions that store its rows.

    ``columns`` are the columns that the stream contains, in attnum order. Generated columns are included if the
    server's version publishes them. ``key`` contains the attnums of the mirror's key: the primary key if all its
    columns are published, otherwise the identity index. An index is used only if it is valid, immediate, not partial
    and without expressions. ``key`` is empty if neither index is used.
    """

    oid: int
    name: TableName
    columns: tuple[Column, ...]
    key: tuple[int, ...] = ()
    replica_identity: ReplicaIdentity = "d"
    """For a root: FULL only if all its leaves have it. ALTER TABLE ... REPLICA IDENTITY does not change leaves."""
    identity_key: tuple[int, ...] = ()
    """attnums of the columns that a key tuple ``K`` contains; empty for the replica identities FULL and NOTHING."""
    partitioned: bool = False
    leaves: tuple[Leaf, ...] = ()
    via_root: bool = False
    """For a partitioned root: its rows are published under the root's name, so the stream does not name their leaf."""
    unpublished: tuple[Leaf, ...] = ()
    """For a partitioned root whose leaves are published one by one: the leaves that the publication lacks."""
    uneven: TableName | None = None
    """For a partitioned root whose leaves are published one by one: a leaf that is published with another row filter,
    or with other columns, than the first leaf."""
    outside: tuple[Outside, ...] = ()
    """Leaves whose rows logical decoding never sends. These leaves are not in ``leaves``, and their rows are not in the
    mirror. If the table is not a root, and logical decoding never sends its own rows, this contains only the table."""
    root: TableName | None = None
    """For a leaf: the root into whose mirror the leaf's rows are written."""
    root_oid: int | None = None
    """For a leaf: its root's OID."""
    row_filter: str | None = None
    """The publication's row filter in SQL, from pg_publication_tables.rowfilter."""
    updates_seen: bool = True
    """False if only inserts (and truncate) of the table are published, because it has no usable replica identity."""
    pages: int = 0
    rows: int = 0
    """``pages`` and ``rows``: estimates (relpages, reltuples), from which the number of pieces of a copy is
    computed."""
    marks: TableMarks = field(default_factory=TableMarks)
    attnums_given: int = 0
    """pg_class.relnatts: how many attnums were given to columns, dropped columns included. 0 if it is not known."""
    lineage: Lineage | None = None
    """Set if the mirror has followed changes of the structure; None while it has the structure of the copy."""
    comments: tuple[tuple[int, str], ...] = ()
    """attnum and comment of each column that has a comment, in attnum order; attnum 0 is the table itself. The catalog
    facts in the log have no comments, because comments change no row. In the ledger of table states, these are the
    comments that were last written to the mirror."""

    @property
    def mirror(self) -> TableName:
        return self.root or self.name

    @property
    def multiset(self) -> bool:
        """Whether the table is mirrored as a multiset of rows, because it has no key and FULL identity."""
        return not self.key and self.replica_identity == "f"

    @property
    def comment(self) -> str | None:
        """The table's own comment; None if there is no comment, or if it cannot be read."""
        return self._read_comments.get(0)

    @property
    def _read_comments(self) -> dict[int, str]:
        return {attnum: comment for attnum, comment in self.comments if not marked(comment)}

    @property
    def comments_read(self) -> bool:
        """Whether all comments are text in the source's encoding."""
        return len(self._read_comments) == len(self.comments)

    @property
    def column_comments(self) -> dict[str, str | None]:
        """Each column's comment, by column name."""
        found = self._read_comments
        return {column.name: found.get(column.attnum) for column in self.columns}

    @property
    def key_columns(self) -> tuple[Column, ...]:
        by_attnum = {column.attnum: column for column in self.columns}
        return tuple(by_attnum[attnum] for attnum in self.key)

    @property
    def highest_attnum(self) -> int:
        """The highest attnum ever given. PostgreSQL never reuses an attnum, so a new column has a higher attnum."""
        return max(self.attnums_given, *self.live, *(column.attnum for column in self.columns), 0)

    @property
    def descent(self) -> Lineage:
        """``lineage``, or a new lineage if the structure has not changed since the copy. The new lineage takes the
        highest attnum at the copy from ``attnums_given``. It cannot be taken from ``columns``, because columns that
        appeared in the log after the copy may have been added there."""
        return self.lineage or Lineage(0, self.attnums_given or self.highest_attnum, 0)

    @property
    def live(self) -> tuple[int, ...]:
        """attnums of all columns of the table, published or not."""
        return tuple(attnum for attnum, _ in self.marks.columns)

    @property
    def since(self) -> Lsn:
        """The lineage's ``since``; ZERO if the structure has not changed since the copy."""
        return ZERO if self.lineage is None else Lsn(self.lineage.since)

    @property
    def columns_since(self) -> Lsn | None:
        """The LSN at and above which rows certainly have the structure of ``columns``; None if ``columns`` have not
        changed since the copy. Changes of a root's leaves are not counted here, because they do not change how rows are
        read."""
        if self.lineage is None:
            return None
        since = self.lineage.columns_since if self.partitioned else self.lineage.since
        return Lsn(since) if since or not self.partitioned else None

    @property
    def structure(self) -> str:
        """A text that identifies the structure of ``columns`` among all structures that the table has had. ``0`` if the
        columns have not changed since the copy."""
        if self.lineage is None or self.columns_since is None:
            return "0"
        number = self.lineage.restructured if self.partitioned else self.lineage.number
        return f"{number}@{self.columns_since:X}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return _from_json(cls, data)

    def without_volatile(self) -> Self:
        """The table with only the facts that decide how a row of it is decoded and applied. All other facts, such as
        marks, estimates and comments, are set to their defaults."""
        return replace(
            self, leaves=(), via_root=False, unpublished=(), outside=(), pages=0, rows=0, marks=TableMarks(),
            attnums_given=0, lineage=None, comments=(),
        )  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """The identity of the replication stream that a change log stores. ``database``: the database's name when the log
    was created."""

    system_identifier: str
    database: str
    slot: str
    database_oid: int = field(default=0, compare=False)
    """The database's OID; 0 if it is not known. A renamed database keeps its OID. A clone has a different OID."""

    def is_same(self, other: Identity) -> bool:
        """Whether both are identities of the same replication stream, even if the database was renamed."""
        return self.slot == other.slot and self.is_of_same_database(other)

    def is_of_same_database(self, other: Identity) -> bool:
        """Whether both streams come from the same database, even if the database was renamed."""
        if self.system_identifier != other.system_identifier:
            return False
        if self.database_oid and other.database_oid:
            return self.database_oid == other.database_oid
        return self.database == other.database

    def app_id(self, *parts: str) -> str:
        """An application id for Delta's ``txn`` action: ``pgcdc/<system>/<database>/<slot>[/...]``."""
        return "/".join(("pgcdc", self.system_identifier, self.database, self.slot, *parts))


@dataclass(frozen=True)
class Catalog:
    """The saved catalog (``.pgcdc/catalog.json``): everything that Dagster needs to draw the asset graph."""

    identity: Identity
    publication: str
    server_version: int
    """server_version_num, like 180004."""
    tables: tuple[Table, ...] = field(default_factory=tuple)
    """Mirrored tables: partitioned tables and plain tables, without partitions."""
    publications: tuple[str, ...] = ()
    """The names for pgoutput's option ``publication_names``: the publication, and the insert-only publication if there
    is one."""
    encoding: str = "UTF8"
    """The encoding in which the source's texts are received."""

    def table(self, name: TableName) -> Table | None:
        return next((table for table in self.tables if table.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return _from_json(cls, data)


@cache
def _nested(kind: Callable[..., Any]) -> dict[str, FromJson]:
    """The fields of a dataclass whose values have another form in JSON, with functions that read this form."""
    readers = ((name, _reader(hint)) for name, hint in get_type_hints(kind).items())
    return {name: read for name, read in readers if read is not None}


def _reader(kind: Any) -> FromJson | None:
    """Makes the function that reads a value of this type; None if the value has the same form in JSON."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(_from_json, kind)
    if origin is tuple and parts[-1] is not ...:
        return lambda given: tuple(value for value, _ in zip(given, parts, strict=True))
    inner = _reader(parts[0]) if origin in (tuple, UnionType) else None
    if origin is tuple:
        return tuple if inner is None else partial(_each, inner)
    return None if inner is None else partial(_optional, inner)


def _each(read: FromJson, given: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(read, given))


def _optional(read: FromJson, given: Any) -> Any:
    return None if given is None else read(given)


def _from_json(kind: Callable[..., T], given: dict[str, Any]) -> T:
    """The inverse of :func:`dataclasses.asdict`. Tuples are lists in JSON, and dataclasses are objects. A field that
    the JSON lacks has its default."""
    return kind(**{**given, **{name: read(given[name]) for name, read in _nested(kind).items() if name in given}})


def relations_of(tables: Iterable[Table]) -> set[int]:
    """The OIDs of tables and of their leaves."""
    return {oid for table in tables for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}
