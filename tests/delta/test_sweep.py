"""The files that wanted versions need, compared with a model of each version. Also: when OPTIMIZE is worthwhile."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.log import Added
from pgcdc_assets.delta.sweep import LogListing, needed_files
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta import compaction

VECTORS = {
    # The example in Delta's protocol, and a vector file without a folder.
    "ab^-aqEH.-t@S}K{vb[*k^": "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",
    "^-aqEH.-t@S}K{vb[*k^": "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",
}
_VECTOR = pa.struct([("storageType", pa.string()), ("pathOrInlineDv", pa.string()), ("offset", pa.int32()),
                     ("cardinality", pa.int64())])  # fmt: skip
_ADD = pa.struct([("path", pa.string()), ("size", pa.int64()), ("stats", pa.string()), ("deletionVector", _VECTOR)])

File = tuple[str, str | None]
files = st.tuples(st.sampled_from(["a.parquet", "b%20c.parquet", "x/d.parquet"]), st.sampled_from([None, *VECTORS]))
# A commit adds each path at most once, because the protocol forbids more.
commits = st.lists(st.lists(files, max_size=3, unique_by=lambda file: file[0]), min_size=1, max_size=8)


def _action(file: File) -> dict[str, Any]:
    vector = None if file[1] is None else {"storageType": "u", "pathOrInlineDv": file[1], "offset": 1, "cardinality": 2}
    return {"path": file[0], "size": 9, "stats": '{"numRecords": 5}', "deletionVector": vector}


def _names(held: set[File]) -> set[str]:
    names = {path.replace("%20", " ") for path, _ in held}
    return names | {VECTORS[vector] for _, vector in held if vector is not None}


def _write(log: Path, versions: list[list[File]], checkpoints: set[int]) -> list[set[File]]:
    """Writes the commits. A commit's file replaces a file of the same path. Returns the files after each commit."""
    held: set[File] = set()
    states = []
    for number, added in enumerate(versions):
        lines = ['{"commitInfo":{}}']
        for file in added:
            lines += [json.dumps({"remove": _action(old)}, separators=(",", ":")) for old in held if old[0] == file[0]]
            lines.append(json.dumps({"add": _action(file)}, separators=(",", ":")))
            held = {old for old in held if old[0] != file[0]} | {file}
        (log / f"{number:020}.json").write_text("\n".join(lines))
        states.append(set(held))
        if number in checkpoints:
            column = pa.array([None, *(_action(file) for file in held)], _ADD)
            pq.write_table(pa.table({"add": column}), log / f"{number:020}.checkpoint.parquet")
    return states


@given(commits, st.sets(st.integers(0, 7)), st.data())
@settings(max_examples=60, deadline=None)
def test_exactly_the_files_of_the_wanted_versions_are_needed(
    versions: list[list[File]], checkpoints: set[int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "_delta_log").mkdir()
        states = _write(folder / "_delta_log", versions, checkpoints)
        newest = len(states) - 1
        wanted = data.draw(st.sets(st.integers(0, newest))) | {newest}
        # The commits between two wanted versions may be missing if the second version has a checkpoint.
        for version in sorted(checkpoints & wanted):
            for gone in range(max({-1, *(one for one in wanted if one < version)}) + 1, version):
                if not data.draw(st.booleans()):
                    continue
                (folder / "_delta_log" / f"{gone:020}.json").unlink()
        found = needed_files(LogListing.of(Location.of(folder)), wanted, newest)
        assert found == set().union(*(_names(states[version]) for version in wanted))


def test_a_log_with_a_hole_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    _write(tmp_path / "_delta_log", [[("a.parquet", None)], [], []], set())
    (tmp_path / "_delta_log" / f"{1:020}.json").unlink()
    with pytest.raises(LakeError, match="lacks a commit"):
        needed_files(LogListing.of(Location.of(tmp_path)), {0}, 2)


@pytest.mark.parametrize("odd", [
    {"path": "file:///elsewhere/a.parquet"},
    {"path": "a.parquet", "deletionVector": {"storageType": "p", "pathOrInlineDv": "s3://b/x.bin", "cardinality": 1}},
])  # fmt: skip
def test_files_outside_the_folder_are_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "_delta_log").mkdir()
    line = json.dumps({"add": {"size": 1, **odd}}, separators=(",", ":"))
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text(line)
    with pytest.raises(LakeError):
        needed_files(LogListing.of(Location.of(tmp_path)), {0}, 0)


def test_optimize_is_worthwhile_for_many_small_or_emptied_files() -> None:
    small, large = Added("a", 1000, 10, None, 0), Added("b", compaction.FILE_BYTES, 1_000_000, None, 0)
    emptied = Added("c", compaction.FILE_BYTES, 1_000_000, "v", 500_000)
    assert not compaction.worth_optimizing([])
    assert not compaction.worth_optimizing([small] * compaction.MOST_SMALL + [large] * 100)
    assert compaction.worth_optimizing([small] * (compaction.MOST_SMALL + 1))
    assert compaction.worth_optimizing([emptied, large])
    assert not compaction.worth_optimizing([emptied, large, large])
    assert not compaction.worth_optimizing([Added("d", 1000, 10, "v", 9)])
