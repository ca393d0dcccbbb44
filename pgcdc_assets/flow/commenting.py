"""Carries comments of tables and columns to the mirrors, after each catalog check.

Comments change no row and no position, and need no exact LSN. A mirror that cannot take them is still followed. A copy
has the comments of its snapshot as soon as it is committed. A change of the structure keeps the comments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.work import Work


def carry_comments(work: Work) -> bool:
    """Give followed mirrors the comments that the catalog check showed, in one commit of metadata each; returns whether
    any mirror got some. A failure is reported once. That mirror gets its comments when they change again."""
    carried = False
    for table in list(_commented(work)):
        version = None
        if not table.comments_read:
            work.observer.progress("watch", unread_comments(table.name))
        with contained() as failed:
            version = work.target.comment(table)
            carried = True
        if failed.reason is not None:
            what = f"the mirror of {table.name} lacks the comments of its table: {failed.reason}"
            work.observer.progress("watch", what)
        work.progress.commented(table.name, table.comments, version)
    return carried


def unread_comments(name: TableName) -> str:
    return f"the mirror of {name} lacks a comment of its table: it is not text in the source's encoding"


def _commented(work: Work) -> Iterator[Table]:
    """The followed tables whose comments have changed, with their new comments."""
    shown = {table.oid: table for table in work.catalog.tables}
    for entry in work.progress.followed():
        live = shown.get(entry.table.oid)
        if live is None or entry.reshaping:
            continue
        columns = {0, *(column.attnum for column in entry.table.columns)}
        comments = tuple(one for one in live.comments if one[0] in columns)
        if comments != entry.table.comments:
            yield replace(entry.table, comments=comments)
