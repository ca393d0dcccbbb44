"""Deletes the rows of removed partitions from a mirror, by deletion vectors. The source is not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyroaring import BitMap64

from pgcdc_assets.core.catalog import Leaf, Table
from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.delta.commit import FileChange, commit_change
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.mirror import Mirror
from pgcdc_assets.mirror.delta.task import Collapsing, collapse_units
from pgcdc_assets.spark.executors import cores
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.spark.tasks import run_tasks


def without_leaves(
    spark: SparkOnDemand, mirror: Mirror, delta: DeltaVersion, table: Table, leaves: Sequence[Leaf],
    properties: Mapping[str, str],
) -> int:  # fmt: skip
    """Delete the rows of these leaves from this version of a mirror, and set properties in the same commit; returns the
    new version. ``table``: the table as the mirror has it, including the leaves.

    This has the effect of a TRUNCATE of the leaves, and the same task does the work.
    """
    names = tuple(str(leaf.name) for leaf in leaves)
    shares = max(1, cores(spark())) if delta.files else 0
    units = [Collapsing(table, (), LsnRange(ZERO, ZERO), mirror.target(table, delta.files[share::shares]), leaves=names)
             for share in range(min(shares, len(delta.files)))]  # fmt: skip
    effects = [effect for done in run_tasks(spark(), collapse_units, [[unit] for unit in units]) for effect in done]
    for effect in effects:
        if effect.mismatch is not None:
            raise LakeError(effect.mismatch.what, thing=f"mirror {mirror.name}")
    gone: dict[str, BitMap64] = {path: rows for effect in effects for path, rows in effect.gone.items()}
    metrics = {"numTargetRowsDeleted": sum(effect.deleted for effect in effects)}
    return commit_change(delta, FileChange([], gone), {}, metrics, properties)
