"""A mirror is continued under another name with its rows, deletions and position, without earlier content there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyroaring import BitMap64

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, commit_change
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.mirror.delta.mirror import Mirror
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import path_of
from tests.deltatables import commit, live_files, opened
from tests.flow.mirrors import delta_target
from tests.mirror.structures import NAME, OWNER, ROWS, T, made, rows

NEW = TableName("else", "new")
AS_NEW = replace(T, name=NEW)
FEW: list[list[str | None]] = [["9"], ["nine"], ["9.00"]]


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    """A mirror at position 20 with one deleted row."""
    found = made(tmp_path)
    delta = opened(found.path)
    gone = {delta.files[0].path: BitMap64([1])}
    commit_change(delta, FileChange([], gone), {f"{OWNER.app_id()}/{Lsn(10):X}": 20}, {})
    return found.again()


def _target(mirror: Mirror) -> DeltaTarget:
    return delta_target(mirror.mirrors.layout, OWNER)


def test_a_rename_moves_rows_deletions_and_position(mirror: Mirror) -> None:
    target = _target(mirror)
    version = target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    held = target.standing(NEW)
    assert held is not None
    assert (held.snapshot_lsn, held.replay_lsn, held.version) == (Lsn(30), Lsn(30), version)
    there = mirror.mirrors.open(NEW)
    assert rows(there) == rows(mirror)
    assert len(rows(there)) == len(ROWS[0]) - 1
    target.forget(NAME)
    assert len(rows(there)) == len(ROWS[0]) - 1, "its files are its own"


def test_a_rename_copies_the_version_it_was_given(mirror: Mirror) -> None:
    """Later versions under the old name may have the rows of another table."""
    seen, expected = mirror.version, rows(mirror)
    commit(mirror.path, [], "overwrite", {mirror.snapshot_app_id: 40})
    _target(mirror).rename(NAME, AS_NEW, seen, Lsn(30))
    assert rows(mirror.mirrors.open(NEW)) == expected


def test_a_rename_replaces_another_tables_copy_of_the_same_position(mirror: Mirror) -> None:
    """A later rename of the first table must not use the position of the other table's copy."""
    target = _target(mirror)
    target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    other = replace(AS_NEW, oid=T.oid + 1)
    version = target.rename(NAME, other, mirror.version, Lsn(30))
    held = target.standing(NEW)
    assert held is not None, "as long as both stand there"
    assert (held.snapshot_lsn, held.replay_lsn, held.version, held.followed) == (Lsn(30), Lsn(30), version, other)
    there = mirror.mirrors.open(NEW)
    commit(there.path, [], "append", {str(there.generation_app_id): 35})
    with pytest.raises(LakeError, match="has a copy of 0/1E that was already continued"):
        target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    target.rename(NAME, other, mirror.version, Lsn(30))
    target.rename(NAME, AS_NEW, mirror.version, Lsn(31))


def test_a_rename_that_died_before_its_commit_is_completed(mirror: Mirror) -> None:
    """The run that died left the folder, an empty Delta table, and an incomplete copy of a file."""
    target, expected = _target(mirror), rows(mirror)
    target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    there = mirror.mirrors.open(NEW).path
    (path_of(there) / "_delta_log" / f"{1:020d}.json").unlink()
    (file,) = live_files(mirror.path)
    (path_of(there) / file.path).unlink()
    (path_of(there) / file.path).write_bytes(b"PAR1")
    target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    assert rows(mirror.mirrors.open(NEW)) == expected


def test_an_older_mirror_at_the_new_place_is_replaced(mirror: Mirror, tmp_path: Path) -> None:
    """The new name was used before by another table that was followed."""
    other = made(tmp_path / "other", T, FEW)
    storage.move_folder(other.path, mirror.mirrors.layout.mirror(NEW))
    target, expected = _target(mirror), rows(mirror)
    target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    assert rows(mirror.mirrors.open(NEW)) == expected


def test_all_files_of_a_forgotten_mirror_are_removed(mirror: Mirror) -> None:
    target = _target(mirror)
    assert target.keeps(NAME)
    freed = target.forget(NAME)
    assert freed.files >= 5
    assert freed.bytes > 0
    assert not target.keeps(NAME)
    assert not path_of(mirror.path).exists() or not any(path_of(mirror.path).rglob("*.*"))
