"""Finds what no LSN shows: changes of tables, columns, partitions and publications that the stream does not carry.

Pure comparisons of a table as it was (when it was copied, or last seen) with the live catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pgcdc_assets.core.catalog import Column, Leaf, PgType, Table
from pgcdc_assets.core.names import TableName


class Remedy(StrEnum):
    """What a drift requires."""

    COPY = "copy"
    """Rows came or went that the stream never carried: the table must be copied again."""
    PARTITIONS = "partitions"
    """Partitions came or went: followed if those that came have no rows, else copied again."""
    SET_ASIDE = "set_aside"
    """The table cannot be followed exactly: wait for the user's decision."""
    FOLLOW = "follow"
    """Nothing to do: the stream carries it."""
    NONE = "none"
    """The table is gone: the settings and ``pgcdc setup`` decide."""


class DriftKind(StrEnum):
    UNPUBLISHED = "unpublished"
    RECREATED = "recreated"
    REPUBLISHED = "republished"
    PARTITIONS = "partitions"
    REWRITTEN = "rewritten"
    LABELS = "labels"
    TYPES = "types"
    COLUMNS = "columns"
    KEY = "key"


@dataclass(frozen=True)
class Drift:
    table: TableName
    kind: DriftKind
    action: Remedy
    what: str

    def __str__(self) -> str:
        return f"table {self.table}: {self.what}"


def table_changes(before: Table, now: Table | None) -> list[Drift]:
    """All differences between a table as it was and as it is; ``now`` is None if it is no longer published, or dropped.

    Of several remedies, COPY outweighs SET_ASIDE, which outweighs FOLLOW.
    """
    name = before.name
    if now is None:
        return [Drift(name, DriftKind.UNPUBLISHED, Remedy.NONE, "is not published any more, or was dropped")]
    if before.oid != now.oid:
        return [Drift(name, DriftKind.RECREATED, Remedy.COPY, "was dropped and made anew")]
    return [*_publication(before, now), *_partitions(before, now), *_storage(before, now), *_labels(before, now),
            *_composites(before, now), *_columns(before, now), *_key(before, now)]  # fmt: skip


def _publication(before: Table, now: Table) -> Iterator[Drift]:
    if before.publication_rows and now.publication_rows and _kept_rows(before, now) != _kept_rows(now, before):
        what = "its publication was changed or made anew, or lost and regained it: changes may be missing"
        yield Drift(before.name, DriftKind.REPUBLISHED, Remedy.COPY, what)
    elif before.row_filter != now.row_filter:
        yield Drift(before.name, DriftKind.REPUBLISHED, Remedy.COPY, "its publication's row filter changed")
    elif _altered_marks(before.schema_rows, now.schema_rows):
        what = "was in another schema meanwhile, which its publication does not publish: changes may be missing"
        yield Drift(before.name, DriftKind.REPUBLISHED, Remedy.COPY, what)


def _kept_rows(table: Table, other: Table) -> set[str]:
    """The rows that publish it, without those that list the leaves that the other one has not."""
    kept = {leaf.oid for leaf in other.leaves}
    own = {mark for leaf in table.leaves if leaf.oid not in kept for mark in leaf.listed.split()}
    return set(table.publication_rows.split()) - own


def _partitions(before: Table, now: Table) -> Iterator[Drift]:
    """ATTACH adds rows and DETACH removes some, and the stream carries neither."""
    old, new = ({leaf.oid: leaf for leaf in table.leaves} for table in (before, now))
    # The mirror tells rows of a leaf by the name that it had when it came; via the root it does not know them.
    unknown = before.via_root or now.via_root
    outside = {one.oid: one.why for one in now.outside}
    for oid in sorted(old.keys() - new.keys()):
        remedy = Remedy.COPY if unknown else Remedy.PARTITIONS
        what = f"lost partition {old[oid].name}" + (f", which {outside[oid]}" if oid in outside else "")
        yield Drift(before.name, DriftKind.PARTITIONS, remedy, what)
    names = {old[oid].name for oid in old.keys() & new.keys()}
    left = before.lineage.left if before.lineage is not None else ()
    for oid in sorted(new.keys() - old.keys()):
        remedy = Remedy.COPY if oid in left or new[oid].name in names else Remedy.PARTITIONS
        yield Drift(before.name, DriftKind.PARTITIONS, remedy, f"has a new partition {new[oid].name}")
    for oid in sorted(old.keys() & new.keys()):
        was, is_ = old[oid].attached, new[oid].attached
        if was and is_ and was != is_:
            what = f"partition {new[oid].name} was detached, and attached again: changes may be missing"
            yield Drift(before.name, DriftKind.PARTITIONS, Remedy.COPY, what)


def _storage(before: Table, now: Table) -> Iterator[Drift]:
    """TRUNCATE, VACUUM FULL and CLUSTER make new files too, and the stream stays exact. They keep a TOAST table, and
    mostly leave pg_attribute alone (VACUUM FULL and CLUSTER write the values of older rows into these).

    Where nothing else distinguishes these from a rewrite that the stream does not carry, new files are enough for a
    drift.
    """
    if _maybe_rewritten(before, now) and altered_columns(before.column_rows, now.column_rows):
        yield Drift(before.name, DriftKind.REWRITTEN, Remedy.SET_ASIDE, "its rows were rewritten by ALTER TABLE")
    elif not list(_columns(before, now)):
        yield from _behind_the_stream(before, now)


def _behind_the_stream(before: Table, now: Table) -> Iterator[Drift]:
    old, new = _stores(before), _stores(now)
    for oid in _new_files(before, now):
        if old[oid].toast not in (0, new[oid].toast):
            what = "was rewritten by ALTER TABLE, as SET UNLOGGED and SET LOGGED do: changes may be missing"
        elif new[oid].traceless:
            what = f"{new[oid].name} has new files, and nothing tells whether the stream carries all that was done"
        else:
            continue
        yield Drift(before.name, DriftKind.REWRITTEN, Remedy.COPY, what)


