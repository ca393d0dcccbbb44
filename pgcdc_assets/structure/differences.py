"""Compares the table recorded for a mirror with the table in the catalog, without I/O. It finds changes of the table,
its columns, partitions and publications. The stream does not show at which LSN such a change was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.core.marks import Files, Mark, Marks


class Difference(Enum):
    """The kinds of difference. :mod:`pgcdc_assets.structure.verdict` decides what follows from each difference."""

    RECREATED = auto()
    """Another table has the name now: the table was dropped and created again."""
    REPUBLISHED = auto()
    """The publication was changed, or the table was removed from it and added again."""
    PARTITIONS = auto()
    """Partitions were added or removed."""
    PARTITIONS_UNTOLD = auto()
    """Partitions were removed and the mirror cannot find their rows, or partitions were removed and added again."""
    REWRITTEN = auto()
    """ALTER TABLE rewrote the rows."""
    NEW_FILES = auto()
    """The table has new files, and the stream may lack changes that were made by, or before, the command that made
    them."""
    VALUES = auto()
    """Values in older rows now have a different text, for example after ALTER TYPE RENAME VALUE."""
    COLUMN_ADDED = auto()
    """A column was added that is NULL in all older rows."""
    COLUMNS = auto()
    """Columns were changed in any way other than COLUMN_ADDED."""
    KEY = auto()
    """The key has changed, or updates and deletes are no longer in the stream."""
    KEY_SEEN = auto()
    """Updates and deletes are in the stream now, but were not before. So the mirror may lack earlier updates and
    deletes."""


@dataclass(frozen=True)
class Change:
    """One difference of a table, and its description."""

    difference: Difference
    what: str


def changes(before: Table, now: Table) -> list[Change]:
    """All differences between ``before``, the table recorded for the mirror, and ``now``, the table in the catalog."""
    if before.oid != now.oid:
        return [Change(Difference.RECREATED, "was dropped and created again")]
    return [*_publication(before, now), *_partitions(before, now), *_storage(before, now), *_labels(before, now),
            *_composites(before, now), *_columns(before, now), *_key(before, now)]  # fmt: skip


def rewritten(before: Marks, now: Marks) -> bool:
    """Whether a row of a system catalog that is in both ``before`` and ``now`` has a new version."""
    if before == now:
        return False
    old, new = dict(before), dict(now)
    return any(old[number] != new[number] for number in old.keys() & new.keys())


def _publication(before: Table, now: Table) -> Iterator[Change]:
    was, is_ = before.marks, now.marks
    if was.publications and is_.publications and _kept_rows(before, now) != _kept_rows(now, before):
        what = "its publication was changed or created again, or lacked the table for some time: changes may be missing"
        yield Change(Difference.REPUBLISHED, what)
    elif before.row_filter != now.row_filter:
        yield Change(Difference.REPUBLISHED, "its publication's row filter changed")
    elif rewritten(was.schemas, is_.schemas):
        what = "was temporarily in another schema, which its publication does not publish: changes may be missing"
        yield Change(Difference.REPUBLISHED, what)


def _kept_rows(table: Table, other: Table) -> set[Mark]:
    """The marks of the catalog rows that publish ``table``, except rows that list leaves which ``other`` does not
    have. Added and removed leaves are compared in :func:`_partitions`."""
    kept = {leaf.oid for leaf in other.leaves}
    own = {mark for leaf in table.leaves if leaf.oid not in kept for mark in leaf.listed}
    return set(table.marks.publications) - own


def _partitions(before: Table, now: Table) -> Iterator[Change]:
    """Yields the differences in partitions. ATTACH adds rows, DETACH removes rows, and the stream shows neither."""
    old, new = ({leaf.oid: leaf for leaf in table.leaves} for table in (before, now))
    # To delete the rows of a removed leaf, the mirror has the leaf's name in each row. Rows that are published via the
    # root do not name their leaf.
    unknown = before.via_root or now.via_root
    outside = {one.oid: one.why for one in now.outside}
    for oid in sorted(old.keys() - new.keys()):
        kind = Difference.PARTITIONS_UNTOLD if unknown else Difference.PARTITIONS
        what = f"lost partition {old[oid].name}" + (f", which {outside[oid]}" if oid in outside else "")
        yield Change(kind, what)
    names = {old[oid].name for oid in old.keys() & new.keys()}
    for oid in sorted(new.keys() - old.keys()):
        back = oid in before.descent.left or new[oid].name in names
        kind = Difference.PARTITIONS_UNTOLD if back else Difference.PARTITIONS
        yield Change(kind, f"has a new partition {new[oid].name}")
    for oid in sorted(old.keys() & new.keys()):
        was, is_ = old[oid].attached, new[oid].attached
        if was and is_ and was != is_:
            what = f"partition {new[oid].name} was detached, and attached again: changes may be missing"
            yield Change(Difference.PARTITIONS_UNTOLD, what)


def _storage(before: Table, now: Table) -> Iterator[Change]:
    """Yields a difference if the table has new files that ALTER TABLE may have made. TRUNCATE, VACUUM FULL and CLUSTER
    make new files too, but after these commands the stream is still complete. These three commands keep the TOAST
    table, and mostly leave pg_attribute unchanged. (An exception: VACUUM FULL and CLUSTER move the values of
    ``attmissingval`` from pg_attribute into the rows.) If the catalog does not show which kind of command made the
    files, this alone is a difference."""
    if _maybe_rewritten(before, now) and rewritten(before.marks.columns, now.marks.columns):
        yield Change(Difference.REWRITTEN, "its rows were rewritten by ALTER TABLE")
    elif not list(_columns(before, now)):
        yield from _behind_the_stream(before, now)


def _behind_the_stream(before: Table, now: Table) -> Iterator[Change]:
    old, new = _files(before), _files(now)
    names = {now.oid: now.name, **{leaf.oid: leaf.name for leaf in now.leaves}}
    for oid in _new_files(before, now):
        if old[oid].toast not in (0, new[oid].toast):
            what = "was rewritten by ALTER TABLE, as SET UNLOGGED and SET LOGGED do: changes may be missing"
        elif new[oid].traceless:
            what = f"{names[oid]} has new files, and the catalog does not show why: changes may be missing"
        else:
            continue
        yield Change(Difference.NEW_FILES, what)


def _maybe_rewritten(before: Table, now: Table) -> bool:
    """Whether ALTER TABLE may have made the new files. It would then also have made a new TOAST table."""
    old, new = _files(before), _files(now)
    return any(old[oid].toast == 0 or old[oid].toast != new[oid].toast for oid in _new_files(before, now))


def _new_files(before: Table, now: Table) -> list[int]:
    old, new = _files(before), _files(now)
    return [oid for oid in sorted(old.keys() & new.keys()) if old[oid].relfilenode != new[oid].relfilenode]


def _files(table: Table) -> dict[int, Files]:
    return {table.oid: table.marks.files, **{leaf.oid: leaf.files for leaf in table.leaves}}


def _labels(before: Table, now: Table) -> Iterator[Change]:
    old, new = ({one.oid: one for one in table.marks.labels} for table in (before, now))
    for oid in sorted(old.keys() & new.keys()):
        was, is_ = old[oid], new[oid]
        if was.label != is_.label:
            what = f"enum value {was.label!r} was renamed to {is_.label!r}, which changes older rows too"
            yield Change(Difference.VALUES, what)
        elif was.xmin != is_.xmin:
            what = f"enum value {was.label!r} temporarily had another name, which rows may contain"
            yield Change(Difference.VALUES, what)


def _composites(before: Table, now: Table) -> Iterator[Change]:
    old = {composite.oid: composite for composite in before.marks.composites}
    for composite in now.marks.composites:
        if composite.oid in old and old[composite.oid].attributes != composite.attributes:
            what = f"the attributes of type {composite.name!r} changed, which changes older rows too"
            yield Change(Difference.VALUES, what)


def _columns(before: Table, now: Table) -> Iterator[Change]:
    old, new = ({column.attnum: column for column in table.columns} for table in (before, now))
    for attnum in sorted(old.keys() | new.keys()):
        was, is_ = old.get(attnum), new.get(attnum)
        if was is None and is_ is not None:
            yield _added(before, now, is_)
        elif was is not None and is_ is None:
            yield _changed_column(f'column "{was.name}" was dropped or is no longer published')
        elif was is not None and is_ is not None and was.name != is_.name:
            yield _changed_column(f'column "{was.name}" was renamed to "{is_.name}"')
        elif was is not None and is_ is not None and (was.type.oid, was.type.typmod) != (is_.type.oid, is_.type.typmod):
            yield _changed_column(f'the type of column "{was.name}" changed')


def _added(before: Table, now: Table, column: Column) -> Change:
    if column.attnum <= before.highest_attnum:
        return _changed_column(f'column "{column.name}" existed before, but is published only now')
    if column.missing is not None or column.not_null or column.generated:
        return _changed_column(f'column "{column.name}" was added, and older rows have a value in it')
    if _new_files(before, now):
        # ADD COLUMN with a volatile default writes new files. VACUUM FULL also does, and moves the default of older
        # rows (attmissingval) from the catalog into the rows.
        return _changed_column(f'column "{column.name}" was added, and older rows may have a value in it')
    return Change(Difference.COLUMN_ADDED, f'has a new column "{column.name}"')


def _changed_column(what: str) -> Change:
    return Change(Difference.COLUMNS, what)


def _key(before: Table, now: Table) -> Iterator[Change]:
    if before.updates_seen != now.updates_seen:
        if now.updates_seen:
            yield Change(Difference.KEY_SEEN, "its updates and deletes are replicated now")
        else:
            yield Change(Difference.KEY, "its updates and deletes are no longer replicated")
    elif (reason := key_changed(before, now)) is not None:
        yield Change(Difference.KEY, reason)


def key_changed(before: Table, now: Table) -> str | None:
    """How the key has changed; None if the key is the same.

    A key that was dropped and created again counts as changed, because several rows may have had the same key values
    while it did not exist. With REPLICA IDENTITY FULL, PostgreSQL allows changes of such rows, and a mirror with a key
    cannot apply them. The new key has a new OID (:attr:`TableMarks.key_constraint`)."""
    if (before.updates_seen, before.key, before.multiset) != (now.updates_seen, now.key, now.multiset):
        return "its key changed"
    if before.key and before.marks.key_constraint != now.marks.key_constraint:
        return "its key was dropped and created again"
    return None
