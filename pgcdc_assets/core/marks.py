"""Marks of the catalog: what a table is compared by to notice changes that no LSN shows.

PostgreSQL writes a new row version, with an xmin of its own, whenever a row of a system catalog changes. So a row that
was changed and changed back has another mark than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

Mark = tuple[int, int]
"""A row of a system catalog: its OID (of a column: its attnum; of a partition: its parent's OID) and its xmin."""
Marks = tuple[Mark, ...]


def marks(found: Iterable[Sequence[int]]) -> Marks:
    return tuple((number, xmin) for number, xmin in found)


def rewritten(before: Marks, now: Marks) -> bool:
    """Whether a row that is in both was written anew."""
    if before == now:
        return False
    old, new = dict(before), dict(now)
    return any(old[number] != new[number] for number in old.keys() & new.keys())


@dataclass(frozen=True)
class Files:
    """The files of a relation."""

    relfilenode: int = 0
    toast: int = 0
    """pg_class.reltoastrelid, 0 if there is none. It tells what made a new relfilenode: an ALTER TABLE that rewrites
    (SET UNLOGGED and SET LOGGED do) makes a new TOAST table; TRUNCATE, VACUUM FULL and CLUSTER keep it."""
    traceless: bool = False
    """A new relfilenode alone may mean that rows came or went which the stream does not carry: for a relation without a
    TOAST table by SET UNLOGGED, writes and SET LOGGED, which PostgreSQL refuses only if a publication lists the
    relation itself; for a leaf that is published via its root also by TRUNCATE. So it is for every relation whose
    publications leave TRUNCATE out."""


@dataclass(frozen=True)
class EnumLabel:
    """A value of an enum. ALTER TYPE ... RENAME VALUE changes rows, and the stream does not carry it."""

    oid: int
    label: str
    xmin: int
    """Another one with the same label means that the label was another one meanwhile."""


@dataclass(frozen=True)
class Composite:
    """A composite type (or a table's row type) that values of a table's columns are made of. ADD ATTRIBUTE and DROP
    ATTRIBUTE change rows, and the stream does not carry it."""

    oid: int
    name: str
    attributes: str
    """``attnum:type`` of each attribute. PostgreSQL keeps dropped attributes, with type 0: rows may have been written
    with them meanwhile."""


@dataclass(frozen=True)
class TableMarks:
    """All marks of a table but those of its leaves. Facts of the log have none."""

    files: Files = field(default_factory=Files)
    key_constraint: int = 0
    """OID of the primary key's constraint: another one means that the key was dropped and created again. REINDEX keeps
    it. 0 where there is none."""
    publications: Marks = ()
    """The rows of the publications that publish it: others mean that it was taken out, or changed, meanwhile."""
    schemas: Marks = ()
    """The pg_depend rows that tie it and its leaves to their schemas, if a publication of a schema publishes it: SET
    SCHEMA writes a new one, GRANT and OWNER TO do not."""
    columns: Marks = ()
    """Rows of pg_attribute by attnum, also of columns that are not published. If the relfilenode is another too, a row
    that was written anew means a rewrite by ALTER TABLE."""
    labels: tuple[EnumLabel, ...] = ()
    """The values of its columns' enums."""
    composites: tuple[Composite, ...] = ()
    """The composite types that its columns' values are made of, at any depth."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            files=Files(**data["files"]),
            key_constraint=data["key_constraint"],
            publications=marks(data["publications"]),
            schemas=marks(data["schemas"]),
            columns=marks(data["columns"]),
            labels=tuple(EnumLabel(**label) for label in data["labels"]),
            composites=tuple(Composite(**composite) for composite in data["composites"]),
        )
