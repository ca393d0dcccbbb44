"""Turns rows of the log into changes of a table: the old and new row images, and which values these images lack.

The rows are processed in groups. All rows of a group have the same kind (I, U or D) and the same relation shape
(version of the relation's columns). Values are text here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.feed.schema import DELETE, INSERT, POSTIMAGE, PREIMAGE
from pgcdc_assets.protocol.columns import Images, UndecodedValue, images
from pgcdc_assets.protocol.layouts import RowKind
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.structure.alignment import Alignment

NOT_WHOLE_ROW = "an update or delete arrived without the whole old row, which a mirror without a key needs"


@dataclass(frozen=True)
class Route:
    """How the tuples of one relation shape become rows of one mirror."""

    shape: Shape
    table: Table
    """The mirror's table, with the columns that were added since its snapshot copy."""
    places: tuple[tuple[int, Column], ...]
    """Pairs of (index of a value in the tuple, column of the mirror)."""
    leaf: TableName | None = None
    """The leaf partition to which the rows belong, if the table is partitioned."""
    younger: tuple[Column, ...] = ()
    """Columns of the mirror that were added after these rows were written. The rows get the value that PostgreSQL
    stores for older rows of such a column (:attr:`Column.missing`)."""

    @classmethod
    def of(
        cls, shape: Shape, table: Table, leaf: TableName | None = None, alignment: Alignment | None = None
    ) -> Route:  # fmt: skip
        """``alignment``: the attnum of each value in the tuples. Without it, columns are matched by name."""
        if alignment is None:
            by_name = {column.name: column for column in table.columns}
            found = ((at, by_name.get(column.name)) for at, column in enumerate(shape.columns))
            return cls(shape, table, tuple((at, column) for at, column in found if column is not None), leaf)
        by_attnum = {column.attnum: column for column in table.columns}
        places = tuple((at, by_attnum[attnum]) for at, attnum in enumerate(alignment) if attnum in by_attnum)
        younger = tuple(column for column in table.columns if column.attnum not in alignment)
        return cls(shape, table, places, leaf, younger)


@dataclass(frozen=True)
class RowChanges:
    """Changes of one group that have the same operation ``op`` in the feed."""

    op: str
    rows: Ints
    """For each change, the index of its row in the group."""
    half: int
    """0 for the old image of an update that is stored as two feed rows, otherwise 1. See ``ORDINAL`` in
    :mod:`pgcdc_assets.feed.schema`."""
    text: dict[int, pa.StringArray]
    """Values by attnum, without columns that the row images do not contain."""
    unchanged: dict[int, Bools] = field(default_factory=dict)
    """By attnum: for each change, whether the TOAST value is missing, because it was not sent and is not in the old
    image."""


@dataclass(frozen=True)
class Unfollowable:
    """A row whose change cannot be mirrored. The table's feed ends before this row's transaction."""

    row: int
    reason: str
    unread: bool = False
    """See :attr:`pgcdc_assets.feed.schema.FeedEnd.unread`."""


def changes(kind: RowKind, payload: pa.Array, route: Route, lsns: pa.Array) -> Iterator[RowChanges | Unfollowable]:
    """Decodes a group, and yields its changes. Raises ProtocolError, with the LSN, if a message is malformed."""
    encoding = Encoding.of(route.shape.encoding)
    try:
        found = {item.image: item for item in images(payload, kind, len(route.shape.columns), lsns, encoding=encoding)}
    except UndecodedValue as error:
        raise _told(error, kind, payload, route, encoding) from None
    old = found.get("O") or found.get("K")
    if "O" in found and "K" in found:
        raise ProtocolError(
            "the source sent key tuples (K) and old tuples (O) without a Relation message between them",
            thing=str(route.shape.table),
        )
    if kind == "I":
        yield from _inserts(found["N"], route)
    elif not route.table.key and not route.table.multiset:
        yield Unfollowable(0, "updates or deletes arrived, although the mirror has no key and follows inserts only")
    elif route.table.multiset:
        yield from _copies(found.get("N"), old, route)
    elif kind == "D" and old is not None:
        yield from _checked(_deletes(old, route), route)
    elif kind == "U":
        yield from _updates(found["N"], old, route)


def _told(error: UndecodedValue, kind: RowKind, payload: pa.Array, route: Route, encoding: Encoding) -> ProtocolError:
    """Makes an error that names the column and, if possible, the row's key, so that the operator can correct the
    value."""
    row = images(payload.slice(error.row, 1), kind, len(route.shape.columns), encoding=encoding, shown=True)
    texts = {column.attnum: row[-1].text[at][0].as_py() for at, column in route.places}
    key = {column.name: texts.get(column.attnum) for column in route.table.key_columns}
    name = route.shape.columns[error.column].name
    return ProtocolError(not_text(name, encoding, key), thing=f"table {route.shape.table}", lsn=error.lsn)


def not_text(column: str, encoding: Encoding, key: Mapping[str, str | None]) -> str:
    """Returns the reason why a table with an unreadable value is set aside."""
    where = f", in the row with {', '.join(f'{name} = {text}' for name, text in key.items())}" if key else ""
    return f"column {column!r} has a value that is not text in {encoding.title}{where}"


def _inserts(new: Images, route: Route) -> Iterator[RowChanges | Unfollowable]:
    change = _change(INSERT, new, route)
    if change.unchanged:
        lacking = np.logical_or.reduce(list(change.unchanged.values()))
        yield Unfollowable(
            int(new.rows[np.argmax(lacking)]),
            "an inserted row arrived without a large value, because a row filter made an insert from an update",
        )
    yield from _checked(change, route)


