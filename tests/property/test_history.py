"""Random histories over the whole path: every boundary that a run publishes equals the source at that LSN."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.history.driver import SLOW, play, project
from tests.history.steps import History, histories


def hold(server: EmbeddedServer, spark: SparkSession, history: History) -> None:
    with project(server, spark, history.tables) as at:
        play(at, history)


@pytest.mark.spark
@seed(20261121)
@settings(SLOW, max_examples=1)
@given(history=histories(2, 40))
@pytest.mark.takes(30)
def test_known_histories(server: EmbeddedServer, spark: SparkSession, history: History) -> None:
    hold(server, spark, history)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(3600)
@pytest.mark.takes(300)
@settings(SLOW, max_examples=12)
@given(history=histories(4, 60))
def test_many_histories(server: EmbeddedServer, spark: SparkSession, history: History) -> None:
    hold(server, spark, history)
