"""The lag of a table, from the facts about source, log and lake."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from pgcdc_assets.checks.lag import Lag, _lag
from pgcdc_assets.checks.pending import Pending
from pgcdc_assets.core.lsn import Lsn
from tests.checks.test_health import AT, NOW, WELL, _slot

ORDERS, EVENTS = WELL.tables
AGO = NOW - timedelta(seconds=40)
STOPPED = replace(WELL, log=replace(WELL.log, transform_lsn=Lsn(AT - 500))) if WELL.log else WELL
"""The source is ahead of the log."""


def test_a_table_that_lacks_a_transaction_lags_since_its_commit() -> None:
    assert _lag(WELL, EVENTS, Pending(Lsn(AT - 1000), AGO), None) == Lag(1000, 40.0)


def test_a_table_that_lacks_none_does_not_lag() -> None:
    """Its position may be lower than the source's, because other tables have changed."""
    assert _lag(WELL, EVENTS, None, AGO) == Lag(1000, 0.0)


def test_while_a_process_receives_the_rest_is_on_its_way() -> None:
    assert _lag(replace(STOPPED, at_work="`pgcdc follow` (pid 5)"), ORDERS, None, AGO) == Lag(0, 0.0)


@pytest.mark.parametrize(("inactive", "seconds"), [(None, 40.0), (NOW - timedelta(seconds=7), 7.0)])
def test_while_nobody_receives_a_table_may_lag_since_the_last_reception(
    inactive: object, seconds: float
) -> None:  # fmt: skip
    assert _lag(replace(STOPPED, slot=_slot(inactive_since=inactive)), ORDERS, None, AGO) == Lag(0, seconds)


def test_without_the_source_only_the_log_counts() -> None:
    assert _lag(replace(WELL, source=None), ORDERS, None, AGO) == Lag(None, None)
    assert _lag(replace(WELL, source=None), ORDERS, Pending(AT, AGO), None) == Lag(None, 40.0)
