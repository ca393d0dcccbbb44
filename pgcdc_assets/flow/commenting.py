"""Carries comments of tables and columns to the mirrors, before the point that lists them so.

They change no row and no position, and need no exact LSN: a look at the catalog shows them. Nothing is held up or set
aside by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.failures import of_one_table
from pgcdc_assets.flow.standing import TableProgress
from pgcdc_assets.flow.work import Work

AT_A_TIME = 50
"""Mirrors that get comments before one point, so that a migration that comments a thousand tables delays no point for
long. The others get theirs before the next."""


def lacks_comments(work: Work) -> bool:
    """Whether a followed mirror lacks comments that the last look showed, or has some that are gone."""
    return next(_lacking(work), None) is not None


def carry_comments(work: Work) -> None:
    """Give followed mirrors the comments that the last look showed. A mirror that cannot take them goes on without:
    that is reported, and tried again by the next run, or with other comments."""
    for entry, table in list(_lacking(work))[:AT_A_TIME]:
        name = entry.table.name
        try:
            version = work.target.comment(table)
        except Exception as error:
            if (failure := of_one_table(error)) is None:
                raise
            work.uncommented[name] = table.comments
            work.observer.progress("watch", f"the mirror of {name} lacks the comments of its table: {failure}")
            continue
        work.progress.commented(name, table.comments, version)


def _lacking(work: Work) -> Iterator[tuple[TableProgress, Table]]:
    """The followed tables whose mirrors have other comments than the last look showed, as they should be."""
    shown = {table.oid: table for table in work.catalog.tables}
    for entry in work.progress.followed():
        live = shown.get(entry.table.oid)
        if live is None or entry.reshaping or live.comments == entry.table.comments:
            continue
        columns = {0, *(column.attnum for column in entry.table.columns)}
        comments = tuple(one for one in live.comments if one[0] in columns)
        if comments not in (entry.table.comments, work.uncommented.get(entry.table.name)):
            yield entry, replace(entry.table, comments=comments)
