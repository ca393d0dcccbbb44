"""Keeps a Dagster instance for one project. Asset keys and partition keys are global in an instance, so a second
project would delete the partition keys of the first one.

The instance notes its project as the one key of a partitions definition that no asset has. The note lies in the same
storage as the keys that it guards, and no run deletes it.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.defs.partitions import LSN_RANGES, SNAPSHOT_RANGES
from pgcdc_assets.errors import WrongInstance

_PROJECT: Final = "pgcdc_project"


def claim(instance: dg.DagsterInstance, identity: Identity) -> None:
    """Note that the instance belongs to the project of this stream. WrongInstance if it belongs to another project.

    An instance without any range and copy belongs to nobody: there is nothing that a second project could damage.
    """
    own, owner = _named(identity), _owner(instance)
    if owner not in (None, own) and not any(map(instance.get_dynamic_partitions, _guarded())):
        instance.delete_dynamic_partition(_PROJECT, owner)
        owner = None
    if owner is None:
        instance.add_dynamic_partitions(_PROJECT, [own])
        # Another project may have done the same at the same time: the first key counts.
        owner = _owner(instance)
    if owner != own:
        instance.delete_dynamic_partition(_PROJECT, own)
        raise WrongInstance(f"belongs to another project, which reads {owner}; this one reads {own}",
                            thing=f"Dagster instance {instance.root_directory}")  # fmt: skip


def release(instance: dg.DagsterInstance, identity: Identity) -> None:
    """Take the note back, if it is this project's: the project was torn down."""
    instance.delete_dynamic_partition(_PROJECT, _named(identity))


def _owner(instance: dg.DagsterInstance) -> str | None:
    return next(iter(instance.get_dynamic_partitions(_PROJECT)), None)


def _guarded() -> tuple[str, str]:
    return str(LSN_RANGES.name), str(SNAPSHOT_RANGES.name)


def _named(identity: Identity) -> str:
    """A database that was renamed, and a new log, leave it as it is: a slot's name stands once in a system."""
    return f"slot {identity.slot} of system {identity.system_identifier}"
