"""Decides how the rows that follow a Relation message are read, or why they cannot be read with the structure of the
mirror. A :class:`Shape` is a Relation message with the catalog's facts about its relation. If rows cannot be read,
:mod:`pgcdc_assets.structure.verdict` decides what happens to the mirror.

The columns of the message and of the mirror are compared by attnum. PostgreSQL never assigns an attnum twice, so a
column that was dropped and created again under its old name is noticed. The attnums of a leaf are translated into
attnums of the root (:attr:`Leaf.numbering`). If this is not possible, the leaf's columns are compared by name, as
PostgreSQL itself does. A message may have a new column that is NULL in all older rows. With any other difference, its
rows cannot be read.

After a change of structure, the log below the LSN of the catalog check (:attr:`Lineage.since`) may contain rows with
any structure that the table has had since the copy. These rows are read with the newest structure: in a column that was
added later, they have the value that PostgreSQL gives to older rows.

The catalog is read after the message was written. Before it was read, a column may have been renamed, or dropped and
its name given to another column. A Relation message lists its columns by ascending attnum. So if the attnums that the
catalog gives for the message's names do not ascend, a name now belongs to another column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from pgcdc_assets.core.catalog import Column, Leaf, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.shape import RelationFacts, Shape, ShapeColumn
from pgcdc_assets.structure.alignment import Alignment, aligned
from pgcdc_assets.structure.successor import keeps_text

NOT_WHOLE = "REPLICA IDENTITY is no longer FULL, and there is no key"


@dataclass(frozen=True)
class Unreadable:
    """The result if rows cannot be read with the structure of the mirror. ``reason`` says why, for reports and error
    texts."""

    reason: str


def table_of_rows(
    table: Table, shape: Shape, facts: RelationFacts | None = None, *, past: bool = False, after: Lsn | None = None
) -> Table | Unreadable:  # fmt: skip
    """The structure with which rows of the shape are read: ``table`` itself, or ``table`` with the columns that the
    shape adds. ``facts``: the shape's catalog facts, needed only for a new column. ``past``: whether these rows are
    already applied to the mirror; a column that the shape lacks may then have been added after the rows were written.
    ``after``: all rows of the shape belong to transactions that commit at or above this LSN."""
    if unsettled(table, after):
        return _by_order(table, shape)
    reason = _newer_catalog(table, shape) or _other_key(table, shape) or _other_columns(table, shape, past)
    if reason:
        return Unreadable(reason)
    new = [column for column in shape.columns if _known(table, shape, column) is None]
    if not new:
        return table
    return _with_new(table, shape, new, facts)


def unsettled(table: Table, after: Lsn | None) -> bool:
    """Whether rows may have an earlier structure of the table. ``after``: the rows' transactions commit at or above
    this LSN; None if this is not known."""
    since = table.columns_since
    return since is not None and (after is None or after < since)


def alignment(table: Table, shape: Shape, after: Lsn | None) -> Alignment | None:
    """The attnum of each value in rows of the shape, for rows that may have an earlier structure; None if the values
    can be assigned by the names of the columns."""
    if not unsettled(table, after) or (told := _at_root(table, shape)) is None:
        return None
    return aligned(table, told)


def _by_order(table: Table, found: Shape) -> Table | Unreadable:
    """:func:`table_of_rows` for rows that may have an earlier structure. Finds the columns by their order."""
    shape = _at_root(table, found)
    if shape is None:
        return Unreadable(
            "its structure changed, and the log does not show which rows of a partition are older than this change"
        )
    columns = aligned(table, shape)
    if columns is None:
        return Unreadable("its columns changed, and the log does not show which value belongs to which column")
    own = {column.attnum: column for column in table.columns}
    for told, attnum in zip(shape.columns, columns, strict=True):
        column = own.get(attnum) if attnum is not None else None
        if column is not None and not keeps_text(told.type, column.type):
            return Unreadable(
                f"the type of column {column.name!r} changed from {_type(told.type)} to {_type(column.type)}"
            )
        if column is None and attnum is not None:
            return Unreadable(f"column {told.name!r} was added after other columns had changed")
    lacking = [column.name for column in table.key_columns if column.attnum not in columns]
    key = {attnum for column, attnum in zip(shape.columns, columns, strict=True) if column in shape.told_key}
    if not key:
        key = set(table.key if shape.forgotten else shape.key_attnums)
    if lacking or key != set(table.key):
        return Unreadable(_key_changed(table, shape))
    return table


def added(before: Table, after: Table) -> tuple[Column, ...]:
    """Columns of ``after`` that ``before`` lacks."""
    have = {column.name for column in before.columns}
    return tuple(column for column in after.columns if column.name not in have)


def together(tables: Iterable[Table]) -> Table:
    """The table with all columns that any of these versions of the table has."""
    first, *rest = tables
    for other in rest:
        first = replace(first, columns=(*first.columns, *added(first, other)))
    return first


def _newer_catalog(table: Table, shape: Shape) -> str | None:
    """Describes how columns were dropped or renamed between the message and the reading of the catalog; None if they
    were not. If the catalog has no column with the name and type of a column of the message, the mirror's column with
    this name and type gives the attnum. If the relation no longer has this attnum, the column was dropped or renamed;
    for a leaf, this is always assumed. If the attnums do not ascend, columns have exchanged their names."""
    places: list[int] = []
    for column in shape.columns:
        known = _known(table, shape, column)
        attnum = column.attnum
        if attnum is None and known is not None:
            if not shape.forgotten and (_leaf(table, shape) or known.attnum not in shape.attnums):
                return f"column {column.name!r} was dropped or renamed soon after its rows were written"
            attnum = known.attnum
        if attnum is not None:
            places.append(attnum)
    if any(left >= right for left, right in pairwise(places)):
        return "columns swapped their names"
    return None


def _leaf(table: Table, shape: Shape) -> bool:
    """Whether the shape is the shape of a leaf, and not of the table itself."""
    return shape.relation_id != table.oid


def _at_root(table: Table, shape: Shape) -> Shape | None:
    """The shape with the root's attnums; None for a leaf whose attnums cannot be translated."""
    if not _leaf(table, shape):
        return shape
    leaf = _numbered(table, shape)
    if leaf is None:
        return None
    columns = (replace(c, attnum=None if c.attnum is None else leaf.at_root(c.attnum)) for c in shape.columns)
    attnums, live = (frozenset(map(leaf.at_root, found)) for found in (shape.attnums, shape.live))
    key = tuple(map(leaf.at_root, shape.key_attnums))
    return replace(shape, columns=tuple(columns), attnums=attnums, live=live, key_attnums=key)


