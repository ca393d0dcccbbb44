"""Delta commits that create a table, or change its columns and properties.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from deltalake import Schema

from pgcdc_assets.core.layout import DELTA_LOG, Location
from pgcdc_assets.delta.commit import (
    addition,
    append_commit,
    commit_info,
    now_ms,
    put_commit,
    refuse_features,
    removal,
    transactions,
)
from pgcdc_assets.delta.datafile import FileReport, check_files
from pgcdc_assets.delta.log import Added, DeltaVersion, file_key
from pgcdc_assets.delta.logfiles import Action
from pgcdc_assets.delta.mapping import WIDENING, Columns, is_mapped
from pgcdc_assets.store import storage

_PLAIN: Final[Action] = {"minReaderVersion": 1, "minWriterVersion": 2}
_NEEDS: Final[Mapping[str, Callable[[str, Mapping[str, str]], bool]]] = {
    "timestampNtz": lambda schema, _: '"timestamp_ntz"' in schema,
    "deletionVectors": lambda _, properties: properties.get("delta.enableDeletionVectors") == "true",
    "columnMapping": lambda _, properties: is_mapped(properties),
    "typeWidening": lambda _, properties: properties.get(WIDENING) == "true",
    "changeDataFeed": lambda _, properties: properties.get("delta.enableChangeDataFeed") == "true",
}
"""For each table feature, a function of a table's schema (JSON) and properties that returns whether the table needs the
feature. Only needed features are enabled, because each feature excludes some readers."""
_OF_WRITERS: Final = frozenset({"changeDataFeed"})
"""Those of the features in ``_NEEDS`` that only writers must support."""
_LEGACY: Final = ("appendOnly", "invariants")
"""The features that writer version 2 includes without naming them. When a table changes to a protocol that names its
features, it must name these too."""


def create_table(
    folder: Location, schema: Schema | Columns, properties: Mapping[str, str], positions: Mapping[str, int],
    root: Location,
) -> None:  # fmt: skip
    """Create a table without rows, by commit 0. It is durable when this returns, with its folders up to ``root``.
    Raises CommitLost if the table already exists."""
    if isinstance(schema, Columns):
        properties = {**properties, **schema.properties}
    now = now_ms()
    log = folder / DELTA_LOG
    metadata = {
        "id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "schemaString": schema.to_json(),
        "partitionColumns": [], "createdTime": now, "configuration": dict(properties),
    }  # fmt: skip
    put_commit(log, 0, [
        {"commitInfo": commit_info(now, "CREATE TABLE", {})},
        {"protocol": _protocol(schema.to_json(), properties, _PLAIN)},
        {"metaData": metadata},
        *transactions(positions, now),
    ])  # fmt: skip
    storage.settle([log, *folder.up_to(root)])


def commit_properties(table: DeltaVersion, properties: Mapping[str, str]) -> int:
    """Set table properties by a commit directly after version ``table``. Returns the new version."""
    refuse_features(table)
    configuration = {**table.configuration, **properties}
    return append_commit(table, [
        {"commitInfo": commit_info(now_ms(), "SET TBLPROPERTIES", {})},
        {"metaData": {**table.metadata, "configuration": configuration}},
    ])  # fmt: skip


def commit_columns(
    table: DeltaVersion, schema: Schema | Columns, properties: Mapping[str, str] | None = None, *,
    gone: Sequence[Added] = (), positions: Mapping[str, int] | None = None, description: str | None = None,
) -> int:  # fmt: skip
    """Change the table's columns by a commit directly after version ``table``, which also removes the files ``gone``.
    Returns the new version. A new column is NULL in the files that stay. ``description``: the table's new description;
    None keeps the present description, an empty text removes it."""
    refuse_features(table)
    now = now_ms()
    more = schema.properties if isinstance(schema, Columns) else {}
    configuration = {**table.configuration, **(properties or {}), **more}
    protocol = _protocol(schema.to_json(), configuration, table.protocol)
    return append_commit(table, [
        {"commitInfo": commit_info(now, "CHANGE COLUMNS", {"numRemovedFiles": len(gone)} if gone else {})},
        *([] if protocol == table.protocol else [{"protocol": protocol}]),
        {"metaData": _metadata(table, schema.to_json(), configuration, description)},
        *transactions(positions or {}, now),
        *({"remove": removal(file, now)} for file in gone),
    ])  # fmt: skip


def replace_table(
    table: DeltaVersion, columns: Columns, files: Sequence[FileReport], positions: Mapping[str, int],
    properties: Mapping[str, str] | None = None, *, description: str | None = None,
) -> int:  # fmt: skip
    """Replace all columns and rows of the table with ``columns`` and the rows of ``files``, by a commit directly after
    version ``table``. Returns the new version. ``description``: see :func:`commit_columns`."""
    refuse_features(table, vectors=True)
    check_files(table.folder, files, columns.schema)
    now = now_ms()
    configuration = {**table.configuration, **(properties or {}), **columns.properties}
    protocol = _protocol(columns.to_json(), configuration, table.protocol)
    metrics = {"numRemovedFiles": len(table.files), "numAddedFiles": len(files)}
    return append_commit(table, [
        {"commitInfo": commit_info(now, "WRITE", metrics)},
        *([] if protocol == table.protocol else [{"protocol": protocol}]),
        {"metaData": _metadata(table, columns.to_json(), configuration, description)},
        *transactions(positions, now),
        *({"remove": removal(file, now)} for file in table.files),
        *({"add": addition(report, now)} for report in files),
    ])  # fmt: skip


def continue_table(
    table: DeltaVersion, held: DeltaVersion, positions: Mapping[str, int], configuration: Mapping[str, str]
) -> int:  # fmt: skip
    """Replace the columns, rows and description of ``table`` with those of a different table, ``held``, by a commit
    directly after version ``table``. Returns the new version. The files of ``held`` must already be in this table's
    folder, under the same names."""
    for version in (table, held):
        refuse_features(version, vectors=True)
    now = now_ms()
    before, after = ({file_key(file.action): file for file in version.files} for version in (table, held))
    gone = [before[key] for key in before.keys() - after.keys()]
    come = [after[key] for key in after.keys() - before.keys()]
    metrics = {"numRemovedFiles": len(gone), "numAddedFiles": len(come)}
    description = held.metadata.get("description") or ""
    metadata = _metadata(table, held.metadata["schemaString"], dict(configuration), description)
    return append_commit(table, [
        {"commitInfo": commit_info(now, "CLONE", metrics)},
        {"protocol": _joined(table.protocol, held.protocol)},
        {"metaData": metadata},
        *transactions(positions, now),
        *({"remove": removal(file, now)} for file in gone),
        *({"add": {**file.action, "dataChange": True}} for file in come),
    ])  # fmt: skip


def _metadata(table: DeltaVersion, schema: str, configuration: Mapping[str, str], description: str | None) -> Action:
    changed: Action = {**table.metadata, "schemaString": schema, "configuration": configuration}
    if description is not None:
        changed["description"] = description
    return {name: value for name, value in changed.items() if name != "description" or value}


def _joined(one: Action, other: Action) -> Action:
    """Make a protocol action with the features of two protocols. Both must name their features."""
    features = ("readerFeatures", "writerFeatures")
    versions = {name: max(one[name], other[name]) for name in ("minReaderVersion", "minWriterVersion")}
    return {**versions, **{name: sorted({*one.get(name, ()), *other.get(name, ())}) for name in features}}


def _protocol(schema: str, properties: Mapping[str, str], has: Action) -> Action:
    needed = {feature for feature, needs in _NEEDS.items() if needs(schema, properties)}
    reading, writing = set(has.get("readerFeatures") or ()), set(has.get("writerFeatures") or ())
    if needed <= writing:
        return has
    legacy = () if has.get("writerFeatures") else _LEGACY
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(reading | (needed - _OF_WRITERS)),
        "writerFeatures": sorted(writing | needed | {*legacy}),
    }
