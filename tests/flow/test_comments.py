"""Comments of tables and columns are copied to their mirrors. A changed comment causes no new copy, and points
still list the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.project import load_catalog
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig, T, U, following
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

LONG = "x" * 100_000
ODD = 'it\'s "so" `ü` \\ \n\n two\tlines %s {} ;\u2028 🐘'


@pytest.fixture
def rig(rig: Rig) -> Rig:
    rig.settings = rig.settings.model_copy(update={"batch_seconds": 0.1, "range_seconds": 1})
    rig.setup()
    return rig


def _comment(rig: Rig, on: str, comment: str | None) -> None:
    text = "NULL" if comment is None else rig.conn.execute("SELECT quote_literal(%s)", [comment]).fetchall()[0][0]
    rig.conn.execute(f"COMMENT ON {on} IS {text}".encode())


def _mirror(rig: Rig, name: TableName = T) -> DeltaTable:
    return DeltaTable(path_of(rig.settings.layout.mirror(name)))


def _comments(rig: Rig, name: TableName = T) -> dict[str, str]:
    """The comments in the mirror's Delta metadata, by column name. The comment of the table has the key ``""``."""
    table = _mirror(rig, name)
    columns = {
        field.name: str(field.metadata["comment"]) for field in table.schema().fields if field.metadata.get("comment")
    }
    description = table.metadata().description
    return columns | ({"": description} if description else {})


def _by_spark(rig: Rig, name: TableName = T) -> dict[str, str]:
    path = path_of(rig.settings.layout.mirror(name))
    rows = rig.session().sql(f"DESCRIBE TABLE EXTENDED delta.`{path}`").collect()
    found = {row["col_name"]: row["comment"] for row in rows if row["comment"]}
    about = next((row["data_type"] for row in rows if row["col_name"] == "Comment"), None)
    columns = {field.name for field in _mirror(rig, name).schema().fields}
    return {key: value for key, value in found.items() if key in columns} | ({"": about} if about else {})


def _version(rig: Rig, name: TableName = T) -> int:
    return _mirror(rig, name).version()


def _no_gap(rig: Rig) -> None:
    """Checks that each point lists t and u, and that neither table was copied again after its first copy."""
    assert all({T, U} <= point.tables.keys() for point in ConsistentPoints(rig.settings.layout).all())
    assert len(rig.observer.copies) == 2
    assert not rig.observer.structures


@pytest.mark.long
def test_comments_are_copied_and_updated_during_a_sync_in_follow_mode(rig: Rig) -> None:
    _comment(rig, "TABLE t", ODD)
    _comment(rig, "COLUMN t.id", "the number")
    _comment(rig, "COLUMN t.big", LONG)
    rig.sync()
    first = {"": ODD, "id": "the number", "big": LONG}
    assert _comments(rig) == first
    assert _by_spark(rig) == first
    assert (_version(rig), _version(rig, U)) == (1, 1), "the commit of the copy contains the comments"
    assert _comments(rig, U) == {}
    with following(rig):
        _comment(rig, "TABLE t", None)
        _comment(rig, "COLUMN t.id", None)
        _comment(rig, "COLUMN t.v", "came")
        _comment(rig, "COLUMN t.big", "short\nnow")
        _comment(rig, "TABLE u", "the others")
        wait_for(
            lambda: _comments(rig) == {"v": "came", "big": "short\nnow"} and _comments(rig, U) == {"": "the others"}
        )
        rig.commit("UPDATE t SET v = 'x' WHERE id = 1", "INSERT INTO u VALUES (1000, 1, 1)")
        newest = ConsistentPoints(rig.settings.layout)
        wait_for(lambda: (point := newest.newest()) is not None and point.tables[T] == _version(rig) > 2)
    assert _by_spark(rig) == {"v": "came", "big": "short\nnow"}
    rig.assert_equal()
    _no_gap(rig)
    before = _version(rig)
    for _ in range(2):
        rig.sync()
    assert _version(rig) == before, "comments that the mirror has are not written again"


