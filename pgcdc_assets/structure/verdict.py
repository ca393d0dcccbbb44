"""Decides what becomes of a mirror when the catalog shows its table otherwise, or a row came that it cannot take. Pure.

The first line that applies counts:

| the table | the mirror |
|---|---|
| cannot be mirrored as it is | is set aside |
| could not be mirrored until now | is copied |
| has rows that the stream did not carry, or updates that it can carry only now | is copied |
| has new files, and nothing tells what made them | is copied, within ``recopy_bytes`` |
| is set aside, and partitions came or went | is copied |
| is set aside, or its mirror is being changed, or mirrors are not to change now | stays as it is |
| has other columns or another key, or was rewritten | follows by its own rows, or is copied within ``recopy_bytes`` |
| got a partition that had rows before | is copied, within ``recopy_bytes`` |
| got or lost other partitions | follows by its own rows |
| had a partition that came and went, with rows in the log | is copied |
| has rows in the log that the mirror cannot read | follows by its own rows, or is copied within ``recopy_bytes`` |
| got a column that is NULL in all older rows | follows once it has taken all rows from before |
| is as before | goes on |

With ``schema_changes: set_aside`` a table with another structure is set aside instead of followed or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.structure.differences import Change, Difference, changes
from pgcdc_assets.structure.record import TableRecord
from pgcdc_assets.structure.successor import alike, obstacle

PAGE_BYTES: Final = 8192
"""Size of a page on the source, unless it was built otherwise."""
_TOLD: Final = 5
"""Changes of one table that are named."""
_NOT_CARRIED: Final = frozenset({
    Difference.RECREATED, Difference.REPUBLISHED, Difference.PARTITIONS_UNTOLD, Difference.VALUES, Difference.KEY_SEEN,
})  # fmt: skip
_STRUCTURE: Final = frozenset({Difference.REWRITTEN, Difference.COLUMNS, Difference.KEY})


@dataclass(frozen=True)
class Rules:
    """What the settings say."""

    schema_changes: Literal["rewrite", "metadata", "set_aside"]
    recopy_bytes: int


@dataclass(frozen=True)
class Stay:
    """The mirror goes on."""


@dataclass(frozen=True)
class Later:
    """Nothing now: a later look decides."""


@dataclass(frozen=True)
class Reshape:
    """The mirror's rows get the new structure; with ``leaves``, those of partitions that went leave it."""

    what: str
    leaves: bool = False


@dataclass(frozen=True)
class AfterRows:
    """As :class:`Reshape`, once the mirror has taken all rows from before its table had the new columns."""

    what: str


@dataclass(frozen=True)
class Recopy:
    """The table is copied again."""

    reason: str
    restructured: bool = False
    """Whether its structure is the reason."""


@dataclass(frozen=True)
class SetAside:
    reason: str
    refused: bool = False
    """No mirror can hold the table."""


Verdict = Stay | Later | Reshape | AfterRows | Recopy | SetAside


def verdict(
    record: TableRecord, now: Table, rules: Rules, *,
    refusal: str | None = None, without_rows: Callable[[int], bool] = lambda oid: False, paused: bool = False,
) -> Verdict:  # fmt: skip
    """What becomes of the mirror of a table that the catalog shows as ``now``.

    ``refusal``: why no mirror can hold it. ``without_rows``: whether a relation certainly has no row. ``paused``:
    mirrors are not to change.
    """
    if refusal is not None:
        return SetAside(refusal, refused=True)
    if record.refused:
        return Recopy("can be mirrored now")
    found = changes(record.table, now)
    if lost := _of(found, _NOT_CARRIED):
        return Recopy(lost[0].what)
    if files := _of(found, {Difference.NEW_FILES}):
        return _recopied(now, rules, files[0].what)
    partitions = _of(found, {Difference.PARTITIONS})
    if not record.state.readable:
        return Recopy(partitions[0].what) if partitions else Later()
    if record.reshaping or (paused and (partitions or rules.schema_changes != "set_aside")):
        return Later()
    if structure := _of(found, _STRUCTURE):
        return _restructured(record, now, rules, named(structure))
    if partitions:
        return _partitions(record, now, rules, without_rows, partitions[0].what)
    if record.stray is not None:
        return Recopy(record.stray)
    if record.unread is not None:
        return _restructured(record, now, rules, record.unread)
    return _columns_added(record, now, rules, found[0].what) if found else Stay()


def told(record: TableRecord, now: Table) -> str:
    """What is said of a table: the changes that the stream does not carry, in one line; empty if there are none."""
    silent = {Difference.COLUMN_ADDED} if record.state.readable else {Difference.COLUMN_ADDED, *_STRUCTURE}
    return named([change for change in changes(record.table, now) if change.difference not in silent])


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
        # The mirror has the new structure already, and rows still cannot be read.
        return _recopied(now, rules, what)
    return Reshape(what)


def _partitions(
    record: TableRecord, now: Table, rules: Rules, without_rows: Callable[[int], bool], what: str
) -> Verdict:
    """Rows that a partition had when it came were in no stream. One that is seen without a row, after it came, has had
    all rows that it ever gets in the stream."""
    known = {leaf.oid for leaf in record.table.leaves}
    filled = next((leaf for leaf in now.leaves if leaf.oid not in known and not without_rows(leaf.oid)), None)
    if filled is not None:
        return _recopied(now, rules, f"has a new partition {filled.name}, with rows in it")
    return Reshape(what, leaves=True)


def _columns_added(record: TableRecord, now: Table, rules: Rules, what: str) -> Verdict:
    if rules.schema_changes == "set_aside":
        # Rows bring such columns by themselves.
        return Later()
    return AfterRows(what) if obstacle(record.table, now) is None else _restructured(record, now, rules, what)


def _recopied(now: Table, rules: Rules, what: str) -> Verdict:
    """Copied, unless the table is so large that nobody may want that."""
    size = now.pages * PAGE_BYTES
    if size <= rules.recopy_bytes:
        return Recopy(what, restructured=True)
    return SetAside(f"{what}; it has {size >> 20} MiB, more than `recopy_bytes`, and waits for a word")
