"""The victim: a process that the power test stops, observes and kills. It runs copies, syncs and maintenance in a loop.

Started by ``python -m tests.power.victim SETTINGS`` in the project's folder. It prints "ready" and starts its work when
it reads a line. Checkpoints, compactions and clean-ups, which are usually rare, are frequent.
"""

from __future__ import annotations

import os
import random
import sys
from datetime import timedelta

import pytest

from pgcdc_assets.core import retention
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed import table
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log import commit
from pgcdc_assets.mirror.delta import mirror
from pgcdc_assets.mirror.delta.compaction import Compaction
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.points import ledger
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.session import spark_session
from tests.fix_spark import SPARK_SETTINGS

TABLES = ("t", "bag", "entry", "wiped")


def often(patch: pytest.MonkeyPatch) -> None:
    """Makes checkpoints, merges and clean-ups frequent. Users cannot change these settings."""
    patch.setattr(DeltaTarget, "compaction", Compaction(look_every=2, most_small=3))
    patch.setattr(table, "FEWEST_MERGED", 3)
    patch.setitem(commit._PROPERTIES, "delta.checkpointInterval", "9")
    for properties, every in ((table.FEED_PROPERTIES, "6"), (ledger._PROPERTIES, "5"), (mirror.PROPERTIES, "7")):
        patch.setitem(properties, "delta.checkpointInterval", every)
    for properties in (table.FEED_PROPERTIES, ledger._PROPERTIES):
        patch.setitem(properties, "delta.logRetentionDuration", "interval 0 seconds")


def main(settings_json: str) -> None:
    patch = pytest.MonkeyPatch()
    often(patch)
    # Makes maintenance delete data as soon as it is not needed. Only the change log still keeps its Delta commits for
    # an hour, because a compaction and the receiver read each other's commits.
    patch.setattr(retention, "GRACE", timedelta(0))
    settings = Settings.model_validate_json(settings_json)
    spark = spark_session(settings.model_copy(update={"spark": SPARK_SETTINGS}))
    spark.range(1).collect()
    print("ready", flush=True)
    chance = random.Random(sys.stdin.readline())
    assert settings.source is not None
    engine = Engine(settings, settings.source, Silent(), lambda: spark, "power cut test")
    while True:
        anew = [TableName("public", chance.choice(TABLES))] if chance.random() < 0.3 else []
        engine.sync(Bounds(follow=True, max_seconds=chance.uniform(3, 9)), copy_anew=anew)
        if chance.random() < 0.5:
            engine.maintain(Allowance())


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    finally:
        # Ends the process at once, because Spark's threads would keep it alive.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
