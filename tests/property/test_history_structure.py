"""Generated histories with schema changes (stories): a point lists a table as it was at that LSN, or does not list it.

``PGCDC_TEST_STORIES=N`` sets the number of stories of the long sets, ``PGCDC_TEST_SEED=S`` the first story. A failure
message has the numbers of its stories. ``PGCDC_TEST_STORY=205`` plays a single story, shortened to the steps that it
needs to fail. Add ``PGCDC_TEST_LONG=1`` for a long story, ``PGCDC_TEST_COLUMNS=1`` for a story about columns.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from tests.conftest import SEED
from tests.history.structure.cohort import SIZE, Cohort, played, stories
from tests.history.structure.moves import MOVES
from tests.history.structure.story import OF_COLUMNS, Story, reduced

pytestmark = pytest.mark.spark

logger = logging.getLogger(__name__)

MANY = 300
"""A set with at least this many stories contains every kind of schema change."""


def hold(
    server: EmbeddedServer, spark: SparkSession, number: int, places: Sequence[int] = range(SIZE), *,
    columns: bool = False,
) -> Cohort:  # fmt: skip
    kind, told = stories(number, columns=columns)
    told = [told[place] for place in places]
    at = played(server, spark, kind, told)
    assert not at.silent, f"cohort {number}, {kind}:\n{at.account()}"
    return at


KNOWN = (
    # Story 905 has an ATTACH and a DETACH between two catalog checks, which were once not noticed.
    pytest.param(9, range(5, 6), id="tables, following"),
    pytest.param(2, range(SIZE), id="schema via root"),
    pytest.param(9, range(SIZE), id="tables, following, all"),
    pytest.param(1, range(SIZE), id="all tables"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("number", "places"), KNOWN)
@pytest.mark.takes(60)
@pytest.mark.timeout(900)  # On a busy machine. On an idle machine the test takes a minute.
def test_points_equal_the_source_in_fixed_generated_histories(
    server: EmbeddedServer, spark: SparkSession, number: int, places: Sequence[int]
) -> None:
    at = hold(server, spark, number, places)
    assert at.judge.listed > sum(at.judge.told.values()), "most tables were not listed, and so not compared"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.takes(600)
@pytest.mark.parametrize("columns", [False, True], ids=["all changes", "changes of columns"])
def test_points_equal_the_source_in_random_generated_histories(
    server: EmbeddedServer, spark: SparkSession, *, columns: bool
) -> None:
    """All stories are played, even after a failure. In a large set, every kind of schema change must take effect at
    least once."""
    count = int(os.environ.get("PGCDC_TEST_STORIES") or (20 if columns else 40))
    first = int(SEED)
    done: Counter[str] = Counter()
    silent: list[str] = []
    for number in range(first, first + -(-count // SIZE)):
        kind, told = stories(number, long=True, columns=columns)
        at = played(server, spark, kind, told)
        silent += [f"cohort {number}, {kind}:\n{at.account()}"] * bool(at.silent)
        done.update(at.done)
    logger.info("%s", dict(done))
    assert not silent, "\n".join(silent)
    if count >= MANY:
        wanted = OF_COLUMNS if columns else MOVES.keys() - OF_COLUMNS
        assert not [move for move in wanted if not done[move]], "these schema changes never took effect"


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_points_equal_the_source_in_generated_histories_with_power_cuts(
    server: EmbeddedServer, spark: SparkSession
) -> None:
    """The power is cut during each sync. The next sync continues with the remaining files."""
    number = int(SEED) % (1 << 20)
    kind, told = stories(number)
    at = played(server, spark, kind, told, power=number)
    assert not at.silent, f"cohort {number}, {kind}:\n{at.account()}"


if "PGCDC_TEST_STORY" in os.environ:

    @pytest.mark.timeout(7200)
    def test_points_equal_the_source_in_a_single_generated_history(server: EmbeddedServer, spark: SparkSession) -> None:
        long = bool(os.environ.get("PGCDC_TEST_LONG"))
        one = int(os.environ["PGCDC_TEST_STORY"])
        columns = bool(os.environ.get("PGCDC_TEST_COLUMNS"))
        kind, told = stories(one // 100, size=one % 100 + 1, long=long, columns=columns)
        last: list[Cohort] = []

        def fails(story: Story) -> bool:
            at = played(server, spark, kind, [story])
            last[:] = [at] if at.silent else last
            return bool(at.silent)

        if fails(told[-1]):
            reduced(told[-1], fails)
            pytest.fail(f"story {one}, {kind}:\n{last[0].account()}")
