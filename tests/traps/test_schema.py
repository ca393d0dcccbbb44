"""Schema changes are applied to the mirror, or set the table aside with a reason until a new copy. In both cases the
mirror finally equals the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.traps.scenario import Played, Trap, empty_rig, play
from tests.traps.schema import TRAPS

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module", params=["rewrite", pytest.param("set_aside", marks=pytest.mark.long)])
def played(
    request: pytest.FixtureRequest, server: EmbeddedServer, spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Played]:  # fmt: skip
    with empty_rig(server, spark, tmp_path_factory.mktemp("schema"), schema_changes=request.param) as rig:
        traps = [trap for trap in TRAPS if server.version >= 17 or trap.name != "generated_expression_changed"]
        yield play(rig, traps, together=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_mirror_equals_the_source_after_the_trap(played: Played, trap: Trap, server: EmbeddedServer) -> None:
    if trap.name == "generated_expression_changed" and server.version < 17:
        pytest.skip("ALTER COLUMN SET EXPRESSION came with 17")
    if played.rig.settings.schema_changes == "rewrite":
        # With ``rewrite``, no change sets the table aside.
        trap = replace(trap, aside=None)
    played.assert_equal(trap)
