"""A mirror that is made without Spark. The mirror is a real Delta table. The package's own code for merges and commits
changes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake import Schema as DeltaSchema
from pyroaring import BitMap64

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta import datafile
from pgcdc_assets.feed.schema import FeedPart
from pgcdc_assets.mirror.delta.applytask import PendingChanges, collapse_units
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns, needs_column_mapping
from pgcdc_assets.mirror.delta.rowlookup import Effect
from pgcdc_assets.mirror.delta.tableplan import TablePlan, merged
from pgcdc_assets.mirror.net.neteffect import MOVED
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.store.local import path_of
from tests.deltatables import commit, live_files, opened
from tests.oracle import Rows, mirror_rows

_FEATURES = ["deletionVectors", "columnMapping", "timestampNtz"]


@dataclass
class PlainMirror:
    """The mirror of one table. It is empty at ``start``. ``versions``: the mirror's Delta version at each LSN up to
    which changes were applied."""

    layout: Layout
    identity: Identity
    table: Table
    start: Lsn
    versions: dict[Lsn, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make(self.mirror, mirror_columns(self.table), {IDENTITY: self.identity.app_id()})
        self.versions[self.start] = commit(
            path_of(self.mirror.path), [], "overwrite", {self.mirror.snapshot_app_id: self.start}
        )

    @property
    def mirror(self) -> Mirror:
        return Mirrors(self.layout, self.identity).open(self.table.name)

    def rows(self, columns: list[str]) -> Rows:
        return mirror_rows(path_of(self.layout.root), f"{self.table.name.schema}/{self.table.name.name}", columns)

    def apply(self, part: FeedPart, upto: Lsn) -> Applied | None:
        """Applies the changes up to ``upto`` in one turn, planned as in a sync, but in this process."""
        work = TablePlan.of(Mirrors(self.layout, self.identity), part, upto)
        done = None
        if work is not None:
            assert work.refused is None
            done = work.link() if work.linkable else work.commit(collapse_units(work.units()), 0.0)
            assert done.set_aside is None, done.set_aside
        self.versions[upto] = self.mirror.version
        return done

    def repair(self, part: FeedPart, touched: LsnRange, at: Lsn, *, refusable: bool) -> None:
        """Repairs the range ``touched`` in the mirror, which is at LSN ``at``, with the merge that a real repair would
        use. ``refusable``: whether the log may lack large values. The repair is then refused if such a row changed its
        key."""
        mirror = self.mirror
        pending = PendingChanges.of(self.layout, part, LsnRange(touched.start, at))
        if pending is None:
            return
        units = pending.units(mirror.target(self.table, () if pending.emptied else live_files(mirror.path)))
        if not pending.emptied:
            units = [replace(unit, repair=True, touched=None if pending.leaves else touched) for unit in units]
        effects = collapse_units(units)
        refused = {effect.mismatch.what for effect in effects if effect.mismatch is not None}
        assert refused <= ({MOVED} if refusable else set())
        if refused:
            return
        if pending.emptied:
            reports = [effect.added for effect in effects if effect.added is not None]
            commit(mirror.path, reports, "overwrite", {})
        else:
            merged(opened(mirror.path), effects, {})

    def damage(self, touched: LsnRange) -> None:
        """Damages the mirror: deletes the rows whose last change is in the range ``touched``, and puts back rows that
        the mirror had before the range. A row is put back only if its key is missing both at the end of the range and
        in the mirror's newest version."""
        mirror, kept = self.mirror, self._keys(None) | self._keys(self.versions[touched.end])
        old = self._at(self.versions[touched.start])
        back = [place for place, key in enumerate(self._key_texts(old)) if key not in kept]
        target = mirror.target(self.table)
        with datafile.DataFile(mirror.path, target.schema) as file:
            columns = [old[name].to_pylist() for name in _names(self.table)]
            file.write([pa.array([values[place] for place in back], field.type)
                        for values, field in zip(columns, target.schema, strict=True)])  # fmt: skip
            added = file.finish()
        live = live_files(mirror.path)
        gone: dict[str, BitMap64] = {}
        for group in replace(target, files=live).groups():
            lsn = group.read(["_pgcdc_commit_lsn"])["_pgcdc_commit_lsn"].to_pylist()
            lost = [place for place, (at, alive) in enumerate(zip(lsn, group.alive, strict=True))
                    if alive and touched.holds_commit(at)]  # fmt: skip
            if lost:
                gone[group.path] = gone.get(group.path, BitMap64()) | BitMap64([group.start + at for at in lost])
        if added is not None or gone:
            merged(opened(mirror.path), [Effect(added, gone)], {})

    def _at(self, version: int | None) -> pa.Table:
        names = ", ".join('"' + name.replace('"', '""') + '"' for name in _names(self.table))
        delta = DeltaTable(path_of(self.mirror.path), version=version)
        return pa.table(QueryBuilder().register("t", delta).execute(f"SELECT {names} FROM t").read_all())

    def _keys(self, version: int | None) -> set[Any]:
        return set(self._key_texts(self._at(version)))

    def _key_texts(self, rows: pa.Table) -> list[Any]:
        columns = [rows[column.name].to_pylist() for column in self.table.key_columns]
        names = [column.name for column in self.table.key_columns]
        raw = [dict(entry or ()) for entry in rows["_pgcdc_raw"].to_pylist()]
        return [
            tuple((_one_zero(value), texts.get(name)) for name, value in zip(names, values, strict=True))
            for *values, texts in zip(*columns, raw, strict=True)
        ]  # fmt: skip


def _one_zero(value: Any) -> str:
    return repr(value + 0.0 if isinstance(value, float) else value)


def _names(table: Table) -> Sequence[str]:
    names: Sequence[str] = mirror_columns(table).names
    return names


def make(mirror: Mirror, schema: pa.Schema, properties: dict[str, str]) -> None:
    """Writes the first Delta commit of a mirror, with the protocol and metadata that Spark would write."""
    fields = json.loads(DeltaSchema.from_arrow(schema).to_json())["fields"]
    configuration = {"delta.enableDeletionVectors": "true", **properties}
    if needs_column_mapping(schema.names):
        configuration |= {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(len(fields))}
        for number, column in enumerate(fields, 1):
            names = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
            column["metadata"] = {**column.get("metadata", {}), **names}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": _FEATURES, "writerFeatures": _FEATURES}
    metadata = {
        "id": f"{mirror.name}", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [],
        "schemaString": json.dumps({"type": "struct", "fields": fields}), "configuration": configuration,
        "createdTime": 0,
    }  # fmt: skip
    log = mirror.path / "_delta_log"
    path_of(log).mkdir(parents=True)
    actions = [{"protocol": protocol}, {"metaData": metadata}]
    path_of(log / f"{0:020}.json").write_text("\n".join(json.dumps(action) for action in actions))
