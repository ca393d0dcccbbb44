"""A mirror gets another structure by metadata alone: its files stay, and engines read them under other column names. A
raw text is the text of a value that does not fit the type of its column. It is kept in ``_pgcdc_raw``, under the
column's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap64
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.commit import FileChange, commit_change
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.delta.mapping import OURS, Columns, stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.mirror import STRUCTURE, Mirror
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns
from pgcdc_assets.mirror.delta.reshape import reshape_mirror
from pgcdc_assets.protocol.text.typed import typed
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.successor import successor
from tests.deltatables import commit, live_files
from tests.flow.mirrors import delta_target
from tests.mirror.pipeline import ID, INT, OWNER, PLAIN, ROWS, TEXT, A, N, T, made, relabelled, rows, table


def fields(mirror: Mirror) -> dict[str, dict[str, Any]]:
    delta = mirror.again().delta
    assert delta is not None
    return {field["name"]: field for field in stated(delta.metadata).fields}


def where(mirror: Mirror, condition: str) -> list[int]:
    """The ids that DataFusion finds. It skips files whose statistics exclude the condition."""
    query = QueryBuilder().register("t", DeltaTable(path_of(mirror.path)))
    return sorted(pa.table(query.execute(f"SELECT id FROM t WHERE {condition}").read_all())["id"].to_pylist())


def test_a_renamed_column_keeps_its_physical_name(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    relabelled(mirror, table(ID, replace(A, name="b"), N))
    assert [(row["b"], row["n"]) for row in rows(mirror)] == [("one", Decimal("1.50")), ("two", Decimal("-2.25")),
                                                             (None, None)]  # fmt: skip
    assert fields(mirror)["b"]["metadata"]["delta.columnMapping.physicalName"] == "a"
    delta = mirror.again().delta
    assert delta is not None
    assert {"columnMapping", "deletionVectors"} <= delta.features
    assert "typeWidening" not in delta.features
    assert where(mirror, "b = 'two'") == [2]


def test_columns_that_swap_names_are_found_by_their_new_names(tmp_path: Path) -> None:
    other = Column(3, "n", TEXT)
    before = table(ID, A, other)
    mirror = made(tmp_path, before, [["1", "2"], ["a", "b"], ["x", "y"]], [["3"], ["m"], ["n"]])
    relabelled(mirror, table(ID, replace(A, name="n"), replace(other, name="a")), before)
    assert [(row["a"], row["n"]) for row in rows(mirror)] == [("x", "a"), ("y", "b"), ("n", "m")]
    assert where(mirror, "a = 'y'") == [2]
    assert where(mirror, "n = 'a'") == [1]
    assert where(mirror, "a IN ('n', 'x')") == [1, 3]
    assert where(mirror, "a = 'a'") == []


def test_a_recreated_column_has_another_physical_name(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    relabelled(mirror, table(ID, N, Column(4, "a", TEXT)))
    assert [row["a"] for row in rows(mirror)] == [None] * 3
    assert where(mirror, "a IS NULL") == [1, 2, 3]
    assert where(mirror, "a = 'one'") == []
    assert fields(mirror)["a"]["metadata"]["delta.columnMapping.physicalName"].startswith("col-")


def test_no_column_id_of_column_mapping_is_used_twice(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    first = relabelled(mirror, table(ID, N, Column(4, "a", TEXT)))
    then = fields(mirror)["a"]["metadata"]["delta.columnMapping.id"]
    second = relabelled(mirror, table(ID, N), first)
    relabelled(mirror, table(ID, N, Column(5, "a", TEXT), Column(6, "c", INT)), second)
    found = [field["metadata"]["delta.columnMapping.id"] for field in fields(mirror).values()]
    assert len(set(found)) == len(found)
    assert min(fields(mirror)[name]["metadata"]["delta.columnMapping.id"] for name in ("a", "c")) > then
    delta = mirror.again().delta
    assert delta is not None
    assert int(delta.configuration["delta.columnMapping.maxColumnId"]) == max(found)


def test_a_dropped_column_is_removed(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    relabelled(mirror, table(ID, A))
    assert rows(mirror)[1] == {"id": 2, "a": "two", "_pgcdc_raw": {}}


def test_a_mirror_with_raw_texts_of_a_renamed_or_dropped_column_is_rewritten(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A change of metadata can neither rename nor remove the keys in ``_pgcdc_raw``, so the mirror's files are
    rewritten."""
    for number, after in enumerate((table(ID, A, replace(N, name="m")), table(ID, A))):
        mirror = made(tmp_path / str(number), T, ROWS)
        follows = successor(T, after, Lsn(50))
        assert isinstance(follows, Table)
        before = live_files(mirror.path)
        reshape_mirror(SparkOnDemand(lambda: spark), mirror.mirrors, T, follows, by_metadata=True)
        assert live_files(mirror.path) != before
        assert rows(mirror)[1]["_pgcdc_raw"] == ({} if number else {"m": "NaN"})


