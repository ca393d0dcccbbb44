"""Builds a :class:`Table` for each mirror, from catalog rows that were already read. Does no I/O.

The stream sends each row under the name of a relation, the row's **sender**: a plain table, a leaf partition, or a
partitioned root that is published via its root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pgcdc_assets.core.catalog import Column, Leaf, ReplicaIdentity, Table
from pgcdc_assets.core.marks import Marks, TableMarks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.pgclass import CatalogRelation, Comments, RowIdentity, followable, mirror_key
from pgcdc_assets.source.catalog.pgtypes import PgTypes
from pgcdc_assets.source.catalog.published import GENERATED_SINCE, UNREAD, PublicationRows, Published


@dataclass(frozen=True)
class Assembly:
    """The catalog rows from which the tables are built. Relations are identified by their OIDs. ``leaves``: the leaves
    of each partitioned table. ``places``: see :func:`read_places`. ``attached``: see :attr:`Leaf.attached`."""

    server_version: int
    published: Mapping[int, Published]
    relations: Mapping[int, CatalogRelation]
    leaves: Mapping[int, tuple[int, ...]]
    rows: PublicationRows = field(default_factory=lambda: PublicationRows({}, {}, {}, frozenset()))
    places: Mapping[int, int] = field(default_factory=dict)
    attached: Mapping[int, Marks] = field(default_factory=dict)
    types: PgTypes = field(default_factory=PgTypes)
    comments: Mapping[int, Comments] = field(default_factory=dict)

    def tables(self) -> list[Table]:
        made: dict[TableName, Table] = {}
        grouped: dict[int, list[CatalogRelation]] = defaultdict(list)
        for oid in self.published:
            relation = self.relations.get(oid)
            if relation is None:
                continue
            if relation.root and not relation.partitioned:
                grouped[relation.root].append(relation)
            else:
                made[relation.name] = self.plain(relation)
        for root, senders in grouped.items():
            if root in self.relations and self.relations[root].name not in made:
                made[self.relations[root].name] = self.root(self.relations[root], senders)
        return [made[name] for name in sorted(made)]

    def plain(self, relation: CatalogRelation) -> Table:
        """Builds a table that is published under its own name. If it is partitioned, its leaves store its rows."""
        rows = [leaf for leaf in self._every_leaf(relation) if leaf.outside is None]
        senders = [relation.identity, *(leaf.identity for leaf in rows)]
        return self._table(relation, relation.oid, senders, rows)

    def root(self, relation: CatalogRelation, senders: Sequence[CatalogRelation]) -> Table:
        """Builds a partitioned table whose leaves (``senders``) are published under their own names. Its row filter is
        UNREAD if the filter of any leaf is, because it is then not known whether the filters are the same."""
        stored = [sender for sender in senders if sender.outside is None]
        first = (stored or senders)[0]
        identities = [sender.identity for sender in stored] or [relation.identity]
        others = [leaf for leaf in self._every_leaf(relation) if leaf.oid not in self.published]
        unpublished = [leaf for leaf in others if leaf.outside is None] if self._ours(senders) else []
        table = self._table(relation, first.oid, identities, stored)
        uneven = next((sender.name for sender in stored if not self._alike(first, sender)), None)
        filters = {self.published[sender.oid].row_filter for sender in stored if sender.oid in self.published}
        row_filter = UNREAD if UNREAD in filters else table.row_filter
        left_out = self._leaves(unpublished, relation, first.oid)
        return replace(table, unpublished=left_out, uneven=uneven, row_filter=row_filter)

    def _alike(self, first: CatalogRelation, leaf: CatalogRelation) -> bool:
        """Whether two leaves are published with the same row filter and columns. A filter that cannot be read now
        is taken for the same; the root's filter is then UNREAD too."""
        one, other = (self.published.get(relation.oid) for relation in (first, leaf))
        if one is None or other is None:
            return True
        filters = {one.row_filter, other.row_filter}
        names = [{column.name for column in self._columns(*each)} for each in ((first, one), (leaf, other))]
        return names[0] == names[1] and (len(filters) == 1 or UNREAD in filters)

    def _every_leaf(self, root: CatalogRelation) -> list[CatalogRelation]:
        return [self.relations[oid] for oid in self.leaves.get(root.oid, ()) if oid in self.relations]

    def _ours(self, senders: Sequence[CatalogRelation]) -> bool:
        """Whether a publication that ``pgcdc setup`` created publishes one of the senders. Only such a publication is
        meant to contain all leaves. The owner of another publication may have omitted leaves on purpose."""
        # A leaf that is published via its root is not published itself.
        entries = [self.published[sender.oid] for sender in senders if sender.oid in self.published]
        return any(not self.rows.ours.isdisjoint(entry.publications) for entry in entries)

    def leaf(self, relation: CatalogRelation) -> Table:
        """Builds a leaf as a separate table. Its key consists of the leaf's columns that have the names of the root's
        key columns."""
        root = self.relations.get(relation.root or 0)
        own = self._table(relation, relation.oid, [relation.identity], ())
        if root is None:
            return own
        whole = self._roots.get(root.oid) or self.root(root, [relation])
        key = relation.attnums(column.name for column in whole.key_columns)
        seen = own.updates_seen and whole.updates_seen
        return replace(own, root=root.name, root_oid=root.oid, key=key, updates_seen=seen)

    @cached_property
    def _roots(self) -> dict[int, Table]:
        """The roots of published leaves. Each root is built once, because it may have thousands of leaves."""
        senders: dict[int, list[CatalogRelation]] = defaultdict(list)
        for relation in self.relations.values():
            if relation.root and not relation.partitioned and relation.oid in self.published:
                senders[relation.root].append(relation)
        known = self.relations
        return {oid: self.root(known[oid], leaves) for oid, leaves in senders.items() if oid in known}

    def _table(
        self,
        relation: CatalogRelation,
        sender: int,
        identities: Sequence[RowIdentity],
        storage: Sequence[CatalogRelation],
    ) -> Table:
        entry = self.published.get(sender)
        columns = _with_defaults_of(storage, self._columns(relation, entry))
        names = [column.name for column in columns]
        sent = entry is None or (entry.updates and entry.deletes)
        seen = sent and followable(relation.identity, identities, names)
        key = mirror_key(relation.identity, identities, names) if seen else ()
        return Table(
            oid=relation.oid,
            name=relation.name,
            columns=columns,
            key=relation.attnums(key),
            replica_identity=_replica_identity(relation, identities),
            identity_key=relation.attnums(relation.identity.carried),
            partitioned=relation.partitioned,
            via_root=relation.partitioned and sender == relation.oid and entry is not None and entry.via_root,
            leaves=self._leaves(storage, relation, sender),
            outside=tuple(one.outside for one in (relation, *self._every_leaf(relation)) if one.outside),
            row_filter=entry.row_filter if entry else None,
            updates_seen=seen,
            pages=relation.pages + sum(leaf.pages for leaf in storage),
            rows=relation.rows if not storage else sum(leaf.rows for leaf in storage),
            marks=self._marks(relation, storage, key),
            attnums_given=relation.attnums_given,
            comments=self._comments(relation, columns),
        )

    def _comments(self, relation: CatalogRelation, columns: Sequence[Column]) -> Comments:
        published = {0, *(column.attnum for column in columns)}
        return tuple(one for one in self.comments.get(relation.oid, ()) if one[0] in published)

    def _leaves(self, storage: Iterable[CatalogRelation], root: CatalogRelation, sender: int) -> tuple[Leaf, ...]:
        return tuple(self._leaf(leaf, root, sender) for leaf in sorted(storage, key=lambda r: r.name))

    def _leaf(self, leaf: CatalogRelation, root: CatalogRelation, sender: int) -> Leaf:
        files = replace(leaf.files, traceless=sender == root.oid or self._traceless(leaf))
        attached = self.attached.get(leaf.oid, ())
        return Leaf(leaf.oid, leaf.name, files, attached, leaf.numbering_in(root), self._listed(leaf))

    def _listed(self, leaf: CatalogRelation) -> Marks:
        if leaf.oid not in self.published:
            return ()
        return self.rows.listing(self.published[leaf.oid].publications, leaf.oid)

    def _traceless(self, relation: CatalogRelation) -> bool:
        entry = self.published.get(relation.oid)
        unseen = entry is not None and not entry.truncates
        return not relation.partitioned and (unseen or not (relation.files.toast or relation.oid in self.rows.listed))

    def _marks(
        self, relation: CatalogRelation, storage: Sequence[CatalogRelation], key: tuple[str, ...]
    ) -> TableMarks:  # fmt: skip
        members = {relation.oid: relation, **{leaf.oid: leaf for leaf in storage}}
        publications, schemas = self._publishing(members)
        return TableMarks(
            files=replace(relation.files, traceless=self._traceless(relation)),
            key_constraint=relation.identity.source_of(key),
            publications=publications,
            schemas=schemas,
            columns=relation.column_rows,
            labels=self.types.labels(relation.types),
            composites=self.types.composites(relation.types),
        )

    def _publishing(self, members: Mapping[int, CatalogRelation]) -> tuple[Marks, Marks]:
        """Returns :attr:`TableMarks.publications` and :attr:`TableMarks.schemas`."""
        names = {name for oid in members if oid in self.published for name in self.published[oid].publications}
        schemas = sorted({member.name.schema for member in members.values()})
        places = tuple((oid, self.places[oid]) for oid in sorted(members) if oid in self.places)
        by_schema = any((name, schema) in self.rows.schemas for name in names for schema in schemas)
        return self.rows.of(names, sorted(members), schemas), places if by_schema else ()

    def _columns(self, relation: CatalogRelation, entry: Published | None) -> tuple[Column, ...]:
        listed = entry.columns if entry else None
        columns = [column for column in relation.columns if listed is None or column.name in listed]
        if self.server_version < GENERATED_SINCE:
            columns = [column for column in columns if not column.generated]
        return tuple(columns)


def _replica_identity(relation: CatalogRelation, senders: Sequence[RowIdentity]) -> ReplicaIdentity:
    """Returns :attr:`Table.replica_identity`."""
    if all(sender.replica_identity == "f" for sender in senders):
        return "f"
    return next(one.replica_identity for one in (relation.identity, *senders) if one.replica_identity != "f")


def _with_defaults_of(leaves: Sequence[CatalogRelation], columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Returns the columns with the value that each has in rows older than the column (attmissingval), as the leaves
    have it. For a partitioned table, ADD COLUMN ... DEFAULT stores this value only in the leaves."""
    noted = {column.name: column.missing for leaf in leaves for column in leaf.columns if column.missing is not None}
    return tuple(replace(column, missing=noted.get(column.name, column.missing)) for column in columns)
