"""Decides what happens to a mirror when its table has changed, or when a row of the log does not fit the mirror.

The catalog check makes this decision for each table. The first row below that applies decides. The terms:

- **copied**: the whole table is copied again. **copied if small**: only if it is not larger than the setting
  ``recopy_bytes``; otherwise it is set aside until the operator requests a copy.
- **reshaped**: the mirror's own rows get the new structure, without a copy.
- **set aside**: pgcdc stops following the table, and reports why.
- **decided later**: nothing happens now; a later catalog check decides.

| situation | the mirror |
|---|---|
| the table was renamed, and its mirror has the old name: rows or partitions changed outside of the stream | copied |
| the table was renamed, and its mirror has the old name | decided later |
| no mirror can contain the table | set aside |
| no mirror could contain the table before, but now a mirror can | copied |
| rows were added or removed outside of the stream, or updates can be followed only now | copied |
| the log has rows of the table as rows of another table, of which it was a partition for some time | copied |
| the table has new files, and the catalog does not show which command made them | copied if small |
| the table is set aside, and partitions were added or removed | copied |
| the table is set aside; or its mirror is being reshaped or moved; or `pgcdc pause apply` was run | decided later |
| columns or key have changed, or the rows were rewritten | reshaped if its own rows suffice, else copied if small |
| a partition with rows was added | copied if small |
| partitions were removed, or added without rows | reshaped |
| the log has rows of a partition that was added and removed between two catalog checks | copied |
| the log has a row that cannot be read | reshaped if its own rows suffice, else copied if small |
| a column was added that is NULL in all older rows | reshaped, once the mirror has reached the LSN of the check |
| nothing has changed | stays |

With ``schema_changes: set_aside``, a table with another structure is set aside instead of reshaped or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.structure.differences import Change, Difference
from pgcdc_assets.structure.record import Strange, TableRecord
from pgcdc_assets.structure.successor import alike, obstacle

PAGE_BYTES: Final = 8192
"""Default size of a page on the source. A server can be built with another size."""
_TOLD: Final = 5
"""The most changes of one table that a report names."""
_NOT_CARRIED: Final = frozenset({
    Difference.RECREATED, Difference.REPUBLISHED, Difference.PARTITIONS_UNTOLD, Difference.VALUES, Difference.KEY_SEEN,
})  # fmt: skip
_STRUCTURE: Final = frozenset({Difference.REWRITTEN, Difference.COLUMNS, Difference.KEY})


@dataclass(frozen=True)
class Rules:
    """The settings on which the verdict depends."""

    schema_changes: Literal["rewrite", "metadata", "set_aside"]
    recopy_bytes: int


@dataclass(frozen=True)
class Stay:
    """Nothing happens. Changes are applied to the mirror as before."""


@dataclass(frozen=True)
class Later:
    """Nothing happens now. A later catalog check decides."""


@dataclass(frozen=True)
class Reshape:
    """The mirror's own rows get the new structure. ``leaves``: only partitions were added or removed, so only the rows
    of removed partitions are deleted."""

    what: str
    leaves: bool = False


@dataclass(frozen=True)
class AfterRows:
    """As :class:`Reshape`, but only after the mirror has reached the LSN at which the catalog showed the new columns,
    because rows below that LSN may already contain the columns."""

    what: str


@dataclass(frozen=True)
class Recopy:
    """The table is copied again. ``restructured``: whether the reason is reported as a change of structure."""

    reason: str
    restructured: bool = False


@dataclass(frozen=True)
class SetAside:
    """pgcdc stops following the table."""

    reason: str
    refused: bool = False
    """Whether the reason is that no mirror can contain the table."""


Verdict = Stay | Later | Reshape | AfterRows | Recopy | SetAside


def verdict(
    record: TableRecord, now: Table, found: Sequence[Change], rules: Rules, *,
    refusal: str | None = None, without_rows: Callable[[int], bool] = lambda oid: False, paused: bool = False,
) -> Verdict:  # fmt: skip
    """Decides what happens to the mirror of ``record``, whose table the catalog shows as ``now``. ``found``: the
    differences between the two (:func:`differences.changes`). ``refusal``: why no mirror can contain the table; None if
    a mirror can. ``without_rows``: returns whether the relation with this OID certainly has no rows. ``paused``:
    whether mirrors must not be changed now."""
    unread, lost, partitions = record.unread, _of(found, _NOT_CARRIED), _of(found, {Difference.PARTITIONS})
    if record.former is not None:
        return Recopy((lost or partitions)[0].what) if lost or partitions else Later()
    if refusal is not None:
        return SetAside(refusal, refused=True)
    if record.refused:
        return Recopy("can be mirrored now")
    if lost:
        return Recopy(lost[0].what)
    if unread is not None and unread.how is Strange.ATTACHED:
        return Recopy(unread.what)
    if files := _of(found, {Difference.NEW_FILES}):
        return _recopied(now, rules, files[0].what)
    if not record.state.readable:
        return Recopy(partitions[0].what) if partitions else Later()
    if record.reshaping or (paused and (partitions or rules.schema_changes != "set_aside")):
        return Later()
    if structure := _of(found, _STRUCTURE):
        return _restructured(record, now, rules, named(structure))
    if partitions:
        return _partitions(record, now, rules, without_rows, partitions[0].what)
    if unread is not None and unread.how is Strange.PARTITION:
        return Recopy(unread.what)
    if unread is not None:
        return _restructured(record, now, rules, unread.what)
    return _columns_added(record, now, rules, found[0].what) if found else Stay()


def reported(record: TableRecord, found: Sequence[Change]) -> str:
    """The changes of a table that are reported, in one line; empty if there are none."""
    silent = {Difference.COLUMN_ADDED} if record.state.readable else {Difference.COLUMN_ADDED, *_STRUCTURE}
    return named([change for change in found if change.difference not in silent])


def named(found: Sequence[Change]) -> str:
    """The changes of one table in one line."""
    more = f", and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return ", ".join(change.what for change in found[:_TOLD]) + more


def _of(found: Sequence[Change], differences: frozenset[Difference] | set[Difference]) -> list[Change]:
    return [change for change in found if change.difference in differences]


def _restructured(record: TableRecord, now: Table, rules: Rules, what: str) -> Verdict:
    if rules.schema_changes == "set_aside":
        return SetAside(what)
    reason = obstacle(record.table, now)
    if reason is not None:
        return _recopied(now, rules, f"{what} ({reason})" if reason not in what else what)
    if record.table.lineage is not None and alike(record.table, now):
        # The mirror already has the new structure, and the row still does not fit.
        return _recopied(now, rules, what)
    return Reshape(what)


def _partitions(
    record: TableRecord, now: Table, rules: Rules, without_rows: Callable[[int], bool], what: str
) -> Verdict:
    """Decides if partitions were added or removed. The stream does not contain the rows that a partition had when it
    was attached. If a new partition is empty now, pgcdc assumes that it had no rows then, and that the stream therefore
    contains all its rows."""
    known = {leaf.oid for leaf in record.table.leaves}
    filled = next((leaf for leaf in now.leaves if leaf.oid not in known and not without_rows(leaf.oid)), None)
    if filled is not None:
        return _recopied(now, rules, f"has a new partition {filled.name}, with rows in it")
    return Reshape(what, leaves=True)


def _columns_added(record: TableRecord, now: Table, rules: Rules, what: str) -> Verdict:
    if rules.schema_changes == "set_aside":
        # The mirror is not reshaped now. The first row of the log that has the column adds it to the mirror.
        return Later()
    return AfterRows(what) if obstacle(record.table, now) is None else _restructured(record, now, rules, what)


def _recopied(now: Table, rules: Rules, what: str) -> Verdict:
    size = now.pages * PAGE_BYTES
    if size <= rules.recopy_bytes:
        return Recopy(what, restructured=True)
    return SetAside(f"{what}; it has {size >> 20} MiB, more than `recopy_bytes`, so pgcdc does not copy it by itself")
