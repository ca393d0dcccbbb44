"""Columns, properties and positions of mirrors, and how mirrors are created and opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.errors import IdentityMismatch, LakeError
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns, needs_column_mapping, refusal
from tests.deltatables import commit, reads_of_commits

if TYPE_CHECKING:
    pass

IDENTITY_1 = Identity("7000000000000000001", "shop", "pgcdc")
TEXT = PgType(25, "text")


def table_of(*names: str, **kwargs: object) -> Table:
    columns = tuple(Column(at, name, TEXT) for at, name in enumerate(names, 1))
    return Table(16384, TableName("public", "t"), columns, **kwargs)  # type: ignore[arg-type]


def made(root: Path, table: Table) -> Mirror:
    layout = Layout.of(root)
    create_mirror(
        layout.mirror(table.name), mirror_columns(table), {IDENTITY: IDENTITY_1.app_id()}, layout.mirror(table.name)
    )
    return Mirrors(layout, IDENTITY_1).open(table.name)


def written(mirror: Mirror, schema: pa.Schema, columns: list[pa.Array]) -> FileReport:
    with DataFile(mirror.path, mirror.physical(schema)) as file:
        file.write(columns)
        report = file.finish()
    assert report is not None
    return report


@pytest.mark.parametrize("name", ["a b", "a,b", "a;b", "{a", "a)", "a=b", "a\tb", "a\nb"])
def test_a_column_name_that_delta_refuses_requires_column_mapping(name: str) -> None:
    assert needs_column_mapping(["id", name])


@pytest.mark.parametrize("name", ["a.b", "Select", "a`b", 'a"b', "größe", "🦆", "a/b", "a%20b", "a'b", "$"])
def test_a_column_name_that_delta_accepts_requires_no_column_mapping(name: str) -> None:
    assert not needs_column_mapping(["id", name])


def test_the_columns_that_pgcdc_adds_depend_on_the_kind_of_table() -> None:
    plain = mirror_columns(table_of("id", key=(1,))).names
    assert plain == ["id", "_pgcdc_commit_lsn", "_pgcdc_commit_ts", "_pgcdc_raw"]
    assert mirror_columns(table_of("id", key=(1,), partitioned=True)).names[-1] == "_pgcdc_leaf"
    assert mirror_columns(table_of("id", replica_identity="f")).names[-2:] == ["_pgcdc_row", "_pgcdc_hash"]


@pytest.mark.parametrize(("names", "word"), [(("Id", "id"), "case"), (("_pgcdc_raw",), "pgcdc adds")])
def test_tables_whose_column_names_a_mirror_cannot_have_are_refused(names: tuple[str, ...], word: str) -> None:
    table = table_of(*names)
    assert word in (refusal(table) or "")
    with pytest.raises(LakeError, match=word):
        mirror_columns(table)


def test_an_absent_mirror_has_no_positions(tmp_path: Path) -> None:
    mirror = Mirrors(Layout.of(tmp_path), IDENTITY_1).open(TableName("public", "t"))
    assert not mirror.exists
    assert (mirror.version, mirror.snapshot_lsn, mirror.replay_lsn, mirror.generation_app_id) == (-1, None, None, None)


def test_a_mirror_stores_the_lsns_of_its_copy_and_of_applied_changes(tmp_path: Path) -> None:
    table = table_of("id", key=(1,))
    mirror = made(tmp_path, table)
    assert mirror.delta is not None
    told = mirror.delta.configuration
    assert told["delta.enableDeletionVectors"] == "true"
    assert "delta.columnMapping.mode" not in told
    assert "typeWidening" not in mirror.delta.features
    assert mirror.exists
    assert mirror.snapshot_lsn is None
    commit(mirror.path, [], "append", {mirror.snapshot_app_id: 100})
    copied = Mirrors(Layout.of(tmp_path), IDENTITY_1).open(table.name)
    assert copied.generation_app_id == IDENTITY_1.app_id("64")
    commit(mirror.path, [], "append", {copied.generation_app_id: 150})
    applied = Mirrors(Layout.of(tmp_path), IDENTITY_1).open(table.name)
    assert (applied.snapshot_lsn, applied.replay_lsn) == (100, 150)
    # After a new copy, the LSN up to which changes were applied to the old copy is ignored.
    commit(mirror.path, [], "overwrite", {mirror.snapshot_app_id: 120})
    anew = Mirrors(Layout.of(tmp_path), IDENTITY_1).open(table.name)
    assert (anew.snapshot_lsn, anew.replay_lsn) == (120, 120)


def test_a_mirror_object_keeps_its_version_when_a_newer_version_is_committed(tmp_path: Path) -> None:
    mirror = made(tmp_path, table_of("id", key=(1,)))
    version = commit(mirror.path, [], "append", {mirror.snapshot_app_id: 100})
    assert (mirror.version, mirror.snapshot_lsn) == (0, None)
    assert (mirror.again().version, mirror.again().snapshot_lsn) == (version, 100)
    assert mirror.again().at(0) == mirror


def test_opening_a_mirror_again_reads_only_later_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn opens every mirror several times, so opening a mirror again must not read the whole Delta log."""
    mirror = made(tmp_path, table_of("id", key=(1,)))
    for at in range(1, 9):
        commit(mirror.path, [], "append", {mirror.snapshot_app_id: at})
    before = mirror.mirrors.open(mirror.name)
    commit(mirror.path, [], "append", {mirror.snapshot_app_id: 9})
    with reads_of_commits(monkeypatch) as read:
        assert mirror.mirrors.open(mirror.name).version == before.version + 1 == 9
    assert read == [9, 10]
    with reads_of_commits(monkeypatch) as read:
        Mirrors(mirror.mirrors.layout, IDENTITY_1).open(mirror.name)
    assert read[:10] == list(range(10))


