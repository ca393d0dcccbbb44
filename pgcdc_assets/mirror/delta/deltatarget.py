"""Mirrors as Delta tables: implements the contract of :mod:`pgcdc_assets.mirror.target`. A mirror's position is stored
as a Delta app transaction (action ``txn``), in the commit that changes the rows. The contract's version is the version
of the Delta table. Durable means synced to disk (:mod:`pgcdc_assets.mirror.delta.durability`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.definition import commit_columns, continue_table
from pgcdc_assets.delta.sweep import remove_table
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.feed.schema import FeedPart
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta.apply import apply_tables, repair_table
from pgcdc_assets.mirror.delta.compaction import COMPACTION, Compaction, optimize, worth_optimizing
from pgcdc_assets.mirror.delta.copy import copy_tables
from pgcdc_assets.mirror.delta.durability import DurableVersions
from pgcdc_assets.mirror.delta.mirror import IDENTITY, SOURCE_TABLE, Mirror, Mirrors, create_mirror, structured
from pgcdc_assets.mirror.delta.mirrorschema import Commented, refusal
from pgcdc_assets.mirror.delta.removal import keep_promised, keep_readable, unchanged_since, unneeded_parts
from pgcdc_assets.mirror.delta.reshape import reshape_mirror
from pgcdc_assets.mirror.target import Applied, CopyCount, CopyReport, Failures, Freed, Generation
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store import storage

if TYPE_CHECKING:
    from pgcdc_assets.source.snapshot.export import Snapshot


class DeltaTarget:
    """The mirrors of a lake. ``retention``: how long consistent points must stay readable."""

    compaction: ClassVar[Compaction] = COMPACTION

    def __init__(self, layout: Layout, identity: Identity, spark: SparkOnDemand, retention: timedelta) -> None:
        self._mirrors = Mirrors(layout, identity)
        self._spark = spark
        self._retention = retention
        self._points = ConsistentPoints(layout)
        self._durable = DurableVersions(layout, identity.app_id())

    # State --------------------------------------------------------------------------------------

    def refusal(self, table: Table) -> str | None:
        return refusal(table)

    def recover(self, names: Iterable[TableName]) -> dict[str, tuple[str, ...]]:
        aside = self._durable.recover(names, self._points)
        return {str(self._mirrors.layout.mirror(name)): files for name, files in aside.items()}

    def standing(self, name: TableName) -> Generation | None:
        mirror = self._mirrors.open(name)
        snapshot_lsn = mirror.snapshot_lsn
        if snapshot_lsn is None:
            return None
        replay_lsn = mirror.effective_replay_lsn(self._points) or snapshot_lsn
        recorded, unlisted = mirror.replay_lsn or snapshot_lsn, mirror.unlisted(self._points)
        followed = mirror.followed if recorded >= mirror.rows_at else None
        return Generation(snapshot_lsn, replay_lsn, mirror.version, recorded, mirror.oid, followed, unlisted)

    def version(self, name: TableName) -> int:
        return self._mirrors.open(name).version

    def rows(self, name: TableName) -> int | None:
        delta = self._mirrors.open(name).delta
        return delta.rows if delta is not None else None

    @property
    def changed(self) -> Mapping[TableName, str]:
        return self._durable.changed

    # Copy ---------------------------------------------------------------------------------------

    def copy(
        self, tables: Sequence[Table], snapshot: Snapshot, on_table: Callable[[CopyReport], None],
        count: CopyCount | None = None,
    ) -> Failures:  # fmt: skip
        return copy_tables(self._spark(), snapshot.conninfo, tables, self._mirrors, snapshot, on_table, self._retention,
                           count)  # fmt: skip

    def cancel_copies(self) -> None:
        """Cancels all Spark jobs. No job of an apply is among them, because the run's thread, which applies changes, is
        in this call."""
        if self._spark.started is not None:
            self._spark.started.sparkContext.cancelAllJobs()

    # Apply --------------------------------------------------------------------------------------

    def apply(self, parts: Sequence[FeedPart], upto: Lsn, known: Mapping[TableName, Table]) -> list[Applied]:
        return apply_tables(self._spark(), self._mirrors, parts, upto, known, self.compaction)

    def repair(self, log: ChangeLog, table: Table, span: LsnRange, replay_lsn: Lsn) -> Applied:
        return repair_table(self._spark(), log, self._mirrors, table, span, replay_lsn)

    def reshape(self, before: Table, after: Table, *, by_metadata: bool) -> int:
        return reshape_mirror(self._spark, self._mirrors, before, after, by_metadata=by_metadata)

    def comment(self, table: Table) -> int:
        def attempt() -> int:
            mirror = self._mirrors.open(table.name)
            delta = mirror.delta
            if delta is None or mirror.snapshot_lsn is None:
                raise LakeError(
                    "contains no copy of the table, so comments cannot be set", thing=f"mirror {table.name}"
                )
            commented = Commented.of(delta, table)
            if commented.held_by(delta):
                return delta.number
            return commit_columns(delta, commented.columns, commented.properties, description=commented.description)

        return again_after_lost_races(attempt)

    def rename(self, former: TableName, table: Table, version: int, position: Lsn) -> int:
        held = self._mirrors.open(former).at(version)
        if held is None:
            raise LakeError(f"no longer has version {version}, so it cannot be renamed", thing=f"mirror {former}")
        place = self._mirrors.open(table.name)
        others = place.snapshot_lsn == position and place.oid != table.oid
        if others and place.effective_replay_lsn(self._points) != position:
            # A mirror's position is stored under a key that contains the LSN of its copy. Here, the key of the renamed
            # mirror would be the key of the other table's mirror. So the renamed mirror would get that position.
            raise LakeError(
                f"contains another table, copied at {position} and changed since, so mirror {former} cannot get "
                "this name",
                thing=f"mirror {place.name}",
                lsn=position,
            )
        return self._renamed(held, place, table, position)

    def _renamed(self, former: Mirror, place: Mirror, table: Table, position: Lsn) -> int:
        """Continue ``former`` in ``place``, the folder of its new name. No row is read or written: the files are linked
        into that folder, or copied by the object store. Then one commit there adds the files and the columns, and
        records ``position`` as the position of a copy. It may be above the position that the commits of ``former``
        record. The old folder stays as it is, for readers of older points. Each folder has its own links or copies, so
        that deleting files in one folder never affects the other folder."""
        held = former.delta
        if held is None:
            raise LakeError("does not exist, so it cannot be renamed", thing=f"mirror {former.name}")
        owned = {IDENTITY: place.identity.app_id(), SOURCE_TABLE: str(place.name)}
        if not place.exists:
            create_mirror(place.path, held.columns, owned, self._mirrors.layout.root)
            passed(FaultPoint.MIRROR_MADE)
        names = {name for file in held.files for name in (file.path, file.vector) if name is not None}
        storage.together(place.path, [partial(_link, held.folder / name, place.path / name) for name in sorted(names)])
        passed(FaultPoint.RENAMED_FILES_LINKED)
        # The OID and the structure are set too, because the folder may have been another table's mirror.
        properties = {**held.configuration, **owned, **structured(table, position)}
        positions = {place.snapshot_app_id: position}
        version = again_after_lost_races(lambda: continue_table(place.again().existing, held, positions, properties))
        passed(FaultPoint.RENAME_COMMITTED)
        return version

    # Publish ------------------------------------------------------------------------------------

    def settle(self, versions: Mapping[TableName, int]) -> None:
        self._durable.settle(versions)

    def publish(
        self,
        lsn: Lsn,
        versions: Mapping[TableName, int],
        changed: Mapping[TableName, str],
        messages: Lsn | None = None,
        beside: Point | None = None,
    ) -> None:
        positions = self._durable.settle(versions)
        if beside is not None:
            changed = {**beside.changed, **{name: what for name, what in changed.items() if name in versions}}
            versions = {**beside.tables, **versions}
            positions = {**beside.positions, **positions}
        self._points.publish(lsn, versions, positions, changed, messages)

    # Upkeep -------------------------------------------------------------------------------------

    def unmoved(self, name: TableName, version: int) -> int | None:
        mirror = self._mirrors.open(name)
        return mirror.version if mirror.exists and unchanged_since(mirror, version) else None

    def upkeep(self, name: TableName, table: Table | None, published: int, may_begin: Callable[[], bool]) -> bool:
        mirror = self._mirrors.open(name)
        if not mirror.exists or not unchanged_since(mirror, published):
            return False
        # The present version is protected before a new version is committed, because older points may name it.
        keep_readable(mirror)
        keep_promised(mirror, self._retention)
        files = mirror.delta.files if mirror.delta else ()
        if table is None or not worth_optimizing(files) or not may_begin():
            return False
        optimize(self._spark(), mirror, table)
        passed(FaultPoint.MIRROR_OPTIMIZED)
        return True

    def keeps(self, name: TableName) -> bool:
        return self._mirrors.open(name).exists

    def forget(self, name: TableName) -> Freed:
        freed = Freed(*remove_table(self._mirrors.layout.mirror(name)))
        self._mirrors.forget(name)
        self._durable.forget(name)
        return freed

    def delete_unneeded(
        self, name: TableName, promised: Collection[int], grace: timedelta, may_begin: Callable[[], bool]
    ) -> Freed | None:
        mirror = self._mirrors.open(name)
        if not mirror.exists:
            return None
        found = unneeded_parts(mirror, promised, grace)
        if not (found.files or found.log_files) or not may_begin():
            return None
        freed = Freed(len(found.files), found.bytes)
        found.delete()
        return freed


def _link(source: Location, to: Location) -> None:
    """Link or copy a file, unless an earlier run that died has already done it. A file of this name with another size
    is an incomplete copy, because names are unique across folders. It is replaced."""
    if (there := storage.head(to)) is not None:
        found = storage.head(source)
        if found is not None and found.size == there.size:
            return
        storage.delete([to])
    storage.copy(source, to)
