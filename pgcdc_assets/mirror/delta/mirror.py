"""Mirrors: how they are created, and how their positions are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import pyarrow as pa
from deltalake import Schema as DeltaSchema

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.formats import reading
from pgcdc_assets.core.layout import DELTA_LOG, Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import retention_properties
from pgcdc_assets.delta.datafile import OWN_NAME
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion, OpenLogs, open_delta
from pgcdc_assets.delta.mapping import is_mapped, physical
from pgcdc_assets.errors import IdentityMismatch, LakeError
from pgcdc_assets.feed.schema import feed_name
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns, new_columns
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store import storage

IDENTITY: Final = "pgcdc.identity"
"""Table property: the source and slot (:meth:`Identity.app_id`) whose changes are applied to the mirror."""
SOURCE_TABLE: Final = "pgcdc.table"
SOURCE_OID: Final = "pgcdc.oid"
"""Table property: the OID of the source table whose rows the mirror has. The source table may have another name now."""
STRUCTURE: Final = "pgcdc.structure"
"""Table property: name and structure of the source table after the mirror's last change of structure or name, and the
LSN of the copy that was changed. If a turn added columns, also the position at which the mirror has applied the turn's
rows. A mirror whose structure and name have not changed since its copy lacks this property, or has one with the LSN of
an earlier copy."""

PROPERTIES: Final = {
    "delta.enableDeletionVectors": "true",
    # pgcdc itself keeps the versions that consistent points name, however old they are. These properties protect their
    # files from a VACUUM by another writer.
    **retention_properties(timedelta(days=7)),
    "delta.checkpointInterval": "50",
    "delta.autoOptimize.autoCompact": "false",
    "delta.autoOptimize.optimizeWrite": "false",
}


def structured(table: Table, copy: Lsn | None, rows_at: Lsn = ZERO) -> dict[str, str]:
    """The properties :data:`SOURCE_OID` and :data:`STRUCTURE` for a mirror of this table. ``rows_at``: see
    :attr:`Mirror.rows_at`. Comments are left out, because the Delta metadata has them."""
    told = {"copy": copy, "rows_at": rows_at, "table": replace(table, comments=()).to_json()}
    return {SOURCE_OID: str(table.oid), STRUCTURE: json.dumps(told)}


def recorded(version: DeltaVersion, copy: int | None) -> Table | None:
    """The source table with the name and structure that this version of a mirror has; None if neither has changed since
    the copy. ``copy``: the LSN of the copy that the version holds."""
    with _told(version) as found:
        return Table.from_json(found["table"]) if found is not None and found["copy"] == copy else None


@contextmanager
def _told(version: DeltaVersion) -> Iterator[dict[str, Any] | None]:
    """The property :data:`STRUCTURE` of this version; None if it lacks the property. LakeError if the property cannot
    be read."""
    told = version.configuration.get(STRUCTURE)
    with reading(f"property {STRUCTURE} of mirror {version.folder}"):
        yield None if told is None else json.loads(told)


def create_mirror(path: Location, schema: pa.Schema, properties: Mapping[str, str], root: Location) -> None:
    """Create a mirror without rows. It is durable when this returns, with its folders up to the lake's ``root``."""
    if open_delta(path) is None:
        clear_unfinished(path)
    create_table(path, new_columns(schema), {**PROPERTIES, **properties}, {}, root)


def clear_unfinished(path: Location) -> None:
    """Prepare a folder for a new mirror: delete a Delta log without a first commit, and data files of an unfinished or
    lost copy. LakeError if the folder has files with other names, which another program has written."""
    storage.delete_folder(path / DELTA_LOG)
    names = [entry.name for entry in storage.list_after(path)]
    storage.delete([path / name for name in names if OWN_NAME.fullmatch(name)])
    if others := [name for name in names if not OWN_NAME.fullmatch(name)]:
        raise LakeError(f"is needed for a mirror, but has a file of another program: {others[0]}",
                        thing=f"folder {path}", do="move this file away")  # fmt: skip


