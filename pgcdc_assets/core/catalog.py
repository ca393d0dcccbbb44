"""Facts of the source's catalog about its tables, with a JSON form.

:mod:`pgcdc_assets.source.catalog.tables` reads them. They are saved in the project directory for Dagster, and carried
in the change log with the Relation messages, which lack attribute numbers, keys and type families.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.marks import Files, Marks, TableMarks, marks
from pgcdc_assets.core.names import TableName

ReplicaIdentity = Literal["d", "n", "f", "i"]
"""pg_class.relreplident: default, nothing, full, index."""


@dataclass(frozen=True)
class PgType:
    """A type as pg_type has it. ``base`` is set for domains (already the innermost), ``element`` for arrays."""

    oid: int
    name: str
    typmod: int = -1
    family: str = "b"
    """pg_type.typtype: b base, d domain, e enum, c composite, r range, m multirange, p pseudo."""
    base: PgType | None = None
    element: PgType | None = None
    delimiter: str = ","
    """pg_type.typdelim of the element type; ``;`` for box alone."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        nested = {k: cls.from_json(data[k]) for k in ("base", "element") if data.get(k)}
        return cls(**{**data, **nested})


@dataclass(frozen=True)
class Column:
    attnum: int
    name: str
    type: PgType
    not_null: bool = False
    generated: str = ""
    """pg_attribute.attgenerated: '' none, 's' stored, 'v' virtual."""
    missing: str | None = None
    """pg_attribute.attmissingval as text: the value that rows older than an ADD COLUMN ... DEFAULT have."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "type": PgType.from_json(data["type"])})


@dataclass(frozen=True)
class Leaf:
    """A leaf partition, published as itself and mirrored into its root's table."""

    oid: int
    name: TableName
    files: Files
    attached: Marks = ()
    """Its row in pg_inherits and those above it, by parent: ATTACH PARTITION writes a new one."""
    numbering: tuple[tuple[int, int], ...] | None = None
    """What its columns' attnums are at the root: runs of them, each as its first attnum and what the root's are above.
    One of itself for a partition that was made as one, more where the root had lost columns before. It holds for all
    columns that come and go as long as it stays attached, because they change with the root's alone. None if its
    columns are in another order."""
    listed: Marks = ()
    """Those rows of its table's publications that list it by itself."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        runs = data["numbering"]
        numbering = None if runs is None else tuple((first, above) for first, above in runs)
        attached, listed = marks(data["attached"]), marks(data["listed"])
        return cls(data["oid"], TableName(**data["name"]), Files(**data["files"]), attached, numbering, listed)

    def at_root(self, attnum: int) -> int:
        """The root's attnum of one of its columns, since this was read."""
        assert self.numbering is not None
        return attnum + next((above for first, above in reversed(self.numbering) if first <= attnum), 0)

    def of_root(self, attnum: int) -> int:
        """Its own attnum of one of the root's columns."""
        assert self.numbering is not None
        return attnum - next((above for first, above in reversed(self.numbering) if first + above <= attnum), 0)


@dataclass(frozen=True)
class Outside:
    """A table, or a leaf of one, whose rows are in no stream, whatever publishes it."""

    oid: int
    name: TableName
    why: str
    """What it is, in words: ``is a foreign table``."""
    do: str
    """How its rows could be mirrored."""

    def __str__(self) -> str:
        return f"partition {self.name} {self.why}: its rows are in no stream, and not in the mirror"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "name": TableName(**data["name"])})


