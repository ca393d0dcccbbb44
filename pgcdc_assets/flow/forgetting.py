"""Deletes the mirrors and feeds of tables that are no longer followed. No other operation deletes them, because a
mirror may be the last copy of a table that was dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import UnknownTable, UsageError
from pgcdc_assets.flow.work import Work


@dataclass(frozen=True)
class Forgotten:
    """What was deleted of one table: its mirror and its change feed."""

    table: TableName
    files: int
    bytes: int


@dataclass(frozen=True)
class ForgetReport:
    tables: Sequence[Forgotten]


def forget(work: Work, tables: Sequence[TableName]) -> ForgetReport:
    """Delete the mirrors and feeds of these tables. The points that list the tables can no longer read them.

    Nothing is deleted if one of the tables is followed (UsageError), or has no mirror in the lake (UnknownTable).
    """
    for name in tables:
        _refuse(work, name)
    return ForgetReport([_forgotten(work, name) for name in dict.fromkeys(tables)])


def _refuse(work: Work, name: TableName) -> None:
    if name in work.progress:
        do = "leave it out by the setting `tables`, or drop it, and run `pgcdc sync` first"
        raise UsageError("is followed, so its mirror stays", thing=f"table {name}", do=do)
    if (waiting := next((one for one in work.progress if one.former == name), None)) is not None:
        do = f"run `pgcdc sync` first: {waiting.table.name} goes on with it"
        raise UsageError("is what another table goes on with", thing=f"mirror {name}", do=do)
    if not work.target.keeps(name):
        raise UnknownTable("has no mirror in this lake", thing=str(name))


def _forgotten(work: Work, name: TableName) -> Forgotten:
    of_feed, of_mirror = work.feeds.remove(name), work.target.forget(name)
    work.observer.progress("forget", f"table {name}: its mirror and feed are deleted")
    return Forgotten(name, of_feed[0] + of_mirror.files, of_feed[1] + of_mirror.bytes)
