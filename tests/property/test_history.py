"""Random histories with whole syncs: at every consistent point, the mirrors equal the source at the point's LSN."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, seed, settings
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.history.driver import SLOW, play, project
from tests.history.steps import History, histories, long_histories
from tests.history.values import CODECS

logger = logging.getLogger(__name__)


def hold(server: EmbeddedServer, spark: SparkSession, history: History) -> None:
    with project(server, spark, history) as at:
        play(at, history)
        unlogged = sum(spec.unlogged for spec in history.tables)
        logger.info("%s, %s unlogged: %s", history.encoding, unlogged, dict(at.workload.done))


@pytest.mark.spark
@seed(20261121)
@settings(SLOW, max_examples=1)
@given(history=histories(2, 25))
@pytest.mark.takes(30)
def test_mirrors_equal_the_source_in_a_fixed_history(
    server: EmbeddedServer, spark: SparkSession, history: History
) -> None:
    hold(server, spark, history)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(3600)
@pytest.mark.takes(100)
@pytest.mark.parametrize("encoding", CODECS)
def test_mirrors_equal_the_source_in_random_histories(
    server: EmbeddedServer, spark: SparkSession, encoding: str
) -> None:
    """Hypothesis prints how to reproduce a failing example (``@reproduce_failure``)."""

    @settings(SLOW, max_examples=3)
    @given(history=long_histories(4, 60, encoding))
    def history_holds(history: History) -> None:
        hold(server, spark, history)

    history_holds()
