"""Reserves a Dagster instance for one project. Asset keys and partition keys are global in an instance, so a second
project would delete the partition keys of the first project.

The instance notes its project as the only key of a partitions definition that no asset uses. So the note is in the same
storage as the keys that it protects, and no run deletes it.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.defs.partitions import LSN_RANGES, SNAPSHOT_RANGES
from pgcdc_assets.errors import WrongInstance

_PROJECT: Final = "pgcdc_project"


def claim(instance: dg.DagsterInstance, identity: Identity) -> None:
    """Note that the instance belongs to the project of this stream. Raises WrongInstance if it belongs to another
    project.

    An instance without ranges and copies is free, even if it notes another project, because there is nothing that a
    second project could damage.
    """
    own, owner = _named(identity), _owner(instance)
    if owner not in (None, own) and not any(map(instance.get_dynamic_partitions, _guarded())):
        instance.delete_dynamic_partition(_PROJECT, owner)
        owner = None
    if owner is None:
        instance.add_dynamic_partitions(_PROJECT, [own])
        # Another project may have added its key at the same time. The first key counts.
        owner = _owner(instance)
    if owner != own:
        instance.delete_dynamic_partition(_PROJECT, own)
        raise WrongInstance(f"belongs to another project, which reads {owner}; this one reads {own}",
                            thing=f"Dagster instance {instance.root_directory}")  # fmt: skip


def release(instance: dg.DagsterInstance, identity: Identity) -> None:
    """Delete this project's note, because the project was torn down. The note of another project stays."""
    instance.delete_dynamic_partition(_PROJECT, _named(identity))


def _owner(instance: dg.DagsterInstance) -> str | None:
    return next(iter(instance.get_dynamic_partitions(_PROJECT)), None)


def _guarded() -> tuple[str, str]:
    return str(LSN_RANGES.name), str(SNAPSHOT_RANGES.name)


def _named(identity: Identity) -> str:
    """The project as slot and system: a slot's name is unique in a system. So a renamed database or a new log is still
    the same project."""
    return f"slot {identity.slot} of system {identity.system_identifier}"
