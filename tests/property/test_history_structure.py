"""Random histories with schema changes: a point lists a table as it was at the point's LSN, or does not list it.

``PGCDC_TEST_HISTORIES=N`` sets the number of histories in the long tests, and ``PGCDC_TEST_SEED=S`` selects the first
history. A failure message has the numbers of the failed histories. The folder ``build/histories`` then has the lake of
each failed group. ``PGCDC_TEST_HISTORY=205`` runs a single history, and shortens it to the steps that it needs to fail.
Add ``PGCDC_TEST_LONG=1`` for a long history, and ``PGCDC_TEST_COLUMNS=1`` for a history of column changes.
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
from tests.history.structure.changes import CHANGES
from tests.history.structure.generate import OF_COLUMNS, History, reduced
from tests.history.structure.group import SIZE, HistoryGroup, histories, played

pytestmark = pytest.mark.spark

logger = logging.getLogger(__name__)

MANY = 300
"""A set with at least this many histories contains every kind of schema change."""


def assert_points_equal_source(
    server: EmbeddedServer, spark: SparkSession, number: int, places: Sequence[int] = range(SIZE), *,
    columns: bool = False,
) -> HistoryGroup:  # fmt: skip
    kind, chosen = histories(number, columns=columns)
    chosen = [chosen[place] for place in places]
    at = played(server, spark, kind, chosen)
    assert not at.failed, f"group {number}, {kind}:\n{at.failure_text()}"
    return at


KNOWN = (
    # History 905 has an ATTACH and a DETACH between two catalog checks, which were once not noticed.
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
    at = assert_points_equal_source(server, spark, number, places)
    assert at.comparison.listed > sum(at.comparison.reported.values()), (
        "most tables were not listed, and so not compared"
    )


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.takes(600)
@pytest.mark.parametrize("columns", [False, True], ids=["all changes", "changes of columns"])
def test_points_equal_the_source_in_random_generated_histories(
    server: EmbeddedServer, spark: SparkSession, *, columns: bool
) -> None:
    """All histories are played, even after a failure. In a large set, every kind of schema change must take effect at
    least once."""
    count = int(os.environ.get("PGCDC_TEST_HISTORIES") or (20 if columns else 40))
    first = int(SEED)
    done: Counter[str] = Counter()
    failed: list[str] = []
    for number in range(first, first + -(-count // SIZE)):
        kind, chosen = histories(number, long=True, columns=columns)
        at = played(server, spark, kind, chosen)
        failed += [f"group {number}, {kind}:\n{at.failure_text()}"] * bool(at.failed)
        done.update(at.done)
    logger.info("%s", dict(done))
    assert not failed, "\n".join(failed)
    if count >= MANY:
        wanted = OF_COLUMNS if columns else CHANGES.keys() - OF_COLUMNS
        assert not [change for change in wanted if not done[change]], "these schema changes never took effect"


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_points_equal_the_source_in_generated_histories_with_power_cuts(
    server: EmbeddedServer, spark: SparkSession
) -> None:
    """The power is cut during each sync. The next sync continues with the remaining files."""
    number = int(SEED) % (1 << 20)
    kind, chosen = histories(number)
    at = played(server, spark, kind, chosen, power=number)
    assert not at.failed, f"group {number}, {kind}:\n{at.failure_text()}"


if "PGCDC_TEST_HISTORY" in os.environ:

    @pytest.mark.timeout(7200)
    def test_points_equal_the_source_in_a_single_generated_history(server: EmbeddedServer, spark: SparkSession) -> None:
        long = bool(os.environ.get("PGCDC_TEST_LONG"))
        one = int(os.environ["PGCDC_TEST_HISTORY"])
        columns = bool(os.environ.get("PGCDC_TEST_COLUMNS"))
        kind, chosen = histories(one // 100, size=one % 100 + 1, long=long, columns=columns)
        last: list[HistoryGroup] = []

        def fails(history: History) -> bool:
            at = played(server, spark, kind, [history])
            last[:] = [at] if at.failed else last
            return bool(at.failed)

        if fails(chosen[-1]):
            reduced(chosen[-1], fails)
            pytest.fail(f"history {one}, {kind}:\n{last[0].failure_text()}")