def _maybe_rewritten(before: Table, now: Table) -> bool:
    """Whether ALTER TABLE may have made the new files of a relation: it would have made a new TOAST table, too."""
    old, new = _stores(before), _stores(now)
    return any(old[oid].toast == 0 or old[oid].toast != new[oid].toast for oid in _new_files(before, now))


def _new_files(before: Table, now: Table) -> list[int]:
    """The relations whose relfilenode has changed."""
    old, new = _stores(before), _stores(now)
    return [oid for oid in sorted(old.keys() & new.keys()) if old[oid].relfilenode != new[oid].relfilenode]


def _stores(table: Table) -> dict[int, Table | Leaf]:
    """The table and its leaves. TRUNCATE, VACUUM FULL and CLUSTER keep a TOAST table, ALTER TABLE makes another."""
    return {table.oid: table, **{leaf.oid: leaf for leaf in table.leaves}}


def altered_columns(before: str, now: str) -> bool:
    """Whether the pg_attribute row of a column that is in both marks (:attr:`Table.column_rows`) was written anew."""
    return _altered_marks(before, now)


def _altered_marks(before: str, now: str) -> bool:
    """Whether a row of the catalog that is in both marks (``number:xmin`` each) was written anew."""
    if before == now:
        return False
    old, new = (dict(mark.split(":") for mark in marks.split()) for marks in (before, now))
    return any(old[number] != new[number] for number in old.keys() & new.keys())


def _labels(before: Table, now: Table) -> Iterator[Drift]:
    old, new = dict(before.enum_labels), dict(now.enum_labels)
    was, is_ = (dict(mark.split(":") for mark in table.enum_rows.split()) for table in (before, now))
    for oid in sorted(old.keys() & new.keys()):
        if old[oid] != new[oid]:
            what = f"value {old[oid]!r} of an enum is called {new[oid]!r} now, in older rows too"
            yield Drift(before.name, DriftKind.LABELS, Remedy.COPY, what)
        elif was.get(str(oid), is_.get(str(oid))) != is_.get(str(oid)):
            what = f"value {old[oid]!r} of an enum was called otherwise meanwhile, and rows may hold that"
            yield Drift(before.name, DriftKind.LABELS, Remedy.COPY, what)


def _composites(before: Table, now: Table) -> Iterator[Drift]:
    old = {composite.oid: composite for composite in before.composites}
    for composite in now.composites:
        if composite.oid in old and old[composite.oid].attributes != composite.attributes:
            what = f"type {composite.name!r} has other attributes now, in older rows too"
            yield Drift(before.name, DriftKind.TYPES, Remedy.COPY, what)


def _columns(before: Table, now: Table) -> Iterator[Drift]:
    old, new = ({column.attnum: column for column in table.columns} for table in (before, now))
    for attnum in sorted(old.keys() | new.keys()):
        was, is_ = old.get(attnum), new.get(attnum)
        if was is None and is_ is not None:
            yield _added(before, now, is_)
        elif was is not None and is_ is None:
            yield _column_change(before, f'column "{was.name}" was dropped or is not published any more')
        elif was is not None and is_ is not None and was.name != is_.name:
            yield _column_change(before, f'column "{was.name}" was renamed to "{is_.name}"')
        elif was is not None and is_ is not None and _changed(was.type, is_.type):
            yield _column_change(before, f'the type of column "{was.name}" changed')


def _changed(was: PgType, is_: PgType) -> bool:
    """Whether the type is another one; a renamed type is the same."""
    return (was.oid, was.typmod) != (is_.oid, is_.typmod)


def _added(before: Table, now: Table, column: Column) -> Drift:
    """An added column is followed exactly only if every older row has NULL in it."""
    if column.attnum <= before.highest_attnum:
        return _column_change(before, f'column "{column.name}", which was there before, is published now')
    if column.missing is not None or column.not_null or column.generated:
        return _column_change(before, f'column "{column.name}" came with a value in older rows')
    if _new_files(before, now):
        # A volatile default rewrites the table; VACUUM FULL writes a default into the rows and forgets it.
        return _column_change(before, f'column "{column.name}" came, and older rows may have a value in it')
    return Drift(before.name, DriftKind.COLUMNS, Remedy.FOLLOW, f'has a new column "{column.name}"')


def _column_change(before: Table, what: str) -> Drift:
    return Drift(before.name, DriftKind.COLUMNS, Remedy.SET_ASIDE, what)


def _key(before: Table, now: Table) -> Iterator[Drift]:
    if before.updates_seen != now.updates_seen:
        what = "its updates and deletes are seen now" if now.updates_seen else "its updates are not seen any more"
        yield Drift(before.name, DriftKind.KEY, Remedy.COPY if now.updates_seen else Remedy.SET_ASIDE, what)
    elif (reason := key_changed(before, now)) is not None:
        yield Drift(before.name, DriftKind.KEY, Remedy.SET_ASIDE, reason)


def key_changed(before: Table, now: Table) -> str | None:
    """How the key differs; None if it is the same one.

    A primary key that was dropped and created again has a constraint with another OID (REINDEX CONCURRENTLY keeps it).
    In between, nothing kept rows with equal keys out: under REPLICA IDENTITY FULL such rows are changed and deleted,
    and the stream does not say which of them is meant.
    """
    if (before.updates_seen, before.key, before.multiset) != (now.updates_seen, now.key, now.multiset):
        return "its key changed"
    if before.key and before.key_constraint != now.key_constraint:
        return "its key was dropped and created again"
    return None