def _deletes(old: Images, route: Route) -> RowChanges:
    change = _change(DELETE, old, route)
    if old.image == "O":
        return change
    carried = {column.attnum for at, column in route.places if route.shape.columns[at].key}
    return RowChanges(change.op, change.rows, change.half, {a: t for a, t in change.text.items() if a in carried})


def _updates(new: Images, old: Images | None, route: Route) -> Iterator[RowChanges | Unfollowable]:
    post = _change(POSTIMAGE, new, route)
    if old is None:
        yield from _checked(post, route)
        return
    pre = _deletes(old, route)
    wrong = [item for item in _checked(pre, route) if isinstance(item, Unfollowable)]
    if wrong:
        yield from wrong
        return
    at = np.searchsorted(new.rows, old.rows)
    post = _filled(post, pre, at)
    moved = _moved(post, pre, at, route)
    if moved.any():
        taken = pa.array(np.flatnonzero(moved))
        text = {column.attnum: pre.text[column.attnum].take(taken) for column in route.table.key_columns}
        yield RowChanges(PREIMAGE, pre.rows[moved], 0, text)
    yield from _checked(post, route)


def _copies(new: Images | None, old: Images | None, route: Route) -> Iterator[RowChanges | Unfollowable]:
    """Yields the changes for updates or deletes of a table without a key. Its rows are a multiset: the whole old row is
    deleted, and the whole new row is added."""
    arriving = np.zeros(0, dtype=np.int64) if new is None else new.rows
    if old is None or old.image != "O" or (new is not None and len(old.rows) != len(arriving)):
        at = arriving if len(arriving) else np.zeros(1, dtype=np.int64)
        yield Unfollowable(int(at[0]), NOT_WHOLE_ROW)
        return
    if new is None:
        yield _change(DELETE, old, route)
        return
    pre = _change(PREIMAGE, old, route)
    post = _filled(_change(POSTIMAGE, new, route), pre, np.arange(len(old.rows)))
    if post.unchanged:
        # The group is not written, so the feed must end before its first row.
        yield Unfollowable(int(arriving[0]), NOT_WHOLE_ROW)
        return
    yield RowChanges(PREIMAGE, pre.rows, 0, pre.text)
    yield post


def _change(op: str, image: Images, route: Route) -> RowChanges:
    text = {column.attnum: image.text[at] for at, column in route.places}
    rows = len(image.rows)
    text |= {column.attnum: pa.repeat(pa.scalar(column.missing, pa.string()), rows) for column in route.younger}
    masks = {column.attnum: image.unchanged[at] for at, column in route.places}
    unchanged = {attnum: mask for attnum, mask in masks.items() if mask is not None and mask.any()}
    return RowChanges(op, image.rows, 1, text, unchanged)


def _filled(post: RowChanges, pre: RowChanges, at: Ints) -> RowChanges:
    """Takes values that were not sent in the new tuples (``post``) from the old tuples (``pre``), if these have them.
    ``at``: for each old tuple, the index of the new tuple of the same update. Such a value is never NULL. If it is NULL
    in the old tuple, the old tuple lacks it: under ``publish_via_partition_root``, an old tuple with the letter O, for
    the root's FULL, may have only the key columns of its leaf."""
    text, unchanged = dict(post.text), dict(post.unchanged)
    for attnum, mask in post.unchanged.items():
        if attnum not in pre.text:
            continue
        from_old = np.full(len(post.rows), -1, dtype=np.int64)
        sent = np.flatnonzero(np.asarray(pc.is_valid(pre.text[attnum])))
        from_old[at[sent]] = sent
        filled = mask & (from_old >= 0)
        index = np.where(filled, len(post.rows) + from_old, np.arange(len(post.rows)))
        text[attnum] = pa.concat_arrays([post.text[attnum], pre.text[attnum]]).take(pa.array(index))
        unchanged[attnum] = mask & ~filled
        if not unchanged[attnum].any():
            del unchanged[attnum]
    return RowChanges(post.op, post.rows, post.half, text, unchanged)


def _moved(post: RowChanges, pre: RowChanges, at: Ints, route: Route) -> Bools:
    moved = np.zeros(len(at), dtype=bool)
    taken = pa.array(at)
    for column in route.table.key_columns:
        other = pc.not_equal(pre.text[column.attnum], post.text[column.attnum].take(taken))
        moved |= np.asarray(pc.fill_null(other, False))
    return moved


def _checked(change: RowChanges, route: Route) -> Iterator[RowChanges | Unfollowable]:
    """Yields the change if all its rows have a key, otherwise an Unfollowable for the first row without a key."""
    for column in route.table.key_columns:
        text = change.text.get(column.attnum)
        if text is None:
            yield Unfollowable(int(change.rows[0]), f"the source does not send key column {column.name!r}")
            return
        if text.null_count:
            row = int(change.rows[np.argmax(np.asarray(pc.is_null(text)))])
            # The key was dropped, or did not exist when the row was written.
            what = f"the source sent a row without a value for key column {column.name!r}"
            yield Unfollowable(row, what, unread=True)
            return
    yield change


def unchanged_lists(change: RowChanges, attnums: Sequence[int]) -> pa.ListArray:
    """Makes the column ``_pgcdc_unchanged``: for each row, the attnums of the values that were not sent, ascending;
    NULL if all values were sent."""
    count = len(change.rows)
    found = [(attnum, np.flatnonzero(change.unchanged[attnum])) for attnum in attnums if attnum in change.unchanged]
    if not found:
        return pa.nulls(count, pa.list_(pa.int32()))
    owner = np.concatenate([rows for _, rows in found])
    number = np.concatenate([np.full(len(rows), attnum, dtype=np.int32) for attnum, rows in found])
    per_row = np.bincount(owner, minlength=count)
    offsets = np.concatenate(([0], np.cumsum(per_row))).astype(np.int32)
    values = number[np.argsort(owner, kind="stable")]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(per_row == 0))
