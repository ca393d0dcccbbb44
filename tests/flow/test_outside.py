"""Changes that are not in the stream: changes of partitions that logical decoding does not cover (every command leaves
these partitions out and names them), and a TRUNCATE that is not published."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pgcdc_assets.checks.health import Problem
from pgcdc_assets.checks.report import TableReport
from pgcdc_assets.checks.status import status
from pgcdc_assets.cli.console import ConsoleProgress
from pgcdc_assets.cli.source import make_ready
from pgcdc_assets.cli.status_verify import verified
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from tests.flow.rig import Rig, rig
from tests.oracle import mirror_rows

__all__ = ["rig"]
pytestmark = [pytest.mark.spark, pytest.mark.long]

P = TableName("public", "p")
MAKE = (
    "CREATE TABLE p (id int, v text) PARTITION BY LIST (id)",
    "CREATE FOREIGN DATA WRAPPER w", "CREATE SERVER far FOREIGN DATA WRAPPER w",
    # This access method is PostgreSQL's heap under another name. It stands in for a method of an extension.
    "CREATE FUNCTION columnar(internal) RETURNS table_am_handler LANGUAGE internal AS 'heap_tableam_handler'",
    "CREATE ACCESS METHOD columnar TYPE TABLE HANDLER columnar",
    "CREATE TABLE p_here PARTITION OF p FOR VALUES IN (1)",
    "CREATE FOREIGN TABLE p_far PARTITION OF p FOR VALUES IN (2) SERVER far",
    "CREATE UNLOGGED TABLE p_unlogged PARTITION OF p FOR VALUES IN (3)",
    "CREATE TABLE p_columnar PARTITION OF p FOR VALUES IN (4) USING columnar",
    *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("p", "p_here", "p_unlogged", "p_columnar")),
    "INSERT INTO p VALUES (1, 'a'), (1, 'b'), (3, 'c'), (4, 'd')",
)  # fmt: skip
SAID = "its rows are not replicated"
FOREIGN = f"partition public.p_far is a foreign table: {SAID}"
UNLOGGED = f"partition public.p_unlogged is UNLOGGED: {SAID}"
COLUMNAR = (
    f"partition public.p_columnar has the table access method columnar, which logical decoding does not cover: {SAID}"
)


def _rows(rig: Rig) -> Counter[tuple[Any, ...]]:
    return mirror_rows(rig.lake, "public/p", ["id", "v"])


def _warnings(rig: Rig) -> set[str]:
    assert not [problem for problem in status(rig.settings).problems if problem.severity == "error"]
    return {problem.what for problem in status(rig.settings).problems if "partition public." in problem.what}


def _incomplete(*reasons: str) -> set[str]:
    return {f"is not mirrored completely, because {reason}" for reason in reasons}


def _of_p(rig: Rig) -> list[Problem]:
    return [problem for problem in status(rig.settings).problems if problem.thing == "table public.p"]


def _verified(rig: Rig) -> TableReport:
    def sync_to(lsn: Lsn, _: float | None = None, /) -> None:
        rig.sync(until=lsn)

    assert rig.settings.source is not None
    (report,) = verified(rig.settings, rig.settings.source, (P,), ConsoleProgress(), sync_to).tables
    return report


@pytest.mark.parametrize(
    "published", ["by setup", "FOR TABLE p, t", "FOR TABLE p, t WITH (publish_via_partition_root)"]
)
def test_every_command_leaves_out_partitions_that_are_not_decoded_and_names_them(rig: Rig, published: str) -> None:
    rig.commit(*MAKE)
    if published != "by setup":
        rig.conn.execute(f"CREATE PUBLICATION {rig.settings.publication} {published}".encode())
    assert rig.settings.source is not None
    findings = make_ready(rig.settings, rig.settings.source).findings
    assert {finding.what for finding in findings if SAID in finding.what} == {FOREIGN, UNLOGGED, COLUMNAR}

    assert rig.sync().set_aside == []
    rig.commit("INSERT INTO p VALUES (1, 'e'), (3, 'f')", "DELETE FROM p_here WHERE v = 'a'")
    if "via" not in published:
        rig.conn.execute("INSERT INTO p VALUES (4, 'g')")
    rig.sync()
    assert _rows(rig) == Counter([("1", "b"), ("1", "e")])
    assert _warnings(rig) == _incomplete(FOREIGN, UNLOGGED, COLUMNAR)
    report = _verified(rig)
    assert (report.verdict, report.source_rows) == ("equal", 2)
    assert all(said in (report.reason or "") for said in (FOREIGN, UNLOGGED, COLUMNAR))

    # A new partition that is not decoded changes nothing. A partition that becomes LOGGED becomes part of the mirror.
    rig.commit(
        "CREATE FOREIGN TABLE p_more PARTITION OF p FOR VALUES IN (5) SERVER far", "INSERT INTO p VALUES (1, 'h')"
    )
    rig.sync()
    assert [copy.table for copy in rig.observer.copies].count(P) == 1
    rig.commit("ALTER TABLE p_unlogged SET LOGGED", "INSERT INTO p VALUES (3, 'i')")
    rig.sync()
    rig.conn.execute("INSERT INTO p VALUES (3, 'j')")
    rig.sync()
    assert _rows(rig) == Counter([*(("1", v) for v in "beh"), *(("3", v) for v in "cfij")])
    assert _warnings(rig) == _incomplete(FOREIGN, FOREIGN.replace("p_far", "p_more"), COLUMNAR)


@pytest.mark.long
def test_truncate_that_is_not_published_causes_a_copy(rig: Rig) -> None:
    publication = rig.settings.publication
    rig.conn.execute(
        f"CREATE PUBLICATION {publication} FOR TABLE t, u WITH (publish = 'insert, update, delete')".encode()
    )
    rig.setup()
    rig.sync()
    rig.commit("TRUNCATE t", "INSERT INTO t VALUES (1001, 'new', '')")
    rig.conn.execute("UPDATE u SET v = 7 WHERE a = 7")
    rig.sync()
    rig.assert_equal()
    assert sorted(copy.table.name for copy in rig.observer.copies) == ["t", "t", "u"]
    assert [problem.what for problem in status(rig.settings).problems if problem.thing == "table public.t"] == [
        "is published without truncate: it is copied again after TRUNCATE, VACUUM FULL or CLUSTER"
    ]


def test_table_that_lost_its_partitions_continues_after_the_setup_that_status_advises(rig: Rig) -> None:
    assert rig.settings.source is not None
    rig.commit(
        "CREATE TABLE p (id int, v text) PARTITION BY LIST (id)", "ALTER TABLE p REPLICA IDENTITY FULL",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1)", "ALTER TABLE p_1 REPLICA IDENTITY FULL",
        "INSERT INTO p VALUES (1, 'a')",
    )  # fmt: skip
    make_ready(rig.settings, rig.settings.source)
    rig.sync()
    rig.commit("ALTER TABLE p DETACH PARTITION p_1", "DROP TABLE p_1")
    rig.sync()
    (advised,) = _of_p(rig)
    assert "run `pgcdc setup`" in advised.do
    make_ready(rig.settings, rig.settings.source)
    rig.sync()
    assert _of_p(rig) == []
    assert _rows(rig) == Counter()
    rig.commit("CREATE TABLE p_2 PARTITION OF p FOR VALUES IN (2)", "ALTER TABLE p_2 REPLICA IDENTITY FULL")
    rig.sync()
    rig.commit("INSERT INTO p VALUES (2, 'b')", "UPDATE p SET v = 'c'")
    rig.sync()
    rig.assert_equal("public.p", "public.t")