def own_position(positions: Mapping[str, int], owner: str, name: TableName) -> Lsn | None:
    """The position that a version of a mirror itself records; None if no copy was committed. ``positions``: the
    version's Delta app transactions, by application id. ``owner``: :meth:`Identity.app_id`. The copy's position is
    stored under one id. The position of applied changes is stored under an id that contains the copy's LSN, so that a
    new copy makes it void."""
    snapshot = positions.get(f"{owner}/snapshot/{name.folder}")
    return None if snapshot is None else Lsn(max(snapshot, positions.get(f"{owner}/{snapshot:X}", snapshot)))


@dataclass(frozen=True)
class Mirrors:
    """The mirrors of a lake, for one run of the sync or of another command. Their Delta logs are kept in memory, so
    opening a mirror again reads only new commits."""

    layout: Layout
    identity: Identity
    _logs: OpenLogs = field(default_factory=OpenLogs)

    def open(self, name: TableName) -> Mirror:
        """The mirror at its newest version. IdentityMismatch if the folder has a Delta table of another source, slot or
        program, or the mirror of another table."""
        path, owner = self.layout.mirror(name), self.identity.app_id()
        table = self._logs.of(path).newest()
        if table is None:
            return Mirror(self, name, None)
        found = table.configuration.get(IDENTITY)
        if found != owner:
            raise IdentityMismatch(
                f"is not a mirror of this project: it records the owner {found or '(none)'}, not {owner}",
                thing=f"Delta table {path}",
                do="use a separate lake, or move that Delta table away",
            )
        other = table.configuration.get(SOURCE_TABLE, str(name))
        if other != str(name):
            raise IdentityMismatch(
                f"is the mirror of {other}: this file system does not distinguish the folders of {other} and {name}",
                thing=f"Delta table {path}",
                do="keep the lake on a case-sensitive file system, or exclude one table in the setting `tables`",
            )
        return Mirror(self, name, table)

    def forget(self, name: TableName) -> None:
        """Forget the Delta log of a mirror that was deleted or moved away, because a new mirror may be created in its
        folder."""
        self._logs.forget(self.layout.mirror(name))