def test_a_rename_rewrites_no_file_if_only_other_columns_or_deleted_rows_have_raw_texts(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, ROWS)
    after = relabelled(mirror, table(ID, replace(A, name="b"), N))
    assert rows(mirror)[1]["_pgcdc_raw"] == {"n": "NaN"}
    delta = mirror.again().delta
    assert delta is not None
    commit_change(delta, FileChange([], {delta.files[0].path: BitMap64([1])}), {}, {})
    relabelled(mirror, table(ID, replace(A, name="b"), replace(N, name="m")), after)
    assert [row["m"] for row in rows(mirror)] == [Decimal("1.50"), None, Decimal("4.00")]


def test_a_new_column_with_a_default_for_older_rows_rewrites_the_files(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    follows = successor(T, table(ID, A, N, Column(4, "c", INT, missing="7")), Lsn(50))
    assert isinstance(follows, Table)
    reshape_mirror(SparkOnDemand(lambda: spark), mirror.mirrors, T, follows, by_metadata=True)
    assert [row["c"] for row in rows(mirror)] == [7] * 3
    assert not mirror.again().mapped


def test_a_new_column_whose_name_delta_refuses_causes_no_rewrite(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    relabelled(mirror, table(ID, A, N, Column(4, "a (b), c", INT)))
    assert [row["a (b), c"] for row in rows(mirror)] == [None] * 3
    assert mirror.again().mapped


def test_columns_of_other_writers_are_kept(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    assert mirror.delta is not None
    inner = pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.list_(pa.struct([pa.field("z", pa.string())])))])
    commit_columns(mirror.delta, stated(mirror.delta.metadata).with_more(pa.schema([("theirs", inner)])))
    relabelled(mirror.again(), table(ID, replace(A, name="b"), N))
    assert set(rows(mirror)[0]) == {"id", "b", "n", "theirs", "_pgcdc_raw"}
    theirs = fields(mirror)["theirs"]["type"]["fields"]
    assert [field["metadata"]["delta.columnMapping.physicalName"] for field in theirs] == ["x", "y"]
    assert theirs[1]["type"]["elementType"]["fields"][0]["metadata"]["delta.columnMapping.physicalName"] == "z"


