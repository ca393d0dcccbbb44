"""A lake is removed from its folder, and files of other owners in the folder are kept."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import Schema

from pgcdc_assets.core.catalog import Column
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.states import TableState
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.errors import MachineError
from pgcdc_assets.mirror.delta.lakeremoval import remove_lake
from pgcdc_assets.mirror.delta.mirror import IDENTITY
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import LocalStore
from tests.memorystore import lake_in_memory
from tests.mirror.structures import INT, table

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


def test_all_our_files_are_removed_with_the_folder(layout: Layout) -> None:
    _table(layout.root / "public/a")
    _table(layout.root / "hr/b")
    storage.create(layout.change_log / "x", b"")
    assert remove_lake(layout) == []
    assert _files(layout) == []
    if layout.root.scheme == "":
        assert not Path(layout.root.text).exists()


def test_files_of_other_owners_are_kept_and_named(layout: Layout) -> None:
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


def test_an_unfinished_copy_is_removed_and_files_of_other_owners_are_kept(layout: Layout) -> None:
    TableStates(layout).set(TABLE, TableState.WAITING, Lsn(1))
    folder = layout.mirror(TABLE.name)
    storage.create(folder / BEGUN, b"rows")
    storage.create(folder / "mine.csv", b"mine")
    other = layout.root / "public/unknown"
    storage.create(other / BEGUN, b"rows")
    names = [f"{TABLE.name.folder}/mine.csv", f"public/unknown/{BEGUN}"]
    assert remove_lake(layout) == sorted(names) == _files(layout)


def test_a_damaged_mirror_is_removed(layout: Layout) -> None:
    TableStates(layout).set(TABLE, TableState.WAITING, Lsn(1))
    _table(layout.mirror(TABLE.name))
    storage.replace(layout.mirror(TABLE.name) / "_delta_log/00000000000000000000.json", b"{torn")
    assert remove_lake(layout) == []


def test_a_file_of_ours_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(tmp_path / "lake")
    _table(layout.root / "public/a")

    def refuses(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(LocalStore, "delete", refuses)
    with pytest.raises(MachineError, match="could not be removed completely"):
        remove_lake(layout)


def test_a_lake_behind_a_link_is_removed_with_the_link(tmp_path: Path) -> None:
    (tmp_path / "lake").symlink_to("there")
    (tmp_path / "there").mkdir()
    layout = Layout.of(tmp_path / "lake")
    _table(layout.root / "public/a")
    assert remove_lake(layout) == []
    assert list(tmp_path.iterdir()) == []