def _numbered(table: Table, shape: Shape) -> Leaf | None:
    """The leaf that the shape belongs to, if its attnums can be translated into the root's; otherwise None."""
    return next((leaf for leaf in table.leaves if leaf.oid == shape.relation_id and leaf.numbering is not None), None)


def _other_key(table: Table, shape: Shape) -> str | None:
    if table.multiset and shape.replica_identity != "f":
        return NOT_WHOLE
    key = {column.name for column in table.key_columns}
    if not key or key == ({column.name for column in shape.told_key} or set(shape.key)):
        return None
    if shape.forgotten and key <= {column.name for column in shape.columns if column.key}:
        return None
    return _key_changed(table, shape)


def _key_changed(table: Table, shape: Shape) -> str:
    before, now = (_listed(column.name for column in columns) for columns in (table.key_columns, shape.told_key))
    return f"the key changed from ({before}) to ({now or _listed(shape.key)})"


def _other_columns(table: Table, shape: Shape, past: bool) -> str | None:
    seen = set()
    for column in shape.columns:
        known = _known(table, shape, column)
        if known is None:
            continue
        seen.add(known.attnum)
        if known.name != column.name:
            return f"column {known.name!r} was renamed to {column.name!r}"
        if not _same_type(known.type, column.type):
            return f"the type of column {known.name!r} changed from {_type(known.type)} to {_type(column.type)}"
    for gone in table.columns:
        if gone.attnum not in seen and not (past and gone.attnum > max(seen, default=0)):
            again = any(column.name == gone.name for column in shape.columns)
            return f"column {gone.name!r} was dropped" + (
                " and created again" if again else " or is no longer published"
            )
    return None


