"""Decides to which mirrored table the rows of a relation belong.

The OID of the rows' relation decides: it is the OID of a table, or of a leaf partition that a table had at its snapshot
copy. Names and facts of the catalog never decide, for two reasons: a name may change and be used again, and the catalog
is read after the rows were written. Names and facts only show that a table cannot be followed further, because a
partition was detached or added, or because a different table has its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.protocol.shape import Shape


@dataclass(frozen=True)
class Place:
    """The tables that rows of one relation shape affect."""

    table: TableName | None
    """The table to which the rows belong; None if it is not a mirrored table."""
    leaf: TableName | None = None
    """The leaf partition to which the rows belong, by its name at the table's snapshot copy."""
    strange_to: Mapping[TableName, str] = field(default_factory=dict)
    """Tables that cannot be followed further because of these rows, with the reason."""

    @property
    def concerned(self) -> set[TableName]:
        """All tables that these rows affect: ``table`` and the tables of ``strange_to``."""
        return self.strange_to.keys() | ({self.table} if self.table is not None else set())


@dataclass(frozen=True)
class Router:
    """Finds mirrored tables by the OIDs of relations."""

    tables: Mapping[int, Table]
    """Tables by their own OIDs."""
    holders: Mapping[int, tuple[Table, ...]]
    """Tables by the OIDs of their leaf partitions. An OID has two tables if the leaf was moved from one to the other,
    and each had the leaf at its snapshot copy."""
    names: Mapping[TableName, Table]

    @classmethod
    def of(cls, tables: Iterable[Table]) -> Self:
        followed = list(tables)
        holders: dict[int, tuple[Table, ...]] = {}
        for table in followed:
            for leaf in table.leaves:
                holders[leaf.oid] = (*holders.get(leaf.oid, ()), table)
        return cls({table.oid: table for table in followed}, holders, {table.name: table for table in followed})

    def place(self, shape: Shape) -> Place:
        """Returns the tables that rows of this shape affect."""
        taker = self._taker(shape)
        return Place(
            taker.name if taker else None,
            _leaf(taker, shape) if taker else None,
            {table.name: reason for table, reason in self._strange(shape) if table is not taker},
        )

    def relations(self, table: TableName) -> frozenset[int]:
        """Returns the OIDs of the relations whose rows belong to a table: its own OID and those of its leaves."""
        found = self.names[table]
        return frozenset((found.oid, *(leaf.oid for leaf in found.leaves)))

    def _taker(self, shape: Shape) -> Table | None:
        root = self._root(shape)
        if root is not None and root in self.holders.get(shape.relation_id, ()):
            return root
        return self.tables.get(shape.relation_id)

    def _root(self, shape: Shape) -> Table | None:
        return None if shape.root_oid is None else self.tables.get(shape.root_oid)

    def _strange(self, shape: Shape) -> Iterator[tuple[Table, str]]:
        root, known = self._root(shape), self.tables.get(shape.relation_id)
        for holder in self.holders.get(shape.relation_id, ()):
            went = "dropped" if shape.forgotten else "detached"
            yield holder, f"its partition {_leaf(holder, shape)} was {went}, together with its rows"
        if known is not None and root is not None:
            yield known, f"the table became a partition of {root.name}"
        if root is not None and shape.relation_id not in known_leaves(root):
            yield root, f"partition {shape.table} was added, possibly with rows"
        if known is None and shape.root is None and shape.catalog_name in (None, shape.table):
            namesake = self.names.get(shape.table)
            if namesake is not None:
                yield namesake, "the table was dropped and created again, or another table has its name now"


def known_leaves(table: Table) -> set[int]:
    """Returns the OIDs of all leaf partitions that the table has had since its snapshot copy, also of partitions whose
    rows are not mirrored."""
    left = table.lineage.left if table.lineage is not None else ()
    return {*(leaf.oid for leaf in table.leaves), *(leaf.oid for leaf in table.outside), *left}


def _leaf(table: Table, shape: Shape) -> TableName | None:
    return next((leaf.name for leaf in table.leaves if leaf.oid == shape.relation_id), None)
