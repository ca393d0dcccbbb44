"""Continues a mirror in another folder, under the new name of its table. No row is read or written.

The files of the newest version are linked into the new folder, or copied by the object store. Then one commit there
adds the files and the columns, and records the position of the old mirror as the position of a copy. The old folder
stays as it is, for readers of older points. Each folder owns its files, so that the upkeep of one folder never deletes
files of the other.
"""

from __future__ import annotations

from functools import partial

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.definition import continue_table
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.mirror.delta.mirror import IDENTITY, SOURCE_TABLE, Mirror, create_mirror, structured
from pgcdc_assets.mirror.delta.mirrorschema import MirrorSchema
from pgcdc_assets.store import storage


def rename_mirror(former: Mirror, place: Mirror, table: Table, root: Location, position: Lsn) -> int:
    """Continue the mirror ``former``, as it was read, at ``place``, as a copy of ``table`` at ``position``; returns the
    version there.

    ``position``: the position of the former mirror; its own commits may record a lower position. ``root``: the lake's
    folder.
    """
    held = former.delta
    if held is None:
        raise LakeError("is no table that could go on under another name", thing=f"mirror {former.name}")
    if not place.exists:
        owned = {IDENTITY: place.identity.app_id(), SOURCE_TABLE: str(place.name)}
        create_mirror(place.path, MirrorSchema(held.columns), owned, root)
        passed(FaultPoint.MIRROR_MADE)
    names = {name for file in held.files for name in (file.path, file.vector) if name is not None}
    storage.together(place.path, [partial(_link, held.folder / name, place.path / name) for name in sorted(names)])
    passed(FaultPoint.RENAMED_FILES_LINKED)
    version = again_after_lost_races(partial(_continued, place, held, table, position))
    passed(FaultPoint.RENAME_COMMITTED)
    return version


def _continued(place: Mirror, held: DeltaVersion, table: Table, position: Lsn) -> int:
    """The commit records which table has these rows, because the place may have been another table's mirror."""
    mirror = place.again()
    owned = {IDENTITY: mirror.identity.app_id(), SOURCE_TABLE: str(mirror.name), **structured(table, position)}
    return continue_table(mirror.existing, held, {mirror.snapshot_app_id: position}, {**held.configuration, **owned})


def _link(source: Location, to: Location) -> None:
    """Copy a file; its name is unique across folders. A run that died may have copied the file, or a part of it."""
    if (there := storage.head(to)) is not None:
        found = storage.head(source)
        if found is not None and found.size == there.size:
            return
        storage.delete([to])
    storage.copy(source, to)