@dataclass(frozen=True)
class Mirror:
    """One table's mirror at one version. The object does not change; :meth:`again` returns the newest version."""

    mirrors: Mirrors
    name: TableName
    delta: DeltaVersion | None
    """None if there is no mirror."""

    @property
    def path(self) -> Location:
        return self.mirrors.layout.mirror(self.name)

    @property
    def identity(self) -> Identity:
        return self.mirrors.identity

    def again(self) -> Mirror:
        """The same mirror at its newest version."""
        return self.mirrors.open(self.name)

    def at(self, version: int) -> Mirror | None:
        """The mirror at one of its versions; None if its log no longer holds that version."""
        if version == self.version:
            return self
        try:
            return replace(self, delta=DeltaLog(self.path).at(version))
        except LakeError:
            return None

    @property
    def existing(self) -> DeltaVersion:
        """The mirror's Delta table. LakeError if there is no mirror."""
        if self.delta is None:
            raise LakeError("does not exist", thing=f"mirror {self.name}")
        return self.delta

    @property
    def exists(self) -> bool:
        return self.delta is not None

    @property
    def mapped(self) -> bool:
        """Whether the data files name columns differently from the table (Delta's column mapping)."""
        return self.delta is not None and is_mapped(self.delta.configuration)

    @property
    def version(self) -> int:
        """The version of the table; -1 if there is no table."""
        return -1 if self.delta is None else self.delta.number

    @property
    def snapshot_app_id(self) -> str:
        return self.identity.app_id("snapshot", self.name.folder)

    @property
    def snapshot_lsn(self) -> Lsn | None:
        """The consistent point of the snapshot copy that the mirror holds; None if no copy was committed."""
        found = None if self.delta is None else self.delta.positions.get(self.snapshot_app_id)
        return None if found is None else Lsn(found)

    @property
    def generation_app_id(self) -> str | None:
        """The application id under which the position of applied changes is stored (see :func:`own_position`); None if
        no copy was committed."""
        return None if self.snapshot_lsn is None else self.identity.app_id(f"{self.snapshot_lsn:X}")

    @property
    def replay_lsn(self) -> Lsn | None:
        """The position that the mirror records: its copy's consistent point, or the end of changes applied since."""
        return None if self.delta is None else own_position(self.delta.positions, self.identity.app_id(), self.name)

    def effective_replay_lsn(self, points: ConsistentPoints) -> Lsn | None:
        """The position of the mirror, including LSN ranges without changes, for which the mirror gets no commits. This
        is :attr:`replay_lsn`, or the LSN of the newest point that lists this mirror if that LSN is higher.

        The point is ignored if its version of the mirror holds an earlier copy, because turns continue while tables are
        copied. It is also ignored if this version is not at the position that the point records. Then a power cut has
        destroyed the version that the point named, and another version has got its number."""
        listing = points.listing(self.name)
        if self.replay_lsn is None or listing is None or listing.replay_lsn <= self.replay_lsn:
            return self.replay_lsn
        listed = self.at(listing.version)
        if listed is None or listed.snapshot_lsn != self.snapshot_lsn:
            return self.replay_lsn
        return listing.replay_lsn if listed.replay_lsn == listing.position else self.replay_lsn

    @property
    def followed(self) -> Table | None:
        """The source table with the name and structure that the mirror has; None if neither has changed since the
        copy."""
        return None if self.delta is None else recorded(self.delta, self.snapshot_lsn)

    @property
    def rows_at(self) -> Lsn:
        """If a turn added the newest columns of :attr:`followed`, the position at which the mirror has applied the
        turn's rows. Below it, rows of the log may lack these columns, because the turn has failed, or the run has died.
        Otherwise ZERO."""
        with _told(self.existing) as found:
            return Lsn((found or {}).get("rows_at", 0))

    @property
    def oid(self) -> int | None:
        """See :attr:`Generation.oid`."""
        told = None if self.delta is None else self.delta.configuration.get(SOURCE_OID)
        return None if told is None else int(told)

    def unlisted(self, points: ConsistentPoints) -> bool:
        """See :attr:`Generation.unlisted`. A point that lists a mirror of this name means this mirror only if the LSN
        of the copy and the OID are the same. The LSN alone is not enough, because two tables may have copies at the
        same LSN."""
        if self.followed is None:
            return False
        listing = points.listing(self.name)
        listed = None if listing is None else self.at(listing.version)
        if listed is None or listed.snapshot_lsn != self.snapshot_lsn:
            return True
        return listed.followed is None or listed.oid != self.oid

    def holds(self, schema: pa.Schema) -> bool:
        """Whether the mirror has exactly these columns."""
        if self.delta is None:
            return False
        found = [(field.name, str(field.type)) for field in self.delta.schema.fields]
        return found == [(field.name, str(field.type)) for field in DeltaSchema.from_arrow(schema).fields]

    def physical(self, schema: pa.Schema) -> pa.Schema:
        """The columns of ``schema`` under the names that the mirror's data files use. These differ from the columns'
        names if the mirror uses column mapping. LakeError if the mirror lacks a column."""
        have = {field.name for field in self.existing.schema.fields}
        missing = [field.name for field in schema if field.name not in have]
        if missing:
            raise LakeError(
                f"has no column {missing[0]!r} yet", thing=f"mirror {self.name}", do="run `pgcdc sync` first"
            )
        return physical(schema, self.existing.schema)

    def target(self, table: Table, files: Sequence[Added] = ()) -> MergeTarget:
        """What an apply needs: the mirror's folder, its columns, and the ``files`` to read."""
        schema = mirror_columns(table)
        values = {column.name: feed_name(column.name) for column in table.columns}
        # The mirror may have more columns than the table here, because a turn has added columns and failed before the
        # table's new structure was stored, or because another writer has added columns. They are NULL in the new rows.
        more = [field for field in self.existing.columns if field.name not in schema.names]
        whole = pa.schema([*schema, *more])
        names = tuple(values.get(name, name) for name in whole.names)
        return MergeTarget(self.path, self.physical(whole), names, tuple(files))
