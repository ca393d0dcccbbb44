"""One situation per case: the facts that cause it, and the problem that is reported."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgcdc_assets.checks.health import (
    GIB,
    MIB,
    Backend,
    Facts,
    LeftFacts,
    LogFacts,
    PublicationFacts,
    SourceFacts,
    TableFacts,
    UntakenFacts,
)
from pgcdc_assets.checks.status import problems
from pgcdc_assets.core.catalog import Catalog, Identity, Outside, Table
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.points.untaken import UntakenRows
from pgcdc_assets.source.slot.blockers import Blocker
from pgcdc_assets.source.slot.slot import SlotStatus
from pgcdc_assets.structure.record import TableState
from tests.structure.marked import leaf

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
SOURCE = Identity("7123", "shop", "pgcdc")
AT = Lsn(100 * GIB)
ORDERS, EVENTS = TableName("public", "orders"), TableName("public", "events")
LEAF_A, LEAF_B = TableName("public", "events_a"), TableName("public", "events_b")

CATALOG = Catalog(
    SOURCE, "pgcdc", 180004,
    (
        Table(1, ORDERS, (), key=(1,)),
        Table(2, EVENTS, (), key=(1,), partitioned=True, leaves=(leaf(3, LEAF_A, 3), leaf(4, LEAF_B, 4))),
    ),
    ("pgcdc",),
)  # fmt: skip
FAR = Outside(
    5, TableName("public", "events_far"), "is a foreign table", "replicate its rows from the server that has them"
)
PUBLICATION = PublicationFacts("pgcdc", frozenset({ORDERS, LEAF_A, LEAF_B}))
WELL = Facts(
    now=NOW,
    slot_name="pgcdc",
    source=SourceFacts(
        SOURCE, AT, max_slot_wal_keep_bytes=10 * GIB, holder=Backend(5, "pgcdc_assets/receive"),
        publications={"pgcdc": PUBLICATION},
    ),
    slot=None,
    log=LogFacts(SOURCE, Lsn(AT - GIB), AT),
    catalog=CATALOG,
    tables=(
        TableFacts(ORDERS, TableState.STREAMING, AT),
        TableFacts(EVENTS, TableState.CATCHING_UP, Lsn(AT - 1000)),
    ),
)  # fmt: skip


def _slot(**changes: Any) -> SlotStatus:
    usual: dict[str, Any] = {
        "name": "pgcdc", "plugin": "pgoutput", "database": "shop", "connected_to": "shop", "temporary": False,
        "active": True, "active_pid": 5, "restart_lsn": Lsn(AT - MIB), "confirmed_flush_lsn": AT, "wal_lsn": AT,
        "wal_status": "reserved", "safe_wal_size": None, "catalog_xmin_age": 100, "xmin_age": None,
        "two_phase": False, "conflicting": False, "invalidation_reason": None, "inactive_since": None,
        "failover": False, "synced": False,
    }  # fmt: skip
    return SlotStatus(**usual | changes)


def _source(**changes: Any) -> dict[str, Any]:
    assert WELL.source is not None
    return {"source": replace(WELL.source, **changes)}


def _table(state: TableState, replay_lsn: int | None = AT, **more: Any) -> dict[str, Any]:
    return {"tables": (TableFacts(ORDERS, state, None if replay_lsn is None else Lsn(replay_lsn), **more),)}


def _published(*names: TableName, **operations: bool) -> dict[str, Any]:
    return _source(publications={"pgcdc": PublicationFacts("pgcdc", frozenset(names), **operations)})


OLD = Blocker(733, 4711, None, "shop", "psql", timedelta(hours=3))
SITUATIONS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    # Each value contains the facts that differ from a healthy lake. Then follow the expected severity, the object, a
    # part of the problem's text, and a part of the advice.
    "before setup": (
        {"catalog": None, "slot": None, "log": None, "tables": ()}, "error", "project", "not set up", "pgcdc setup",
    ),
    "slot gone before the first run": (
        {"slot": None, "log": None}, "error", "slot pgcdc", "does not exist", "pgcdc setup",
    ),
    "slot gone": ({"slot": None}, "error", "slot pgcdc", f"changes after {AT}", "copies all tables again"),
    "slot lost": (
        {"slot": _slot(wal_status="lost")}, "error", "slot pgcdc", "invalidated (wal_removed)", "all tables again",
    ),
    "slot invalidated": (
        {"slot": _slot(invalidation_reason="idle_timeout", wal_status="reserved")},
        "error", "slot pgcdc", "invalidated (idle_timeout)", "copies all tables again",
    ),
    "slot in conflict": (
        {"slot": _slot(conflicting=True)}, "error", "slot pgcdc", "conflict with recovery", "copies all tables again",
    ),
    "WAL removed on 14 to 16": (
        {"slot": _slot(restart_lsn=None)}, "error", "slot pgcdc", "invalidated (wal_removed)", "all tables again",
    ),
    "another plugin": (
        {"slot": _slot(plugin="test_decoding")}, "error", "slot pgcdc", "plugin test_decoding", "setting `slot`",
    ),
    "another database": ({"slot": _slot(database="erp")}, "error", "slot pgcdc", "database erp", "setting `slot`"),
    "slot nearly lost": (
        {"slot": _slot(wal_status="unreserved")}, "error", "slot pgcdc", "nearly lost", "max_slot_wal_keep_size",
    ),
    "little room left": (
        {"slot": _slot(safe_wal_size=100 * MIB)},
        "warning", "slot pgcdc", "after 100 MiB more", "max_slot_wal_keep_size",
    ),
    "no room left": ({"slot": _slot(safe_wal_size=-5)}, "warning", "slot pgcdc", "after 0 MiB more", "pgcdc sync"),
    "two-phase slot": ({"slot": _slot(two_phase=True)}, "error", "slot pgcdc", "two_phase", "set `two_phase` to true"),
    "slot of a primary": (
        {"slot": _slot(synced=True)}, "error", "slot pgcdc", "synchronized from the primary", "`source`",
    ),
    "held by another": (
        _source(holder=Backend(99, "psql")),
        "error", "slot pgcdc", "pid 99, application 'psql'", "pg_terminate_backend(99)",
    ),
    "nobody reads": (
        {"slot": _slot(active=False, confirmed_flush_lsn=Lsn(AT - 80 * MIB), inactive_since=NOW)},
        "warning", "slot pgcdc", "since 2026-11-01 12:00 UTC), and the source keeps 80 MiB", "pgcdc sync",
    ),
    "idle timeout": (
        _source(idle_slot_timeout=timedelta(hours=2)),
        "warning", "slot pgcdc", "invalidated if it is not read for 2 hours", "idle_replication_slot_timeout",
    ),
    "idle timeout near": (
        {**_source(idle_slot_timeout=timedelta(days=4)), "slot": _slot(active=False, inactive_since=NOW -
         timedelta(days=3, hours=1))},
        "error", "slot pgcdc", "not read for 3 days, and the source invalidates it after 4 days", "pgcdc sync",
    ),
    "unbounded WAL": (
        {**_source(max_slot_wal_keep_bytes=None), "slot": _slot(restart_lsn=Lsn(AT - 2 * GIB),
         confirmed_flush_lsn=Lsn(AT - 2 * GIB))},
        "warning", "slot pgcdc", "keeps 2.0 GiB of WAL", "max_slot_wal_keep_size",
    ),
    "long transaction": (
        {**_source(oldest=OLD), "slot": _slot(restart_lsn=Lsn(AT - 3 * GIB))},
        "warning", "slot pgcdc", "pid 4711 (psql) in database shop, open for 10800 s", "end that transaction",
    ),
    "prepared transaction": (
        {**_source(oldest=replace(OLD, pid=None, gid="two")), "slot": _slot(restart_lsn=Lsn(AT - 3 * GIB))},
        "warning", "slot pgcdc", "prepared transaction 'two'", "end that transaction",
    ),
    "old catalog_xmin": (
        {"slot": _slot(catalog_xmin_age=300_000_000)}, "warning", "slot pgcdc", "300000000 transactions", "pgcdc sync",
    ),
    "slot ahead of the log": (
        {"log": LogFacts(SOURCE, Lsn(1), Lsn(AT - 1)), **_table(TableState.STREAMING, AT - 1)},
        "error", "change log", f"ends at {Lsn(AT - 1)}, but the slot was confirmed up to {AT}",
        "copies all tables again",
    ),
    "log ahead of the source": (
        {"log": LogFacts(SOURCE, Lsn(1), Lsn(AT + 1))},
        "error", "change log", f"is at {Lsn(AT + 1)}, ahead of the source's WAL at {AT}", "teardown --lake",
    ),
    "another system": (
        {"log": LogFacts(replace(SOURCE, system_identifier="9"), Lsn(1), AT)},
        "error", "change log", "belongs to system 9, database shop, slot pgcdc, but the settings name system 7123",
        "`source`",
    ),
    "gap": (
        _table(TableState.CATCHING_UP, AT - GIB - 1),
        "error", "table public.orders", f"but the change log begins at {Lsn(AT - GIB)}", "pgcdc snapshot public.orders",
    ),
    "wal_level": (_source(wal_level="replica"), "error", "source", "wal_level = replica", "wal_level = logical"),
    "synchronous by star": (
        _source(synchronous_standby_names="FIRST 1 (*)"), "error", "source", "at every commit", "each standby by name",
    ),
    "synchronous by name": (
        _source(synchronous_standby_names='ANY 1 (a, "PGCDC_assets/receive")'),
        "error", "source", "at every commit", "each standby by name",
    ),
    "publication gone": (
        _source(publications={"pgcdc": None}), "error", "publication pgcdc", "does not exist",
        "copies all tables again",
    ),
    "publication emptied": (
        _published(), "error", "publication pgcdc", "lists no table", "add the tables to the publication again",
    ),
    "publication of ours emptied": (
        _source(publications=_published()["source"].publications, ours=True), "error", "publication pgcdc",
        "lists no table", "run `pgcdc setup`",
    ),
    "table not published": (
        _published(LEAF_A, LEAF_B), "error", "table public.orders", "no longer published", "pgcdc setup",
    ),
    "leaf not published": (
        _published(ORDERS, LEAF_A), "error", "table public.events",
        "(no publication lists public.events_b)", "pgcdc setup",
    ),
    "updates not published": (
        _published(ORDERS, EVENTS, update=False),
        "error", "table public.orders", "published without update", "publication pgcdc",
    ),
    "truncate not published": (
        _published(ORDERS, EVENTS, truncate=False),
        "warning", "table public.orders", "without truncate: it is copied again after TRUNCATE, VACUUM FULL or CLUSTER",
        "publication pgcdc",
    ),
    "writes fail": (
        _source(without_identity=frozenset({ORDERS})),
        "error", "table public.orders", "UPDATE and DELETE fail", "primary key",
    ),
    "updates not seen": (
        _table(TableState.STREAMING, updates_seen=False),
        "warning", "table public.orders", "not replicated", "REPLICA IDENTITY FULL",
    ),
    "updates of a partitioned table not seen": (
        {"tables": (TableFacts(EVENTS, TableState.STREAMING, Lsn(AT), updates_seen=False),)},
        "warning", "table public.events", "not replicated", "set REPLICA IDENTITY FULL on each of its partitions",
    ),
    "deletes left out by a publication of somebody else's": (
        {
            **_published(ORDERS, LEAF_A, LEAF_B, delete=False), **_table(TableState.STREAMING, updates_seen=False),
            "catalog": replace(CATALOG, tables=(replace(CATALOG.tables[0], updates_seen=False), CATALOG.tables[1])),
        },
        "warning", "table public.orders", "published without delete: updates and deletes of this table are not applied",
        "let its publication publish delete too",
    ),
    "partition outside": (
        {"catalog": replace(CATALOG, tables=(CATALOG.tables[0], replace(CATALOG.tables[1], outside=(FAR,))))},
        "warning", "table public.events", "partition public.events_far is a foreign table", "from the server",
    ),
    "set aside": (
        _table(TableState.SET_ASIDE, reason="column a was renamed", lsn=Lsn(255)),
        "error", "table public.orders", "set aside at 0/FF, so its mirror is no longer updated: column a was renamed",
        "pgcdc snapshot public.orders",
    ),
    "not copied": (
        _table(TableState.WAITING, reason="cannot be read, because it is locked by pid 7"),
        "warning", "table public.orders", "waits for a copy: cannot be read, because it is locked", "pgcdc sync",
    ),
    "lag": (
        {**_table(TableState.STREAMING, AT - 2 * GIB), "log": LogFacts(SOURCE, Lsn(1), AT)},
        "warning", "table public.orders", "2.0 GiB of WAL behind", "pgcdc sync",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_situation_is_reported_with_its_advice(name: str) -> None:
    changes, severity, thing, what, do = SITUATIONS[name]
    found = problems(replace(WELL, **{"slot": _slot(), **changes}))
    hits = [p for p in found if (p.severity, p.thing) == (severity, thing) and what in p.what and do in p.do]
    assert hits, found
    assert len({(p.thing, p.what) for p in found}) == len(found)


def test_a_renamed_table_is_reported_only_as_a_warning() -> None:
    """No sync has noticed the rename yet. The next sync continues the mirror under the new name, so nothing is lost."""
    other = TableName("public", "orders2")
    publication = PublicationFacts("pgcdc", frozenset({other, LEAF_A, LEAF_B}))
    renamed = _source(publications={"pgcdc": publication}, called={1: other, 2: EVENTS})
    (found,) = problems(replace(WELL, slot=_slot(), **renamed))
    assert (found.severity, found.thing) == ("warning", "table public.orders")
    assert found.what == "was renamed to public.orders2: its mirror will be renamed too"


def test_a_table_name_that_is_not_valid_text_must_be_changed_on_the_source() -> None:
    """The error is reported both before and after a sync has noticed the name."""
    garbage = TableName("public", Encoding.of("EUC_JP").shown(b"\xa9\xa1"))
    publication = PublicationFacts("pgcdc", frozenset({garbage, LEAF_A, LEAF_B}))
    renamed = _source(publications={"pgcdc": publication}, called={1: garbage, 2: EVENTS})
    (found,) = problems(replace(WELL, slot=_slot(), **renamed))
    assert (found.severity, found.do) == ("error", "rename the table on the source")
    assert "which is not text in the source's encoding" in found.what
    looked = replace(
        WELL, slot=_slot(), **renamed, left={ORDERS: LeftFacts(AT, waits_for=garbage)},
        catalog=replace(CATALOG, tables=(replace(CATALOG.tables[0], name=garbage), CATALOG.tables[1])),
        tables=(TableFacts(garbage, TableState.SET_ASIDE, reason="its name is not text", refused=True),),
    )  # fmt: skip
    (found,) = problems(looked)
    assert (found.thing, found.do.partition(",")[0]) == (f"table {garbage}", "change that on the source")


def test_a_healthy_lake_has_no_problems() -> None:
    assert problems(replace(WELL, slot=_slot())) == []


WELL_TOO: dict[str, dict[str, Any]] = {
    "a run just ended": {"slot": _slot(active=False, confirmed_flush_lsn=Lsn(AT - MIB))},
    "a run drains a backlog": {
        "slot": _slot(active=False, confirmed_flush_lsn=Lsn(AT - 80 * MIB), inactive_since=NOW),
        "at_work": "`pgcdc follow` (pid 5)",
    },
    "held by us": _source(holder=Backend(99, "pgcdc_assets/setup")),
    "no log yet": {"log": None, "tables": (TableFacts(ORDERS, TableState.WAITING),)},
    "copying": _table(TableState.COPYING, None),
    "published via the root": _published(ORDERS, EVENTS),
    "other standbys": _source(synchronous_standby_names='FIRST 2 (s1, "s 2")'),
    "slot times out after days": {
        **_source(idle_slot_timeout=timedelta(days=4)),
        "slot": _slot(active=False, inactive_since=NOW - timedelta(days=2)),
    },
    "unbounded, little held": _source(max_slot_wal_keep_bytes=None),
    "operations in two publications": _source(
        publications={
            "pgcdc": PUBLICATION,
            "pgcdc_inserts": PublicationFacts("pgcdc_inserts", frozenset({EVENTS}), update=False, delete=False),
        }
    ),
    "source not reached": {"source": None, "slot": None},
}


@pytest.mark.parametrize("name", WELL_TOO)
def test_a_normal_situation_is_not_reported_as_a_problem(name: str) -> None:
    assert problems(replace(WELL, **{"slot": _slot(), **WELL_TOO[name]})) == []


@pytest.mark.parametrize("slot", [_slot(wal_status="unreserved"), _slot(safe_wal_size=100 * MIB)])
def test_no_advice_to_start_a_sync_is_given_while_a_sync_is_running(slot: SlotStatus) -> None:
    for at_work, do in ((None, "run `pgcdc sync` now, or raise"), ("`pgcdc sync` (pid 5)", "raise")):
        (found,) = problems(replace(WELL, slot=slot, at_work=at_work))
        assert found.do == f"{do} max_slot_wal_keep_size on the source"


def test_errors_are_listed_before_warnings() -> None:
    changes = {**_source(wal_level="minimal"), "slot": _slot(safe_wal_size=1), **_table(TableState.SET_ASIDE)}
    severities = [p.severity for p in problems(replace(WELL, **changes))]
    assert severities == ["error", "error", "warning"]


@pytest.mark.parametrize(
    ("table", "copied", "told"),
    [
        (None, None, ("warning", "table public.detached", "it was neither a followed table nor a part of one")),
        (EVENTS, AT, None),
        (EVENTS, Lsn(AT - 100), ("error", "table public.events", "the table's copy does not contain them")),
    ],
    ids=["of no followed table", "in a later copy", "not in an earlier copy"],
)
def test_rows_that_no_mirror_contains_are_reported_until_a_later_copy_contains_them(
    table: TableName | None, copied: Lsn | None, told: tuple[str, str, str] | None
) -> None:
    """The rows are reported even after the end of the run that found them."""
    rows = UntakenRows(9, TableName("public", "detached"), 12, Lsn(AT - 100), Lsn(AT - 100), Lsn(AT - 50))
    found = [
        p
        for p in problems(replace(WELL, untaken=(UntakenFacts(rows, table, copied),)))
        if "has 12 rows in the change log" in p.what
    ]
    assert [(p.severity, p.thing) for p in found] == ([told[:2]] if told else [])
    assert all(f"between LSNs {rows.start} and {rows.end}" in p.what and told is not None and told[2] in p.what
               for p in found)  # fmt: skip
