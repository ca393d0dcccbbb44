"""The contract of a store, tested with each implementation. A store keeps files in a local folder, in memory or in an
object store.

A draft is a local file that becomes a file of the store when it is *put*. A scratch folder contains the drafts for one
folder of the store.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import Schema

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.store import storage
from tests.memorystore import lake_in_memory

OWN = "PGCDC_TEST_STORE"
"""The environment variable with the URL of an additional folder, for example in a cloud. If it is set, the contract is
also tested with this folder. Credentials are read from the environment."""


@pytest.fixture(params=["local", "memory", "s3", *([OWN] if OWN in os.environ else [])])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    if request.param == OWN:
        root = Location.of(os.environ[OWN]) / uuid.uuid4().hex
    elif request.param == "s3":
        root = request.getfixturevalue("bucket")
    else:
        root = Location.of(tmp_path / "lake") if request.param == "local" else lake_in_memory()
    yield root
    storage.delete_folder(root)


def _names(folder: Location, after: str = "") -> list[str]:
    return [entry.name for entry in storage.list_after(folder, after)]


def test_a_created_file_can_be_read_and_cannot_be_created_again(folder: Location) -> None:
    place = folder / "t/_delta_log/0.json"
    storage.create(place, b"abcdef")
    with pytest.raises(FileExistsError):
        storage.create(place, b"other")
    assert storage.read(place) == b"abcdef"
    assert storage.read(place, 2, 3) == b"cde"
    assert storage.read(place, 4) == b"ef"
    assert storage.read(place, 4, 100) == b"ef"
    assert _names(place.parent) == ["0.json"]


def test_exactly_one_of_several_concurrent_creates_succeeds(folder: Location) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        try:
            storage.create(folder / "one", str(number).encode() * 1000)
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.read(folder / "one") == str(*won).encode() * 1000
    assert _names(folder) == ["one"]


def test_reading_a_missing_file_is_an_error_and_deleting_it_is_not(folder: Location) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read(folder / "none")
    with pytest.raises(FileNotFoundError):
        storage.open_file(folder / "none")
    with pytest.raises(FileNotFoundError):
        storage.copy(folder / "none", folder / "other")
    assert storage.head(folder / "none") is None
    assert not storage.exists(folder / "none")
    assert _names(folder / "none") == []
    assert list(storage.walk(folder / "none")) == []
    storage.delete([folder / "none"])
    storage.delete_folder(folder / "none")


def test_a_folder_is_not_reported_as_an_existing_file(folder: Location) -> None:
    storage.create(folder / "within/file", b"x")
    assert not storage.exists(folder / "within")
    assert _names(folder) == []


def test_path_below_a_file_does_not_exist(folder: Location) -> None:
    if folder.scheme == "s3":
        # S3 allows files below the name of a file. The S3 server of the tests reports an internal error instead,
        # because it keeps objects in a file system.
        return
    storage.create(folder / "file", b"x")
    inside = folder / "file/within"
    assert not storage.exists(inside)
    assert _names(folder / "file") == []
    assert list(storage.walk(folder / "file")) == []
    for look in (storage.read, storage.open_file):
        # The local store raises NotADirectoryError, because the parent is a file.
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            look(inside)


def test_listing_is_sorted_by_name_and_can_begin_after_a_name(folder: Location) -> None:
    for name in ("b", "a", "c", "_hidden", ".dot", "within/d", "_log/e"):
        storage.create(folder / name, name.encode())
    assert _names(folder) == [".dot", "_hidden", "a", "b", "c"]
    assert _names(folder, "a") == ["b", "c"]
    assert _names(folder, "aa") == ["b", "c"]
    assert sorted(entry.name for entry in storage.walk(folder)) == ["a", "b", "c", "within/d"]
    everything = sorted(entry.name for entry in storage.walk(folder, hidden=True))
    assert everything == [".dot", "_hidden", "_log/e", "a", "b", "c", "within/d"]
    (entry,) = storage.list_after(folder / "within")
    head = storage.head(folder / "within/d")
    assert head == entry
    assert (entry.name, entry.size) == ("d", 8)
    assert 0 < entry.written <= entry.placed


def test_a_file_is_replaced_as_a_whole(folder: Location) -> None:
    storage.replace(folder / "hint", b"a longer one")
    storage.replace(folder / "hint", b"short")
    assert storage.read(folder / "hint") == b"short"
    assert _names(folder) == ["hint"]


def test_a_local_draft_becomes_a_file_of_the_store_when_it_is_put(folder: Location) -> None:
    rows = pa.table({"a": list(range(1000))})
    made = storage.draft(folder / "t/part.parquet")
    pq.write_table(rows, made.path)
    size = made.size
    storage.put(made, folder / "t/part.parquet")
    head = storage.head(folder / "t/part.parquet")
    assert head is not None
    assert head.size == size
    with pq.ParquetFile(storage.open_file(folder / "t/part.parquet")) as file:
        assert file.read() == rows


def test_drafts_stay_in_the_scratch_folder_until_they_are_put(folder: Location) -> None:
    drafts = storage.scratch(folder / "_spill")
    for name in ("a", "b"):
        Path(drafts.draft(name).path).write_bytes(name.encode())
    storage.put(drafts.draft("a"), folder / "moved")
    assert storage.read(folder / "moved") == b"a"
    assert list(drafts.draft("b").pieces()) == [b"b"]
    storage.scratch(folder / "_spill").clear()
    assert not Path(drafts.draft("b").path).exists()
    drafts.draft("b").discard()
    assert [entry.name for entry in storage.walk(folder)] == ["moved"]


def test_files_are_copied_moved_and_deleted(folder: Location) -> None:
    storage.create(folder / "a", b"x")
    storage.copy(folder / "a", folder / "within/b")
    with pytest.raises(FileExistsError):
        storage.copy(folder / "a", folder / "within/b")
    storage.delete([folder / "a"])
    assert storage.read(folder / "within/b") == b"x"
    storage.move(folder / "within/b", folder / "c")
    assert sorted(entry.name for entry in storage.walk(folder)) == ["c"]


def test_folders_are_moved_and_deleted_with_their_hidden_files(folder: Location) -> None:
    for name in ("t/_delta_log/0.json", "t/part", "u/part"):
        storage.create(folder / name, name.encode())
    storage.move_folder(folder / "t", folder / "_own/copy/t")
    assert list(storage.walk(folder / "t", hidden=True)) == []
    assert storage.read(folder / "_own/copy/t/_delta_log/0.json") == b"t/_delta_log/0.json"
    storage.delete_folder(folder / "_own")
    assert [entry.name for entry in storage.walk(folder, hidden=True)] == ["u/part"]


def test_files_with_odd_names_keep_their_names(folder: Location) -> None:
    # The test has no name with a backslash, because Azure treats it like a slash. pgcdc encodes backslashes in names.
    names = ['a b/ü "q" %41', "plus+eq=amp&q?hash#", "~|{}[]^`", "*<>:", "'"]
    for name in names:
        storage.create(folder / name, name.encode())
        assert storage.read(folder / name) == name.encode()
    assert sorted(entry.name for entry in storage.walk(folder)) == sorted(names)
    storage.delete([folder / name for name in names])
    assert list(storage.walk(folder)) == []


def test_settle_accepts_files_and_folders(folder: Location) -> None:
    """``settle`` makes the contents of files and the names in folders durable. The test only checks that it raises no
    error."""
    storage.create(folder / "t/a", b"x")
    storage.settle([folder / "t", folder / "t/a", *(folder / "t").up_to(folder)])


def test_a_file_is_copied_from_one_store_to_another(folder: Location, tmp_path: Path) -> None:
    storage.create(folder / "a", b"x")
    storage.copy(folder / "a", Location.of(tmp_path / "elsewhere"))
    storage.fetch(folder / "a", Location.of(tmp_path / "scratch/a"))
    assert (tmp_path / "elsewhere").read_bytes() == (tmp_path / "scratch/a").read_bytes() == b"x"


def test_only_a_local_store_knows_its_free_space(tmp_path: Path) -> None:
    there = storage.free_bytes(Location.of(tmp_path / "not" / "yet"))
    here = storage.free_bytes(Location.of(tmp_path))
    assert there is not None
    assert here is not None
    assert abs(there - here) < 1 << 30, "other processes write"
    assert storage.free_bytes(lake_in_memory()) is None
    assert list(tmp_path.iterdir()) == []


def test_url_with_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="URLs that begin with odd:// are not supported"):
        storage.read(Location.of("odd://bucket/key"))


def test_scratch_files_of_a_killed_process_are_deleted(folder: Location) -> None:
    drafts = storage.scratch(folder / "_checkpoint")
    with drafts.temporary() as first:
        left = Path(first.text)
        (left / "log").mkdir()
        os.utime(left, (1, 1))
        with storage.scratch(folder / "_checkpoint").temporary() as second:
            assert not left.exists()
            assert Path(second.text).is_dir()
    assert not left.parent.exists()
    assert list(storage.walk(folder)) == []


def test_checkpoint_file_belongs_to_the_unix_group_of_the_table_folder(tmp_path: Path) -> None:
    """The group of the table's folder may read its files. A file that was created in a different folder and then moved
    would not have this group."""
    table = tmp_path / "t"
    table.mkdir()
    os.chown(table, -1, 12345)
    table.chmod(0o2750)
    place = Location.of(table)
    create_table(place, Schema.from_arrow(pa.schema([("a", pa.int64())])), {}, {}, place.parent)
    make_checkpoint(place, 0)
    groups = {path.name: path.stat().st_gid for path in (table / "_delta_log").iterdir()}
    assert set(groups.values()) == {12345}, groups
    assert len(groups) == 3
