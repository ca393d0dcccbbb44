"""Marks: values that identify the version of a row in a system catalog. pgcdc compares the marks of two catalog checks,
to find changes that the stream does not show. Whenever a row of a system catalog changes, PostgreSQL writes a new row
version with a new xmin. So even a row that was changed and changed back has a new mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

Mark = tuple[int, int]
"""OID and xmin of a catalog row. Instead of an OID, a row of pg_attribute has its attnum, and a row of pg_inherits the
OID of the parent."""
Marks = tuple[Mark, ...]


def marks(found: Iterable[Sequence[int]]) -> Marks:
    return tuple((number, xmin) for number, xmin in found)


@dataclass(frozen=True)
class Files:
    """The files of a relation."""

    relfilenode: int = 0
    toast: int = 0
    """pg_class.reltoastrelid, 0 without a TOAST table. It shows the cause of a new relfilenode: an ALTER TABLE that
    rewrites (also SET [UN]LOGGED) makes a new TOAST table; TRUNCATE, VACUUM FULL and CLUSTER keep the TOAST table."""
    traceless: bool = False
    """Whether a new relfilenode, without any other sign, may mean that rows were added or removed without a message in
    the stream. This is possible:

    - in a relation without a TOAST table, by SET UNLOGGED, changes of rows, and SET LOGGED. PostgreSQL refuses SET
      UNLOGGED only if a publication lists the relation itself;
    - in a partition that is published via its root, by TRUNCATE;
    - in a relation whose publications do not publish TRUNCATE, by TRUNCATE.
    """


@dataclass(frozen=True)
class EnumLabel:
    """A value of an enum. ALTER TYPE ... RENAME VALUE changes the value that existing rows show, and the stream does
    not show this."""

    oid: int
    label: str
    xmin: int
    """A new xmin with the same label means that the label was changed and changed back."""


@dataclass(frozen=True)
class Composite:
    """A composite type (or a table's row type) in the values of a table's columns. ADD ATTRIBUTE and DROP ATTRIBUTE
    change the values of existing rows, and the stream does not show this."""

    oid: int
    name: str
    attributes: str
    """``attnum:type`` of each attribute. Dropped attributes are included, with type 0, because older rows may have
    values of these attributes."""


@dataclass(frozen=True)
class TableMarks:
    """All marks of a table. The marks of its leaves are in :class:`Leaf`. The catalog facts in the log have no
    marks."""

    files: Files = field(default_factory=Files)
    key_constraint: int = 0
    """OID of the constraint of the mirror's key; of the key's index, if the key has no constraint. 0 if the mirror has
    no key. A new OID means that the key was dropped and created again. REINDEX keeps the OID, except REINDEX
    CONCURRENTLY of an index without a constraint."""
    publications: Marks = ()
    """The catalog rows of the publications that publish the table. A new row means that the table was removed from a
    publication, or that a publication was changed."""
    schemas: Marks = ()
    """The pg_depend rows that tie the table and its leaves to their schemas, if a publication of a schema publishes the
    table. SET SCHEMA writes a new row. GRANT and OWNER TO do not."""
    columns: Marks = ()
    """The pg_attribute rows, by attnum, also of columns that are not published. A new row together with a new
    relfilenode means that ALTER TABLE rewrote the table."""
    labels: tuple[EnumLabel, ...] = ()
    """The values of the enums that the columns use."""
    composites: tuple[Composite, ...] = ()
    """The composite types used in the columns' values, at any depth."""

    def with_types(self, later: TableMarks) -> TableMarks:
        """Adds the enum values and composite types of ``later`` that these marks lack. Those that these marks have stay
        as they are, so that a comparison still shows a change of them."""
        labels = {one.oid: one for one in (*later.labels, *self.labels)}
        composites = {one.oid: one for one in (*later.composites, *self.composites)}
        if (len(labels), len(composites)) == (len(self.labels), len(self.composites)):
            return self
        return replace(self, labels=tuple(labels.values()), composites=tuple(composites.values()))
