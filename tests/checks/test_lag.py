"""The lag of a table, from the facts about source, log and lake."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from pgcdc_assets.checks.health import Facts, LogFacts, SourceFacts, TableFacts
from pgcdc_assets.checks.lag import Lag, Pending, _lag
from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.source.slot.slot import SlotStatus

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
AGO = NOW - timedelta(seconds=40)
AT = Lsn(10_000)
WHO = Identity("7123", "shop", "pgcdc")
LEVEL = Facts(NOW, "pgcdc", SourceFacts(WHO, AT), log=LogFacts(WHO, Lsn(1), AT))
BEHIND = replace(LEVEL, log=LogFacts(WHO, Lsn(1), Lsn(AT - 500)))
"""The source is ahead of the log."""
ORDERS = TableFacts(TableName("public", "orders"), TableState.STREAMING, AT)
EVENTS = TableFacts(TableName("public", "events"), TableState.CATCHING_UP, Lsn(AT - 1000))


def test_a_table_that_lacks_a_transaction_lags_since_its_commit() -> None:
    assert _lag(LEVEL, EVENTS, Pending(Lsn(AT - 1000), AGO), None) == Lag(1000, 40.0)


def test_a_table_that_lacks_none_does_not_lag() -> None:
    """Its position may be lower than the source's, because other tables have changed."""
    assert _lag(LEVEL, EVENTS, None, AGO) == Lag(1000, 0.0)


def test_while_a_process_receives_the_rest_is_on_its_way() -> None:
    assert _lag(replace(BEHIND, at_work="`pgcdc follow` (pid 5)"), ORDERS, None, AGO) == Lag(0, 0.0)


def test_while_nobody_receives_a_table_may_lag_since_the_last_reception() -> None:
    assert _lag(BEHIND, ORDERS, None, AGO) == Lag(0, 40.0)
    assert _lag(replace(BEHIND, slot=_inactive(7)), ORDERS, None, AGO) == Lag(0, 7.0)
    assert _lag(BEHIND, ORDERS, None, None) == Lag(0, None)


def _inactive(seconds: float) -> SlotStatus:
    return SlotStatus(
        name="pgcdc", plugin="pgoutput", database="shop", connected_to="shop", temporary=False, active=False,
        active_pid=None, restart_lsn=AT, confirmed_flush_lsn=AT, wal_lsn=AT, wal_status="reserved", safe_wal_size=None,
        catalog_xmin_age=None, xmin_age=None, two_phase=False, conflicting=False, invalidation_reason=None,
        inactive_since=NOW - timedelta(seconds=seconds), failover=False, synced=False,
    )  # fmt: skip


def test_without_the_source_only_the_log_counts() -> None:
    assert _lag(replace(LEVEL, source=None), ORDERS, None, AGO) == Lag(None, None)
    assert _lag(replace(LEVEL, source=None), ORDERS, Pending(AT, AGO), None) == Lag(None, 40.0)
