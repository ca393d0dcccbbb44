"""Random histories with power cuts: each run loses the power at some moment, and the next goes on with what is left.

Every boundary that was published and kept, and every later one, equals the source at that LSN. ``PGCDC_TEST_HISTORIES``
histories of the long set, ``PGCDC_TEST_SEED`` of what is drawn; when a run syncs is the machine's own, so a failure
says what was lost.
"""

from __future__ import annotations

import os
import random
import time

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.history.cuts import Cuts
from tests.history.driver import SLOW, play, project
from tests.history.steps import History, histories
from tests.history.structure.cohort import played, stories
from tests.power.outages import outages

pytestmark = pytest.mark.spark

_SEED = int(os.environ.get("PGCDC_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
_COHORTS = 1
_LONG = int(os.environ.get("PGCDC_TEST_HISTORIES") or 8)


def hold(server: EmbeddedServer, spark: SparkSession, history: History, drawn: int) -> None:
    started = time.monotonic()
    with (
        project(server, spark, history.tables) as at,
        outages(spark, at.settings, at.workload.conn, drawn) as power,
    ):
        cuts = Cuts(power)
        try:
            play(at, history, cuts.during)
        except BaseException as error:
            error.add_note(f"after {power.done} power cuts, PGCDC_TEST_SEED={_SEED}, cuts drawn by {drawn}")
            raise
        told = f"{power.done} cuts, {cuts.read} tables read as they were left, lost {dict(power.lost)}"
    print(f"{told}, {time.monotonic() - started:.0f} s, PGCDC_TEST_SEED={_SEED}")


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.takes(400)
@seed(_SEED)
@settings(SLOW, max_examples=_LONG)
@given(history=histories(4, 40), drawn=st.integers(0, 1 << 32))
def test_many_histories_with_power_cuts(
    server: EmbeddedServer, spark: SparkSession, history: History, drawn: int
) -> None:
    hold(server, spark, history, drawn)


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_stories_of_the_structure_with_power_cuts(server: EmbeddedServer, spark: SparkSession) -> None:
    """Each run of some cohorts loses the power; the stories, and what is asked of every point, are the same."""
    for number in range(_SEED % (1 << 20), _SEED % (1 << 20) + _COHORTS):
        kind, told = stories(number)
        at = played(server, spark, kind, told, power=number)
        assert not at.silent, f"cohort {number}, {kind}, PGCDC_TEST_SEED={_SEED}:\n{at.account()}"