def _known(table: Table, shape: Shape, column: ShapeColumn) -> Column | None:
    """The mirror's column for a column of the shape; None if the mirror has no such column. The column is found by its
    attnum, for a leaf by its attnum at the root, because its name may belong to another column now. If the catalog no
    longer had the column, it is found by name and type. If a leaf's attnums cannot be translated, its columns are found
    by name. This is safe, because other changes of the columns of such a table cause a new copy."""
    leaf = _numbered(table, shape)
    if leaf is None and _leaf(table, shape):
        return next((known for known in table.columns if known.name == column.name), None)
    if column.attnum is None:
        alike = (known for known in table.columns if known.name == column.name)
        return next((known for known in alike if _same_type(known.type, column.type)), None)
    attnum = column.attnum if leaf is None else leaf.at_root(column.attnum)
    return next((known for known in table.columns if known.attnum == attnum), None)


def _with_new(table: Table, shape: Shape, new: list[ShapeColumn], facts: RelationFacts | None) -> Table | Unreadable:
    relation = facts.table if facts else None
    columns = {column.name: column for column in relation.columns} if relation else {}
    newest, leaf = table.highest_attnum, _numbered(table, shape)
    if not table.key:
        return Unreadable(f"column {new[0].name!r} is new; the table has no key, so its mirror cannot get new columns")
    if leaf is None and _leaf(table, shape):
        return Unreadable(
            f"column {new[0].name!r} is new in a partition whose columns are in another order than its table's"
        )
    appeared: list[Column] = []
    for column in new:
        fact = columns.get(column.name)
        if relation is None or fact is None or column.attnum is None:
            return Unreadable(f"column {column.name!r} is new, and the catalog no longer shows how it was added")
        if fact.missing is not None:
            return Unreadable(f"column {column.name!r} was added with a default, which older rows have too")
        attnum = fact.attnum if leaf is None else leaf.at_root(fact.attnum)
        if attnum <= newest:
            return Unreadable(f"column {column.name!r} is published only now; its values in older rows are not known")
        if _rewritten(table, shape, relation):
            return Unreadable(
                f"column {column.name!r} was added and the table was rewritten: older rows may have values in it"
            )
        if _dropped_before(table, shape, relation, fact.attnum):
            return Unreadable(
                f"column {column.name!r} was added after another was dropped: values may belong to either column"
            )
        newest = attnum
        appeared.append(replace(fact, attnum=attnum))
    return replace(table, columns=(*table.columns, *appeared))


def _dropped_before(table: Table, shape: Shape, relation: Table, attnum: int) -> bool:
    """Whether a column was added after the copy, and dropped, before the column ``attnum`` was added. It may have had
    the same name, so values in the log may belong to it."""
    live, last = set(relation.live), table.highest_attnum
    if (leaf := _numbered(table, shape)) is not None:
        # Computed from the root's next attnum, because the leaf may lack the root's last column, if this was dropped
        # before the leaf was created.
        last = leaf.of_root(table.highest_attnum + 1) - 1
    return bool(live) and any(number not in live for number in range(last + 1, attnum))


def _rewritten(table: Table, shape: Shape, relation: Table) -> bool:
    """Whether the table was rewritten after the copy, for example by ADD COLUMN with a volatile default, which is
    written into older rows."""
    if not _leaf(table, shape):
        now = {leaf.oid: leaf.files.relfilenode for leaf in relation.leaves}
        leaves = any(now.get(leaf.oid, leaf.files.relfilenode) != leaf.files.relfilenode for leaf in table.leaves)
        return leaves or table.marks.files.relfilenode != relation.marks.files.relfilenode
    at_copy = next((leaf for leaf in table.leaves if leaf.oid == shape.relation_id), None)
    return at_copy is not None and at_copy.files.relfilenode != relation.marks.files.relfilenode


def _same_type(left: PgType, right: PgType) -> bool:
    return (left.oid, left.typmod) == (right.oid, right.typmod)


def _type(type_: PgType) -> str:
    return type_.name if type_.typmod == -1 else f"{type_.name} (typmod {type_.typmod})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
