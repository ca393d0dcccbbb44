"""Traps (known difficult cases) of values, keys and transactions, run together with whole syncs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.traps.rows import OFTEN, TRAPS
from tests.traps.scenario import Played, Trap, empty_rig, play

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def some(
    server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:  # fmt: skip
    with empty_rig(server, spark, tmp_path_factory.mktemp("rows")) as rig:
        yield play(rig, [trap for trap in TRAPS if trap.name in OFTEN], together=True)


@pytest.fixture(scope="module", params=[True, False], ids=["in one turn", "a turn a step"])
def everything(
    request: pytest.FixtureRequest, server: EmbeddedServer, spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Played]:  # fmt: skip
    with empty_rig(server, spark, tmp_path_factory.mktemp("rows")) as rig:
        yield play(rig, TRAPS, together=request.param)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap.name in OFTEN], ids=lambda trap: trap.name)
def test_mirror_equals_the_source_after_the_trap(some: Played, trap: Trap) -> None:
    some.assert_equal(trap)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_mirror_equals_the_source_after_every_trap(everything: Played, trap: Trap) -> None:
    everything.assert_equal(trap)