@pytest.mark.long
@pytest.mark.parametrize("way", ["rewrite", "metadata"])
def test_comments_survive_schema_changes(rig: Rig, way: str) -> None:
    rig = replace(rig, settings=rig.settings.model_copy(update={"schema_changes": way}))
    _comment(rig, "TABLE t", "all")
    _comment(rig, "COLUMN t.v", "said")
    _comment(rig, "COLUMN t.big", "large")
    rig.sync()
    rig.session().sql(f"ALTER TABLE delta.`{path_of(rig.settings.layout.mirror(T))}` ALTER COLUMN id COMMENT 'theirs'")
    # Because the new column has a default, pgcdc rewrites the mirror. The same Delta commit adds the column's comment.
    rig.commit("ALTER TABLE t ADD w int DEFAULT 5", "COMMENT ON COLUMN t.w IS 'new'")
    rig.sync()
    kept = {"": "all", "v": "said", "big": "large", "id": "theirs"}
    assert _comments(rig) == {**kept, "w": "new"}
    rig.commit('ALTER TABLE t RENAME v TO "Größe"', "ALTER TABLE t DROP big")
    rig.sync()
    del kept["big"]
    del kept["v"]
    assert _comments(rig) == _by_spark(rig) == {**kept, "w": "new", "Größe": "said"}
    rig.commit("ALTER TABLE t DROP w", "ALTER TABLE t ADD w text")
    rig.sync()
    assert _comments(rig) == {**kept, "Größe": "said"}
    rig.commit("ALTER TABLE t ADD n int", "COMMENT ON COLUMN t.n IS 'appears'", "UPDATE t SET n = 1 WHERE id = 1")
    rig.sync()
    assert _comments(rig) == {**kept, "Größe": "said", "n": "appears"}
    _comment(rig, 'COLUMN t."Größe"', None)
    rig.sync()
    assert _comments(rig) == {**kept, "n": "appears"}
    rig.assert_equal()
    assert len(rig.observer.copies) == 2


def _drawn(rig: Rig) -> tuple[Table, dg.AssetSpec]:
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    table = catalog.table(T)
    assert table is not None
    specs = pipeline(Replication(rig.settings), catalog).resolve_all_asset_specs()
    return table, next(spec for spec in specs if spec.key == dg.AssetKey(["pgcdc", "public", "t"]))


@pytest.mark.long
def test_changed_comments_are_written_once_to_the_mirror_and_shown_in_dagster(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that only receives writes no comments. If a sync died after it had written comments to a mirror, the next
    sync does not write the same comments again. A renamed table keeps its comments."""

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    rig.sync()
    _comment(rig, "COLUMN t.v", "first")
    rig.sync(receive_only=True)
    assert _comments(rig) == {}
    with monkeypatch.context() as broken:
        broken.setattr(TablesProgress, "commented", dies)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
    assert _comments(rig) == {"v": "first"}
    version = _version(rig)
    rig.sync()
    assert _version(rig) == version, "the next sync makes no commit"
    newest = ConsistentPoints(rig.settings.layout).newest()
    assert newest is not None
    assert newest.tables[T] == version
    state = TableStates(rig.settings.layout).all()[T].table
    assert state is not None
    assert state.comments == ((2, "first"),)
    _no_gap(rig)
    _comment(rig, "TABLE t", "all\nof it")
    _comment(rig, "COLUMN t.big", LONG)
    rig.sync()
    table, node = _drawn(rig)
    assert table.comments == ((0, "all\nof it"), (2, "first"), (3, LONG))
    assert (node.description or "").startswith("all\nof it\n\npublic.t, equal to")
    schema = node.metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchemaMetadataValue)
    told = {column.name: column.description for column in schema.schema.columns}
    assert told == {"id": None, "v": "first", "big": f"{'x' * 1000}..."}
    rig.commit("ALTER TABLE t RENAME TO t2", "COMMENT ON COLUMN t2.big IS NULL")
    rig.sync()
    other = TableName("public", "t2")
    assert _comments(rig, other) == {"": "all\nof it", "v": "first"}
    assert len(rig.observer.copies) == 2