def test_a_mirror_of_another_project_is_refused(tmp_path: Path) -> None:
    table = table_of("id")
    made(tmp_path, table)
    other = Identity(IDENTITY_1.system_identifier, "other", "pgcdc")
    with pytest.raises(IdentityMismatch, match="other"):
        _ = Mirrors(Layout.of(tmp_path), other).open(table.name).exists


def test_a_mirror_is_created_although_an_earlier_attempt_died_in_the_middle(tmp_path: Path) -> None:
    """The earlier attempt died while it created the Delta table. The folder of the Delta log exists, with a temporary
    file, but without the first commit."""
    log = tmp_path / "t" / "_delta_log"
    log.mkdir(parents=True)
    (log / ".00000000000000000000.json.0a1b.tmp").write_text("{}")
    create_mirror(Location.of(log.parent), mirror_columns(table_of("id", key=(1,))), {}, Location.of(log.parent))
    assert DeltaTable(log.parent).version() == 0


def test_a_mirror_is_created_again_if_a_power_cut_destroyed_its_delta_log(tmp_path: Path) -> None:
    """The data files were synced to disk before the power cut, but the name of the Delta log's folder was not."""
    left = tmp_path / "t" / f"part-{uuid4().hex}.parquet"
    left.parent.mkdir()
    pq.write_table(pa.table({"id": [1]}), left)
    create_mirror(Location.of(left.parent), mirror_columns(table_of("id", key=(1,))), {}, Location.of(left.parent))
    assert DeltaTable(left.parent).version() == 0
    assert not left.exists()
    theirs = tmp_path / "u" / "rows.parquet"
    theirs.parent.mkdir()
    pq.write_table(pa.table({"id": [1]}), theirs)
    place = Location.of(theirs.parent)
    with pytest.raises(LakeError, match=r"is needed for a mirror, but has a file of another program: rows\.parquet"):
        create_mirror(place, mirror_columns(table_of("id", key=(1,))), {}, place)
    assert theirs.exists(), "a file of another program is not deleted"