@dataclass(frozen=True)
class Lineage:
    """The structures that a mirror has had since its copy: what older messages of the log may still be written in."""

    number: int
    """How many structures followed on that of the copy."""
    copied: int
    """The highest attnum that the copy knew."""
    since: int
    """LSN: from there on the source certainly has the newest structure, and below it the mirror is in no point that was
    not published before."""
    former: tuple[Column, ...] = ()
    """Columns as they were: gone, or under another name or type."""
    left: tuple[int, ...] = ()
    """OIDs of leaves that went: their rows in the log are of no interest to the mirror, which has none of them."""
    restructured: int = 0
    """Of a partitioned table: how many of these structures have other columns. The others have other leaves alone."""
    columns_since: int = 0
    """Of a partitioned table: as ``since``, of its columns; 0 if they are those of the copy."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        former = tuple(Column.from_json(column) for column in data["former"])
        return cls(**{**data, "former": former, "left": tuple(data["left"])})


@dataclass(frozen=True)
class Table:
    """A published table. For a partitioned root ``leaves`` is not empty and holds the storage.

    ``columns`` are the columns that the stream carries (published, generated ones as the server's version has them), in
    attnum order. ``key`` holds the attnums of the mirror's key: the primary key if all its columns are published, else
    the identity index; empty if neither is immediate, valid, whole and not partial.
    """

    oid: int
    name: TableName
    columns: tuple[Column, ...]
    key: tuple[int, ...] = ()
    replica_identity: ReplicaIdentity = "d"
    identity_key: tuple[int, ...] = ()
    """attnums that a key tuple ``K`` carries; empty for FULL and NOTHING."""
    partitioned: bool = False
    leaves: tuple[Leaf, ...] = ()
    via_root: bool = False
    """For a partitioned root: its rows are published as its own, and the stream does not tell their leaves."""
    unpublished: tuple[Leaf, ...] = ()
    """For a partitioned root whose leaves a publication of ours lists one by one: those that it lacks."""
    outside: tuple[Outside, ...] = ()
    """Leaves whose rows logical decoding does not carry. They are not among the ``leaves``, and their rows are not part
    of the mirror. A table that is no root and is such a relation itself stands here alone."""
    root: TableName | None = None
    """For a leaf: the root whose mirror it is written to."""
    root_oid: int | None = None
    """For a leaf: its root's OID."""
    row_filter: str | None = None
    """SQL of the publication's row filter, as pg_publication_tables.rowfilter gives it."""
    updates_seen: bool = True
    """False if it is published for inserts (and truncate) only, for want of a usable replica identity."""
    pages: int = 0
    rows: int = 0
    """Estimates (relpages, reltuples), to size the pieces of a copy."""
    marks: TableMarks = field(default_factory=TableMarks)
    attnums_given: int = 0
    """pg_class.relnatts: how many attnums its columns have got, also those that were dropped. 0 if nothing tells."""
    lineage: Lineage | None = None
    """Of a mirror that has followed changes of the structure; None while it is as it was copied."""
    comments: tuple[tuple[int, str], ...] = ()
    """attnum and comment of each column that has one, in attnum order; attnum 0 stands for the table. They change no
    row, so facts of the log have none. In a stored state they are those that were carried to the mirror last."""

    @property
    def mirror(self) -> TableName:
        return self.root or self.name

    @property
    def multiset(self) -> bool:
        """Whether it has no key and FULL identity: it is then mirrored as a multiset of rows."""
        return not self.key and self.replica_identity == "f"

    @property
    def comment(self) -> str | None:
        """The table's own comment; None if it cannot be read."""
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
        """By name, for each column."""
        found = self._read_comments
        return {column.name: found.get(column.attnum) for column in self.columns}

    @property
    def key_columns(self) -> tuple[Column, ...]:
        by_attnum = {column.attnum: column for column in self.columns}
        return tuple(by_attnum[attnum] for attnum in self.key)

    @property
    def highest_attnum(self) -> int:
        """The highest attnum. No column up to it is new, published or not, because PostgreSQL never reuses an
        attnum."""
        return max(self.attnums_given, *self.live, *(column.attnum for column in self.columns), 0)

    @property
    def descent(self) -> Lineage:
        """Its lineage; that of a copy without any change since where there is none. The copy did not know columns that
        rows have brought."""
        return self.lineage or Lineage(0, self.attnums_given or self.highest_attnum, 0)

    @property
    def live(self) -> tuple[int, ...]:
        """attnums of all its columns, published or not."""
        return tuple(attnum for attnum, _ in self.marks.columns)

    @property
    def columns_since(self) -> Lsn | None:
        """The LSN from which on rows certainly are in the structure that its columns have; None if that is the copy's.
        Where leaves came or went, rows are read as before."""
        if self.lineage is None:
            return None
        since = self.lineage.columns_since if self.partitioned else self.lineage.since
        return Lsn(since) if since or not self.partitioned else None

    @property
    def structure(self) -> str:
        """Which structure its columns have of all that the table ever had; ``0`` for that of any copy."""
        if self.lineage is None or self.columns_since is None:
            return "0"
        number = self.lineage.restructured if self.partitioned else self.lineage.number
        return f"{number}@{self.columns_since:X}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "name": TableName(**data["name"]),
                "columns": tuple(Column.from_json(column) for column in data["columns"]),
                "key": tuple(data["key"]),
                "identity_key": tuple(data["identity_key"]),
                "marks": TableMarks.from_json(data["marks"]),
                "leaves": tuple(Leaf.from_json(leaf) for leaf in data["leaves"]),
                "unpublished": tuple(Leaf.from_json(leaf) for leaf in data["unpublished"]),
                "outside": tuple(Outside.from_json(one) for one in data["outside"]),
                "root": TableName(**data["root"]) if data["root"] else None,
                "lineage": Lineage.from_json(data["lineage"]) if data["lineage"] else None,
                "comments": tuple((attnum, comment) for attnum, comment in data["comments"]),
            }
        )

    def without_volatile(self) -> Self:
        """The facts that decide how rows are decoded and applied: no storage numbers, no estimates."""
        return replace(
            self, leaves=(), via_root=False, unpublished=(), outside=(), pages=0, rows=0, marks=TableMarks(),
            attnums_given=0, lineage=None, comments=(),
        )  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """The identity of the stream that a log holds. It keeps the name that the database had when the log was made."""

    system_identifier: str
    database: str
    slot: str
    database_oid: int = field(default=0, compare=False)
    """A renamed database keeps its OID, and a clone has another one. 0 where it is not known."""

    def is_same(self, other: Identity) -> bool:
        """Whether both are the same stream."""
        return self.slot == other.slot and self.is_of_same_database(other)

    def is_of_same_database(self, other: Identity) -> bool:
        """Whether both are of the same database, whatever its name was."""
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
    """The saved catalog (``.pgcdc/catalog.json``): all Dagster needs to draw the graph."""

    identity: Identity
    publication: str
    server_version: int
    """server_version_num, like 180004."""
    tables: tuple[Table, ...] = field(default_factory=tuple)
    """Mirrored tables: roots and plain tables, not leaves."""
    publications: tuple[str, ...] = ()
    """All publication names to pass as publication_names (the insert-only one is separate)."""
    encoding: str = "UTF8"
    """The encoding in which the source's texts are received."""

    def table(self, name: TableName) -> Table | None:
        return next((table for table in self.tables if table.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "identity": Identity(**data["identity"]),
                "tables": tuple(Table.from_json(table) for table in data["tables"]),
                "publications": tuple(data["publications"]),
            }
        )


def relations_of(tables: Iterable[Table]) -> set[int]:
    """The OIDs of tables and of their leaves."""
    return {oid for table in tables for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}
