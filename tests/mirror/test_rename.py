"""After a table was renamed, its mirror continues under the new name, with its rows, deletions and position. A second
part of this file tests how a whole lake is removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import Schema
from pyroaring import BitMap64

from pgcdc_assets.core.catalog import Column
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, commit_change
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.errors import LakeError, MachineError
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror
from pgcdc_assets.mirror.delta.removal import remove_lake
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import LocalStore, path_of
from pgcdc_assets.structure.record import TableState
from tests.deltatables import commit, live_files, opened
from tests.flow.mirrors import delta_target
from tests.memorystore import lake_in_memory
from tests.mirror.pipeline import INT, NAME, OWNER, ROWS, T, made, rows, table

NEW = TableName("else", "new")
AS_NEW = replace(T, name=NEW)
FEW: list[list[str | None]] = [["9"], ["nine"], ["9.00"]]


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    """A mirror at LSN 20 with one deleted row."""
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
    assert len(rows(there)) == len(ROWS[0]) - 1, "the mirror under the new name has its own files"


def test_a_rename_copies_the_requested_version_of_the_mirror(mirror: Mirror) -> None:
    """Later versions under the old name may have the rows of another table."""
    seen, expected = mirror.version, rows(mirror)
    commit(mirror.path, [], "overwrite", {mirror.snapshot_app_id: 40})
    _target(mirror).rename(NAME, AS_NEW, seen, Lsn(30))
    assert rows(mirror.mirrors.open(NEW)) == expected


def test_a_rename_replaces_an_unchanged_mirror_of_another_table_at_the_same_lsn(mirror: Mirror) -> None:
    """The new name has a mirror of another table, with a copy at the LSN of the rename. If changes were already applied
    to that mirror, the rename is refused."""
    target = _target(mirror)
    target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    other = replace(AS_NEW, oid=T.oid + 1)
    version = target.rename(NAME, other, mirror.version, Lsn(30))
    held = target.standing(NEW)
    assert held is not None, "the mirror under the new name exists"
    assert (held.snapshot_lsn, held.replay_lsn, held.version, held.followed) == (Lsn(30), Lsn(30), version, other)
    there = mirror.mirrors.open(NEW)
    commit(there.path, [], "append", {str(there.generation_app_id): 35})
    with pytest.raises(LakeError, match="contains another table, copied at 0/1E and changed since"):
        target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    target.rename(NAME, other, mirror.version, Lsn(30))
    target.rename(NAME, AS_NEW, mirror.version, Lsn(31))


def test_a_rename_is_completed_by_the_next_run_if_a_run_died_before_the_commit(mirror: Mirror) -> None:
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


def test_a_rename_replaces_an_older_mirror_under_the_new_name(mirror: Mirror, tmp_path: Path) -> None:
    """The older mirror is of another followed table, which had the new name before."""
    other = made(tmp_path / "other", T, FEW)
    storage.move_folder(other.path, mirror.mirrors.layout.mirror(NEW))
    target, expected = _target(mirror), rows(mirror)
    target.rename(NAME, AS_NEW, mirror.version, Lsn(30))
    assert rows(mirror.mirrors.open(NEW)) == expected


def test_forget_removes_all_files_of_a_mirror(mirror: Mirror) -> None:
    target = _target(mirror)
    assert target.keeps(NAME)
    freed = target.forget(NAME)
    assert freed.files >= 5
    assert freed.bytes > 0
    assert not target.keeps(NAME)
    assert not path_of(mirror.path).exists() or not any(path_of(mirror.path).rglob("*.*"))


# A lake is removed from its folder, and files of other owners in the folder are kept ----------------

TABLE = table(Column(1, "id", INT))
BEGUN = "part-0123456789abcdef0123456789abcdef.parquet"


@pytest.fixture(params=["local", "memory"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    return Layout.of(tmp_path / "lake" if request.param == "local" else lake_in_memory())


def _table(folder: Location, *, ours: bool = True) -> None:
    properties = {IDENTITY: "1/shop/pgcdc"} if ours else {}
    create_table(folder, Schema.from_arrow(pa.schema([("a", pa.int64())])), properties, {}, folder.parent.parent)
    storage.create(folder / "part-0.parquet", b"rows")


def _files(layout: Layout) -> list[str]:
    return sorted(entry.name for entry in storage.walk(layout.root, hidden=True))


def test_a_lake_without_files_of_other_owners_is_removed_with_its_folder(layout: Layout) -> None:
    _table(layout.root / "public/a")
    _table(layout.root / "hr/b")
    storage.create(layout.change_log / "x", b"")
    assert remove_lake(layout) == []
    assert _files(layout) == []
    if layout.root.scheme == "":
        assert not Path(layout.root.text).exists()


def test_files_of_other_owners_are_kept_and_listed_when_a_lake_is_removed(layout: Layout) -> None:
    """The other owners' files include a Delta table, and the lake of another project inside the folder."""
    _table(layout.root / "public/a")
    _table(layout.root / "public/theirs", ours=False)
    _table(layout.root / "nested/public/a")
    storage.create(layout.change_log / "x", b"")
    for name in ("mine.csv", "public/own.txt", "_pgcdc.txt"):
        storage.create(layout.root / name, b"mine")
    stays = [name for name in _files(layout) if not name.startswith(("public/a/", "_pgcdc/"))]
    assert remove_lake(layout) == stays == _files(layout)
    assert "nested/public/a/part-0.parquet" in stays


def test_an_unfinished_copy_is_removed_with_the_lake_and_files_of_other_owners_are_kept(layout: Layout) -> None:
    TableStates(layout).set(TABLE, TableState.WAITING, Lsn(1))
    folder = layout.mirror(TABLE.name)
    storage.create(folder / BEGUN, b"rows")
    storage.create(folder / "mine.csv", b"mine")
    other = layout.root / "public/unknown"
    storage.create(other / BEGUN, b"rows")
    names = [f"{TABLE.name.folder}/mine.csv", f"public/unknown/{BEGUN}"]
    assert remove_lake(layout) == sorted(names) == _files(layout)


def test_a_damaged_mirror_is_removed_with_the_lake(layout: Layout) -> None:
    TableStates(layout).set(TABLE, TableState.WAITING, Lsn(1))
    _table(layout.mirror(TABLE.name))
    storage.replace(layout.mirror(TABLE.name) / "_delta_log/00000000000000000000.json", b"{torn")
    assert remove_lake(layout) == []


def test_a_file_of_the_lake_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(tmp_path / "lake")
    _table(layout.root / "public/a")

    def refuses(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(LocalStore, "delete", refuses)
    with pytest.raises(MachineError, match="could not be removed completely"):
        remove_lake(layout)


def test_a_lake_behind_a_symbolic_link_is_removed_with_the_link(tmp_path: Path) -> None:
    (tmp_path / "lake").symlink_to("there")
    (tmp_path / "there").mkdir()
    layout = Layout.of(tmp_path / "lake")
    _table(layout.root / "public/a")
    assert remove_lake(layout) == []
    assert list(tmp_path.iterdir()) == []
