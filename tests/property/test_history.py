"""Random histories with whole syncs: at every consistent point, the mirrors equal the source at the point's LSN."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.demo.server import EmbeddedServer
from tests.history.derived import received, title
from tests.history.driver import SLOW, play, project
from tests.history.steps import ACTS, STEPS, History, Step, histories, long_histories, undisturbed
from tests.history.tables import Column, Spec, tables
from tests.history.values import CODECS, KEYS, VALUES

logger = logging.getLogger(__name__)


def assert_mirrors_equal_source(server: EmbeddedServer, spark: SparkSession, history: History) -> None:
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
    assert_mirrors_equal_source(server, spark, history)


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
        assert_mirrors_equal_source(server, spark, history)

    history_holds()


# Random histories through change log, decoding, net effects and merge, without Spark ----------------

MANY = settings(
    deadline=None, print_blob=True, database=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
STEP_LISTS = st.lists(STEPS, min_size=60, max_size=200)
LEAVES = Spec("public", "leaves", "primary", (Column("id", KEYS[0]),), (Column("v", VALUES[0]),), partitioned=True)
"""A partitioned table that each fixed history gets, because not every generated history has a partitioned table."""
CUTS, FEW_CUTS = (st.sets(st.integers(0, 63), max_size=most) for most in (12, 5))


def assert_derived_mirrors_equal_source(
    server: EmbeddedServer, specs: tuple[Spec, ...], steps: Sequence[Step], cuts: set[int], *, each: int | None = None
) -> Counter[str]:
    """Checks that every table equals the source after each turn and after a repair. Returns how often each kind of step
    took effect.

    Each table's changes are applied to two new mirrors: in a single turn, and in turns that end at the boundaries
    ``cuts``. For the table number ``each`` (None: for all tables), the changes are also applied in one turn per
    transaction.
    """
    first = [Step("insert", 0, table, 0, number) for table in range(5) for number in range(3)]
    with received(server, specs, [*first, Step("commit", 0, 0, 0, 0), *steps]) as (at, workload):
        every = at.boundaries
        some = [every[0], *(every[cut] for cut in sorted(cuts) if 0 < cut < len(every) - 1), every[-1]]
        for number, table in enumerate(at.tables):
            if each is None or number == each % len(at.tables):
                at.apply(table, every)
            at.apply(table, [every[0], every[-1]])
            model = at.apply(table, some)
            at.assert_net_changes(model, some)
            if table.key:
                whole = {spec.title: not spec.has_large or spec.whole_rows for spec in specs}[title(table)]
                for start, end in pairwise(some):
                    at.repair(model, every[-1], LsnRange(start, end), damaged=whole)
        return workload.done


@pytest.mark.long
@pytest.mark.takes(40)
def test_mirrors_equal_the_source_after_every_turn_of_fixed_histories(server: EmbeddedServer) -> None:
    done: Counter[str] = Counter()

    @seed(20261121)
    @settings(MANY, max_examples=3)
    @given(tables(), STEP_LISTS, FEW_CUTS, st.integers(0, 4))
    def run_history(specs: tuple[Spec, ...], steps: list[Step], cuts: set[int], each: int) -> None:
        done.update(
            assert_derived_mirrors_equal_source(server, (*specs[:4], LEAVES), [*steps, *undisturbed()], cuts, each=each)
        )

    run_history()
    assert not [act for act in ACTS if not done[act]], "no history has executed these statements with success"


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(MANY, max_examples=20)
@given(tables(), STEP_LISTS, CUTS)
def test_mirrors_equal_the_source_after_every_turn_of_random_histories(
    server: EmbeddedServer, specs: tuple[Spec, ...], steps: list[Step], cuts: set[int]
) -> None:
    assert_derived_mirrors_equal_source(server, specs, steps, cuts)
