"""Commits that define a table: they create it, and change its columns and properties.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from deltalake import Schema

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.commit import (
    append_commit,
    commit_info,
    now_ms,
    put_commit,
    refuse_features,
    removal,
    transactions,
)
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.delta.logfiles import Action
from pgcdc_assets.store import storage

_PLAIN: Final[Action] = {"minReaderVersion": 1, "minWriterVersion": 2}
_NTZ: Final = "timestampNtz"
"""The feature of timestamps without a time zone; only a table with such columns needs it."""
_LEGACY: Final = ("appendOnly", "invariants")
"""The features that writers of version 2 know; a table that lists its features lists these as well."""


def create_table(
    folder: Location, schema: Schema, properties: Mapping[str, str], positions: Mapping[str, int], root: Location
) -> None:
    """Commit version 0 of a table without rows, durable with its folders up to ``root``.

    CommitLost if there is a version 0.
    """
    now = now_ms()
    log = folder / DELTA_LOG
    metadata = {
        "id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "schemaString": schema.to_json(),
        "partitionColumns": [], "createdTime": now, "configuration": dict(properties),
    }  # fmt: skip
    put_commit(log, 0, [
        {"commitInfo": commit_info(now, "CREATE TABLE", {})},
        {"protocol": _protocol(schema, _PLAIN)},
        {"metaData": metadata},
        *transactions(positions, now),
    ])  # fmt: skip
    storage.settle([log, *folder.up_to(root)])


def commit_properties(table: DeltaVersion, properties: Mapping[str, str]) -> int:
    """Set properties of the table on top of this version; returns the new one."""
    refuse_features(table)
    configuration = {**table.configuration, **properties}
    return append_commit(table, [
        {"commitInfo": commit_info(now_ms(), "SET TBLPROPERTIES", {})},
        {"metaData": {**table.metadata, "configuration": configuration}},
    ])  # fmt: skip


def commit_columns(
    table: DeltaVersion, schema: Schema, properties: Mapping[str, str] | None = None, *, gone: Sequence[Added] = (),
    positions: Mapping[str, int] | None = None,
) -> int:  # fmt: skip
    """Give the table these columns on top of this version; returns the new one.

    The same commit removes the ``gone`` files. A file that stays is read with NULL in the columns that it lacks.
    """
    refuse_features(table)
    now = now_ms()
    protocol = _protocol(schema, table.protocol)
    configuration = {**table.configuration, **(properties or {})}
    return append_commit(table, [
        {"commitInfo": commit_info(now, "CHANGE COLUMNS", {"numRemovedFiles": len(gone)} if gone else {})},
        *([] if protocol == table.protocol else [{"protocol": protocol}]),
        {"metaData": {**table.metadata, "schemaString": schema.to_json(), "configuration": configuration}},
        *transactions(positions or {}, now),
        *({"remove": removal(file, now)} for file in gone),
    ])  # fmt: skip


def _protocol(schema: Schema, has: Action) -> Action:
    """The protocol of a table with these columns."""
    if '"timestamp_ntz"' not in schema.to_json() or _NTZ in (has.get("writerFeatures") or ()):
        return has
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted({_NTZ, *(has.get("readerFeatures") or ())}),
        "writerFeatures": sorted({_NTZ, *_LEGACY, *(has.get("writerFeatures") or ())}),
    }
