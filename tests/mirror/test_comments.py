"""Comments in a mirror's metadata: comments from the source change with the source, and comments by other writers stay.
These tests do not use Spark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.delta.mapping import OURS, Columns, stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.mirror import STRUCTURE, Mirror
from tests.flow.mirrors import delta_target
from tests.mirror.structures import ID, OWNER, PLAIN, TEXT, A, N, T, made, relabelled, table

SAID: tuple[tuple[int, str], ...] = ((0, "all"), (2, "said"))


def commented(mirror: Mirror, table: Table) -> int:
    """Writes the comments of the table to its mirror. Returns the new version."""
    return delta_target(mirror.mirrors.layout, OWNER).comment(table)


def _now(mirror: Mirror) -> DeltaVersion:
    delta = mirror.again().delta
    assert delta is not None
    return delta


def _told(mirror: Mirror) -> dict[str, str]:
    metadata = _now(mirror).metadata
    columns = {
        field["name"]: field["metadata"].get("comment") for field in json.loads(metadata["schemaString"])["fields"]
    }
    return {name: text for name, text in {"": metadata.get("description"), **columns}.items() if text is not None}


def test_comments_are_written_once_and_removed_when_the_source_removes_them(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    before = _now(mirror)
    version = commented(mirror, replace(T, comments=SAID))
    assert version == before.number + 1
    assert _told(mirror) == {"": "all", "a": "said"}
    now = _now(mirror)
    assert (now.positions, now.files, now.protocol) == (before.positions, before.files, before.protocol)
    assert commented(mirror, replace(T, comments=SAID)) == version, "nothing is left to do"
    commented(mirror, T)
    assert _told(mirror) == {}
    assert stated(_now(mirror).metadata).fields == stated(before.metadata).fields, "no mark is left behind"
    assert commented(mirror, T) == version + 1


def test_comments_of_another_writer_stay_where_the_source_has_none(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    theirs = [{**field, "metadata": {"comment": "theirs"}} for field in stated(_now(mirror).metadata).fields]
    version = commit_columns(_now(mirror), Columns(theirs, {}), description="theirs")
    assert commented(mirror, T) == version
    commented(mirror, replace(T, comments=((2, "said"),)))
    assert _told(mirror) == {**dict.fromkeys(_told(mirror), "theirs"), "a": "said"}
    commented(mirror, T)
    assert "a" not in _told(mirror)
    assert set(_told(mirror).values()) == {"theirs"}


def test_comments_of_columns_that_the_mirror_lacks_are_not_written(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    more = table(ID, A, N, Column(4, "later", TEXT))
    commented(mirror, replace(more, comments=((2, "said"), (4, "of what comes"))))
    assert _told(mirror) == {"a": "said"}


def test_a_renamed_column_keeps_its_comment(tmp_path: Path) -> None:
    """Columns that exchange names keep their own comments. The structure that the mirror stores has no comments."""
    other = Column(3, "n", TEXT)
    before = replace(table(ID, A, other), comments=((2, "of a"), (3, "of n")))
    mirror = made(tmp_path, before, [["1"], ["a"], ["x"]])
    commented(mirror, before)
    after = relabelled(mirror, table(ID, replace(A, name="n"), replace(other, name="a")), before)
    assert _told(mirror) == {"a": "of n", "n": "of a"}
    assert after.comments == before.comments, "they are by attnum"
    assert commented(mirror, after) == _now(mirror).number
    assert json.loads(_now(mirror).configuration[STRUCTURE])["table"]["comments"] == []
    commented(mirror, replace(after, comments=((3, "of n"),)))
    assert _told(mirror) == {"a": "of n"}


def test_column_ids_and_physical_names_are_kept(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    after = relabelled(mirror, table(ID, replace(A, name="b"), N))
    before = {field["name"]: field["metadata"] for field in stated(_now(mirror).metadata).fields}
    commented(mirror, replace(after, comments=SAID))
    metadata = {field["name"]: field["metadata"] for field in stated(_now(mirror).metadata).fields}
    assert metadata["b"] == {**before["b"], "comment": "said", OURS: "true"}
    assert {name: metadata[name] for name in ("id", "n")} == {name: before[name] for name in ("id", "n")}


def test_a_mirror_without_a_copy_cannot_be_commented(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    with pytest.raises(LakeError, match="has no copy"):
        commented(mirror, replace(T, name=replace(T.name, name="other")))


def test_comments_are_saved_with_their_table() -> None:
    saved = replace(T, comments=SAID)
    assert Table.from_json(json.loads(json.dumps(saved.to_json()))) == saved
