"""Which structures led to the one that the catalog shows, by what event triggers said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.core.catalog import Column, Lineage, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.noted import StructureNote, names_suffice, structure_changes

INT, TEXT = PgType(23, "int4"), PgType(25, "text")
TYPES = [[23, "int4", "b", ",", 0, -1, 0], [25, "text", "b", ",", 0, -1, 0]]
ID = Column(1, "id", INT, True)


def table(*columns: tuple[Column, int], relfilenode: int = 5, name: str = "t") -> Table:
    """``columns``: each with the xmin of its row."""
    marks = " ".join(f"{column.attnum}:{xmin}" for column, xmin in columns)
    return Table(
        1000, TableName("public", name), tuple(column for column, _ in columns), key=(1,), identity_key=(1,),
        relfilenode=relfilenode, toast=6, column_rows=marks,
    )  # fmt: skip


BEFORE = table((ID, 7), (Column(2, "a", TEXT), 7))
RENAMED = table((ID, 7), (Column(2, "b", TEXT), 20))
ADDED = table((ID, 7), (Column(2, "b", TEXT), 20), (Column(3, "c", INT, missing="5"), 30))


def note(xid: int, now: Table, at: int | None = None, tag: str = "ALTER TABLE", **more: Any) -> StructureNote:
    """Of transaction ``xid``, which commits at its number unless ``at`` says otherwise."""
    marks = dict(mark.split(":") for mark in now.column_rows.split())
    told = {
        "oid": now.oid, "schema": "public", "name": now.name.name, "identity": "d", "relfilenode": now.relfilenode,
        "toast": now.toast, "listed": False, "types": TYPES, "indexes": [[True, False, True, ["id"]]],
        "columns": [
            [c.attnum, c.name, c.type.oid, c.type.typmod, c.not_null, c.generated, c.missing,
             f"{c.attnum}:{marks[str(c.attnum)]}", marks[str(c.attnum)] == str(xid)]
            for c in now.columns
        ],
    } | more  # fmt: skip
    lsn = at or xid
    return StructureNote.of(Lsn(lsn), Lsn(lsn + 5), _said(tag, told))


def _said(tag: str, *tables: dict[str, Any], rewritten: int | None = None) -> bytes:
    return json.dumps({"tag": tag, "tables": tables, "rewritten": rewritten}).encode()


LOOK = StructureNote.of(Lsn(25), Lsn(26), _said("ALTER TABLE"))
REWRITING = StructureNote.of(Lsn(20), Lsn(25), _said("ALTER TABLE", rewritten=1000))


def told(now: Table, *notes: StructureNote) -> list[tuple[int, int, Table]] | None:
    found = structure_changes(BEFORE, now, notes)
    return None if found is None else [(int(one.commit_lsn), int(one.end_lsn), one.table) for one in found]


def test_each_change_has_its_place() -> None:
    assert told(ADDED, note(20, RENAMED), note(30, ADDED)) == [(20, 25, RENAMED), (30, 35, ADDED)]


def test_of_one_transaction_the_last_word_counts() -> None:
    between = table((ID, 7), (Column(2, "z", TEXT), 20))
    assert told(RENAMED, note(20, between), note(20, RENAMED)) == [(20, 25, RENAMED)]


def test_what_a_mirror_need_not_follow_is_no_change() -> None:
    strict = table((replace(ID, not_null=False), 15), (Column(2, "a", TEXT), 7))
    later = replace(RENAMED, columns=(replace(ID, not_null=False), RENAMED.columns[1]), column_rows="1:15 2:20")
    assert told(strict, note(15, strict)) == []
    assert told(later, note(15, strict), note(20, later)) == [(20, 25, later)]


def test_there_and_back_are_two_changes() -> None:
    back = table((ID, 7), (Column(2, "a", TEXT), 30))
    assert told(back, note(20, RENAMED), note(30, back)) == [(20, 25, RENAMED), (30, 35, back)]


def test_a_rewrite_is_a_change() -> None:
    rewritten = table((ID, 7), (Column(2, "a", INT), 20), relfilenode=9)
    assert told(rewritten, REWRITING, note(20, rewritten)) == [(20, 25, rewritten)]


def test_other_files_alone_are_none() -> None:
    """As TRUNCATE and VACUUM FULL make them."""
    emptied = replace(RENAMED, relfilenode=9)
    assert told(emptied, note(20, emptied)) == [(20, 25, RENAMED)]
    assert told(emptied, replace(REWRITING, rewritten=1), note(20, emptied)) == [(20, 25, RENAMED)]


@pytest.mark.parametrize(
    ("now", "notes"),
    [
        (RENAMED, ()),
        (ADDED, (note(20, RENAMED),)),
        (ADDED, (note(30, ADDED),)),
        (ADDED, (note(20, RENAMED), LOOK, note(30, ADDED))),
        (RENAMED, (note(20, RENAMED, listed=True),)),
        (replace(RENAMED, key=(2,)), (note(20, RENAMED),)),
        (RENAMED, (note(20, RENAMED, indexes=[[True, False, True, ["b"]]]), note(20, RENAMED))),
        (RENAMED, (note(20, replace(RENAMED, name=TableName("public", "u"))),)),
        (RENAMED, (note(20, replace(RENAMED, oid=2)),)),
        (replace(RENAMED, partitioned=True), (note(20, RENAMED),)),
        (RENAMED, (note(20, RENAMED, types=[]),)),
    ],
    ids=["no message", "another one later", "one before is lacking", "partitions were touched", "columns are listed",
         "another key", "another key meanwhile", "another name", "another table", "partitioned", "types are lacking"],
)  # fmt: skip
def test_what_the_messages_do_not_tell_is_left_to_the_catalog(now: Table, notes: tuple[StructureNote, ...]) -> None:
    assert told(now, *notes) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"1", b'{"tag": 1}', b'{"tag": "x", "tables": [{}]}', b'{"tag": "x", "tables": 5}',
     b'{"tag": "x", "tables": []}'],
)  # fmt: skip
def test_whatever_somebody_emits_is_a_reason_to_look(content: bytes) -> None:
    found = StructureNote.of(Lsn(1), Lsn(2), content)
    assert (found.tables, found.parted) == ((), False)


def _suffice(now: Table, *notes: StructureNote, after: int = 20, former: tuple[Column, ...] = ()) -> bool:
    return names_suffice(replace(now, lineage=Lineage(1, 3, 25, former)), Lsn(after), notes)


def test_names_suffice_where_no_other_column_had_them() -> None:
    again = table((ID, 7), (Column(2, "b", TEXT), 20), (Column(4, "c", INT), 30))
    other_type = table((ID, 7), (Column(2, "b", TEXT), 20), (Column(4, "c", TEXT), 30))
    assert _suffice(ADDED, note(20, RENAMED), note(20, ADDED))
    assert not _suffice(again, note(20, ADDED), note(20, again)), "within the transaction"
    assert _suffice(other_type, note(20, ADDED), note(20, other_type))
    assert not _suffice(again, note(20, again), former=ADDED.columns[2:])
    assert _suffice(ADDED, note(20, ADDED), former=BEFORE.columns[1:])
    assert _suffice(ADDED, note(20, ADDED), note(20, again, oid=7)), "another table's"


def test_names_suffice_in_the_transaction_of_the_change_alone() -> None:
    assert _suffice(ADDED, after=25), "from its structure on"
    assert not _suffice(ADDED), "a look at the catalog found it"
    assert not _suffice(ADDED, note(20, ADDED), after=19)
    assert not _suffice(ADDED, note(20, ADDED, at=10)), "an earlier change"
    assert _suffice(ADDED, note(20, ADDED), after=24)
