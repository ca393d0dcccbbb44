"""Computes the structure that a mirror gets when its table has changed, if the mirror's own rows are enough for it.
Otherwise says why the table must be copied again.

After an ALTER TABLE, the system catalog proves which values the table's rows have in the new structure:

- a column with the same attnum is the same column, even if its name has changed;
- a column that was added without a rewrite has the value of ``attmissingval`` in all older rows, or else NULL;
- an unchanged relfilenode means that PostgreSQL rewrote no row;
- the columns of a partition change only together with the columns of its root (:attr:`Leaf.numbering`).

In three cases, the catalog does not prove enough: for a table without a key, for a table whose key has changed, and for
a table with a partition whose columns are in another order than in the root. These tables are copied again, which is
always right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pyarrow as pa

from pgcdc_assets.core.catalog import Column, Leaf, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.text.types import arrow_type
from pgcdc_assets.structure.differences import key_changed


def successor(before: Table, now: Table, since: Lsn) -> Table:
    """The structure that the mirror gets if there is no :func:`obstacle`. ``before``: the table recorded for the
    mirror. ``now``: the table in the catalog. ``since``: an LSN at which the source certainly had the new structure."""
    lineage = before.descent
    left = {(column.attnum, column.name, column.type) for column in now.columns}
    changed = tuple(column for column in before.columns if (column.attnum, column.name, column.type) not in left)
    former = tuple(dict.fromkeys((*lineage.former, *changed)))
    latest = max(int(since), lineage.since)
    follows = replace(lineage, number=lineage.number + 1, since=latest, former=former)
    if now.partitioned:
        follows = replace(follows, restructured=lineage.restructured + 1, columns_since=latest)
    # The comments that the mirror has are kept, because the comments of the catalog are compared with them later.
    return replace(
        now,
        columns=_with_missing(before, now),
        leaves=_as_known(before, now),
        lineage=follows,
        comments=before.comments,
    )


def with_leaves(before: Table, now: Table, since: Lsn) -> Table:
    """Like :func:`successor`, for the case that only partitions were removed, or were added without rows. The leaves
    that stay keep the facts recorded for the mirror."""
    lineage = before.descent
    left = tuple({leaf.oid for leaf in before.leaves} - {leaf.oid for leaf in now.leaves})
    follows = replace(
        lineage, number=lineage.number + 1, since=max(int(since), lineage.since), left=(*lineage.left, *left)
    )
    return replace(
        before, leaves=_as_known(before, now), outside=now.outside, lineage=follows, pages=now.pages, rows=now.rows,
        marks=replace(before.marks, publications=now.marks.publications, schemas=now.marks.schemas),
    )  # fmt: skip


def _as_known(before: Table, now: Table) -> tuple[Leaf, ...]:
    """The leaves of ``now``. A leaf that the mirror already has keeps its recorded name, even if it was renamed,
    because rows of the mirror contain this name."""
    known = {leaf.oid: leaf for leaf in before.leaves}
    return tuple(known.get(leaf.oid, leaf) for leaf in now.leaves)


def _with_missing(before: Table, now: Table) -> tuple[Column, ...]:
    """The columns of ``now``, with the values (attmissingval) that they have in older rows, as first recorded. VACUUM
    FULL writes these values into the rows and deletes them from the catalog, but the log may still contain rows from
    before the column was added."""
    known = {column.attnum: column.missing for column in before.columns}
    return tuple(replace(column, missing=known.get(column.attnum, column.missing)) for column in now.columns)


def alike(left: Table, right: Table) -> bool:
    """Whether rows of the log are read in the same way for both tables."""
    return (left.columns, left.key, left.live) == (right.columns, right.key, right.live)


def obstacle(before: Table, now: Table) -> str | None:
    """Why the mirror's own rows cannot get the structure of ``now``, as a text for reports; None if they can."""
    if before.root or now.root or (before.partitioned, before.via_root) != (now.partitioned, now.via_root):
        return "how it is partitioned or published has changed"
    if (reason := key_changed(before, now)) is not None:
        return reason
    if not before.key:
        return "it has no key"
    if now.partitioned and (reason := _of_partitions(before, now)) is not None:
        return reason
    if before.marks.files.relfilenode != now.marks.files.relfilenode:
        return "its rows were rewritten"
    return _of_columns(before, now)


def _of_partitions(before: Table, now: Table) -> str | None:
    was, is_ = ({leaf.oid: leaf for leaf in table.leaves} for table in (before, now))
    attached = [{oid: leaf.attached for oid, leaf in leaves.items()} for leaves in (was, is_)]
    if attached[0] != attached[1] or not is_:
        return "its structure changed, and partitions were added or removed"
    if any(was[oid].files.relfilenode != is_[oid].files.relfilenode for oid in is_):
        return "its rows were rewritten"
    odd = next((leaf for oid, leaf in is_.items() if not _as_numbered(was[oid], leaf, now)), None)
    if odd is not None:
        return f"its structure changed, and its partition {odd.name} has its columns in another order"
    return None


def _as_numbered(was: Leaf, is_: Leaf, now: Table) -> bool:
    """Whether the leaf's earlier numbering still translates the attnum of each of the table's columns correctly."""
    known = was.numbering is not None and is_.numbering is not None
    return known and all(was.of_root(attnum) == is_.of_root(attnum) for attnum in now.live)


def _of_columns(before: Table, now: Table) -> str | None:
    known = {column.attnum: column for column in before.columns}
    for column in now.columns:
        was = known.pop(column.attnum, None)
        if was is None and column.attnum <= before.highest_attnum:
            return f'column "{column.name}" existed before, but is published only now'
        if was is None and column.generated:
            return f'column "{column.name}" was added, and is generated'
        if was is not None and not keeps_text(was.type, column.type):
            return f'the type of column "{column.name}" changed'
    unpublished = [column.name for attnum, column in known.items() if attnum in now.live]
    return f'column "{unpublished[0]}" is no longer published' if unpublished else None


_TEXTS: Final = frozenset({25, 1043})
"""The types text and varchar, because a value has the same text in both. bpchar is not one of them, because its text
includes the padding blanks."""


def keeps_text(was: PgType, is_: PgType) -> bool:
    """Whether values keep their text if a column's type changes from ``was`` to ``is_``, and PostgreSQL does not
    rewrite the table. It rewrites nothing between binary coercible types, but their texts may differ (int4 -1 is oid
    4294967295). So this is true only for a new typmod, between text and varchar, and between a domain and its base
    type."""
    before, after = was.stored, is_.stored
    alike = before.oid == after.oid or {before.oid, after.oid} <= _TEXTS
    return alike and holds(arrow_type(before), arrow_type(after))


def holds(was: pa.DataType, is_: pa.DataType) -> bool:
    """Whether each value of a mirror's column with Arrow type ``was`` also fits ``is_``, and is the same value
    there."""
    if was == is_:
        return True
    decimals = isinstance(was, pa.Decimal128Type) and isinstance(is_, pa.Decimal128Type)
    return decimals and bool(was.scale == is_.scale and was.precision <= is_.precision)
