"""Converts images (the decoder's columns) back to row messages, to compare them with the scalar decoder's messages."""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.protocol.columns import Images
from pgcdc_assets.protocol.layouts import RowKind
from pgcdc_assets.protocol.messages import UNCHANGED, Delete, Insert, OldKind, TupleData, Update, Value


def by_row(images: Sequence[Images]) -> dict[int, dict[str, TupleData]]:
    """The images of each row, by the letter of the image. Fails if a row has an image twice."""
    found: dict[int, dict[str, TupleData]] = {}
    for item in images:
        assert item.rows.tolist() == sorted(set(item.rows.tolist()))
        for values in item.text:
            values.validate(full=True)
            assert len(values) == len(item.rows)
        text: list[list[Value]] = [values.to_pylist() for values in item.text]
        for column, marks in enumerate(item.unchanged):
            for at in [] if marks is None else marks.nonzero()[0].tolist():
                assert text[column][at] is None
                text[column][at] = UNCHANGED
        for at, row in enumerate(item.rows.tolist()):
            assert item.image not in found.setdefault(row, {})
            found[row][item.image] = tuple(column[at] for column in text)
    return found


def messages(images: Sequence[Images], kind: RowKind, relation_id: int, count: int) -> list[Insert | Update | Delete]:
    """The messages from which the images were decoded. All messages are of the same relation."""
    rows = by_row(images)
    assert sorted(rows) == list(range(count))
    return [_message(rows[row], kind, relation_id) for row in range(count)]


def _message(images: dict[str, TupleData], kind: RowKind, relation_id: int) -> Insert | Update | Delete:
    old_kind: OldKind | None = "K" if "K" in images else "O" if "O" in images else None
    assert not {"K", "O"} <= set(images)
    if kind == "I":
        assert set(images) == {"N"}
        return Insert(relation_id, images["N"])
    if kind == "U":
        return Update(relation_id, old_kind, images[old_kind] if old_kind else None, images["N"])
    assert old_kind is not None
    assert "N" not in images
    return Delete(relation_id, old_kind, images[old_kind])