def test_a_column_that_a_run_added_before_it_died_keeps_its_values(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    first = relabelled(mirror, table(ID, replace(A, name="b"), N))
    noted = relabelled(mirror, table(ID, replace(A, name="b")), first)
    came = replace(noted, columns=(*noted.columns, replace(N, attnum=4)))
    delta = mirror.again().delta
    assert delta is not None
    commit_columns(delta, stated(delta.metadata).with_more(pa.schema([("n", pa.decimal128(10, 2))])))
    assert [row["n"] for row in rows(mirror)] == [None] * 3
    _append(mirror.again(), came, [["9"], ["nine"], ["9.00"]])
    relabelled(mirror, table(ID, replace(A, name="c"), replace(N, attnum=4)), noted)
    assert [(row["c"], row["n"]) for row in rows(mirror)][-1] == ("nine", Decimal("9.00"))


@pytest.mark.long
@pytest.mark.parametrize("name", ['a.b`c"d', "ä/%😀"])
def test_engines_find_rows_by_a_renamed_column_although_statistics_have_its_old_name(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    before = table(ID, replace(A, name=name), N)
    groups: Sequence[list[list[str | None]]] = [[[str(n)], [f"v{n}"], ["1"]] for n in range(4)]
    mirror = made(tmp_path, before, *groups)
    relabelled(mirror, table(ID, replace(A, name="now"), N), before)
    by_spark = spark.read.format("delta").load(path_of(mirror.path).as_posix())
    assert [row["id"] for row in by_spark.where("now = 'v2'").collect()] == [2]
    assert where(mirror, "now = 'v2'") == [2]
    relabelled(mirror, table(ID, replace(A, name=name), N), successor_of(before, "now"))
    assert [row[name] for row in rows(mirror)] == ["v0", "v1", "v2", "v3"]


def successor_of(before: Table, name: str) -> Table:
    follows = successor(before, table(ID, replace(A, name=name), N), Lsn(50))
    assert isinstance(follows, Table)
    return follows


def _append(mirror: Mirror, of: Table, texts: Sequence[Sequence[str | None]]) -> None:
    count = len(texts[0])
    done = typed([pa.array(text, pa.string()) for text in texts], of.columns, count)
    own = [pa.array([20] * count, pa.int64()), pa.nulls(count, pa.timestamp("us", "UTC")), done.raw]
    schema = mirror_columns(of)
    with DataFile(mirror.path, mirror.physical(schema)) as file:
        file.write([*done.values, *own])
        report = file.finish()
    assert report is not None
    commit(mirror.path, [report], "append", {mirror.identity.app_id("A"): 20})


# Comments in a mirror's metadata --------------------------------------------------------------------

SAID: tuple[tuple[int, str], ...] = ((0, "all"), (2, "said"))


def commented(mirror: Mirror, table: Table) -> int:
    """Writes the comments of the table to its mirror. Returns the new version."""
    return delta_target(mirror.mirrors.layout, OWNER).comment(table)


def _now(mirror: Mirror) -> DeltaVersion:
    delta = mirror.again().delta
    assert delta is not None
    return delta


def _comments(mirror: Mirror) -> dict[str, str]:
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
    assert _comments(mirror) == {"": "all", "a": "said"}
    now = _now(mirror)
    assert (now.positions, now.files, now.protocol) == (before.positions, before.files, before.protocol)
    assert commented(mirror, replace(T, comments=SAID)) == version, "the same comments cause no commit"
    commented(mirror, T)
    assert _comments(mirror) == {}
    assert stated(_now(mirror).metadata).fields == stated(before.metadata).fields, (
        "the metadata is as it was before the comments"
    )
    assert commented(mirror, T) == version + 1


def test_comments_of_another_writer_stay_where_the_source_has_none(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    theirs = [{**field, "metadata": {"comment": "theirs"}} for field in stated(_now(mirror).metadata).fields]
    version = commit_columns(_now(mirror), Columns(theirs, {}), description="theirs")
    assert commented(mirror, T) == version
    commented(mirror, replace(T, comments=((2, "said"),)))
    assert _comments(mirror) == {**dict.fromkeys(_comments(mirror), "theirs"), "a": "said"}
    commented(mirror, T)
    assert "a" not in _comments(mirror)
    assert set(_comments(mirror).values()) == {"theirs"}


def test_comments_of_columns_that_the_mirror_lacks_are_not_written(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    more = table(ID, A, N, Column(4, "later", TEXT))
    commented(mirror, replace(more, comments=((2, "said"), (4, "of what comes"))))
    assert _comments(mirror) == {"a": "said"}


def test_a_renamed_column_keeps_its_comment(tmp_path: Path) -> None:
    """Columns that exchange names keep their own comments. The structure that is stored in the mirror's properties has
    no comments."""
    other = Column(3, "n", TEXT)
    before = replace(table(ID, A, other), comments=((2, "of a"), (3, "of n")))
    mirror = made(tmp_path, before, [["1"], ["a"], ["x"]])
    commented(mirror, before)
    after = relabelled(mirror, table(ID, replace(A, name="n"), replace(other, name="a")), before)
    assert _comments(mirror) == {"a": "of n", "n": "of a"}
    assert after.comments == before.comments, "the table lists its comments by attnum"
    assert commented(mirror, after) == _now(mirror).number
    assert json.loads(_now(mirror).configuration[STRUCTURE])["table"]["comments"] == []
    commented(mirror, replace(after, comments=((3, "of n"),)))
    assert _comments(mirror) == {"a": "of n"}


def test_writing_comments_keeps_column_ids_and_physical_names(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    after = relabelled(mirror, table(ID, replace(A, name="b"), N))
    before = {field["name"]: field["metadata"] for field in stated(_now(mirror).metadata).fields}
    commented(mirror, replace(after, comments=SAID))
    metadata = {field["name"]: field["metadata"] for field in stated(_now(mirror).metadata).fields}
    assert metadata["b"] == {**before["b"], "comment": "said", OURS: "true"}
    assert {name: metadata[name] for name in ("id", "n")} == {name: before[name] for name in ("id", "n")}


def test_comments_cannot_be_written_to_a_mirror_whose_table_was_never_copied(tmp_path: Path) -> None:
    mirror = made(tmp_path, T, PLAIN)
    with pytest.raises(LakeError, match="contains no copy"):
        commented(mirror, replace(T, name=replace(T.name, name="other")))


def test_comments_are_kept_when_a_table_is_saved_as_json_and_read_again() -> None:
    saved = replace(T, comments=SAID)
    assert Table.from_json(json.loads(json.dumps(saved.to_json()))) == saved
