"""The setting ``origin`` on every version of PostgreSQL: from version 16 on, the server filters transactions by their
replication origin; with earlier versions, the receiver filters them. Also compares, on every version, logs that were
received with and without streaming.

Twins are two receivers of the same changes, one with and one without streaming. A LOOK step waits until both receivers
have received everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import SourceFailed
from pgcdc_assets.log.spill import PreparedFolder
from tests.fix_postgres import fresh_database
from tests.log.conftest import Source, eventually, rows, until_event
from tests.log.received_twice import NO_DRAIN, Row, Twins, assert_same, end, little_memory, many, prepare
from tests.versions.histories import (
    ALL,
    IMMEDIATE_SINCE,
    PLAIN,
    PREPARED,
    SESSIONS,
    SETUP,
    Action,
    Sessions,
    Step,
    histories,
)


@pytest.fixture
def source(version_server: EmbeddedServer, tmp_path: Path) -> Iterator[Source]:
    with fresh_database(version_server) as database, database.connect() as conn:
        source = Source(database, conn, tmp_path)
        source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a")
        source.run(f"SELECT pg_replication_origin_create('o_{database.name}')")
        yield source
        for receiver in source.running:
            receiver.kill()
        source.run(f"SELECT pg_replication_origin_drop('o_{database.name}')")


def write(source: Source) -> None:
    """Writes local transactions (``own``) and transactions with a replication origin (``theirs``). The last transaction
    has an origin."""
    name = f"o_{source.database.name}"
    source.run("INSERT INTO a VALUES (1, 'own')", f"SELECT pg_replication_origin_session_setup('{name}')")
    source.run("INSERT INTO a VALUES (2, 'theirs')")
    source.transaction("INSERT INTO a VALUES (3, 'theirs')", "SELECT pg_logical_emit_message(true, 'app', 'theirs')")
    source.run("SELECT pg_replication_origin_session_reset()", "INSERT INTO a VALUES (4, 'own')")
    source.run("SELECT pg_logical_emit_message(false, 'app', 'own')")
    source.run(f"SELECT pg_replication_origin_session_setup('{name}')", "UPDATE a SET v = 'theirs' WHERE id = 1")
    source.run("SELECT pg_replication_origin_session_reset()")


@pytest.mark.long
def test_origin_none_excludes_replicated_transactions(source: Source) -> None:
    log = source.log()
    write(source)
    end = source.lsn()
    source.receive(log, end, origin="none")
    assert [row["kind"] for row in rows(log, "commit_lsn IS NOT NULL")] == ["I", "C", "I", "C"]
    assert [row["kind"] for row in rows(log, "commit_lsn IS NULL AND kind = 'M'")] == ["M"]
    assert {row["origin"] for row in rows(log)} == {None}
    # The end of an excluded transaction is recorded and confirmed like any other boundary. The second run is needed
    # because the first run may end below ``end``, if WAL records of the server itself precede ``end``.
    source.receive(log, source.lsn(), origin="none")
    assert log.position() >= end
    assert source.confirmed(log) == log.position()


@pytest.mark.versions(14, 15)
@pytest.mark.parametrize("sets", [True, False], ids=["origin set", "origin reset"])
def test_large_transaction_that_changes_its_origin_is_received_after_its_commit(source: Source, sets: bool) -> None:
    """The server does not filter this transaction, so it must be received only after its commit, with the origin of the
    commit. If it were received before its commit, its first half would have a different origin."""
    little_memory(source)
    log = source.log()
    reset = "SELECT pg_replication_origin_session_reset()"
    change = [f"SELECT pg_replication_origin_session_setup('o_{source.database.name}')", reset]
    if not sets:
        change.reverse()
        source.run(change[1])
    source.transaction(many(1, 1000), change[0], many(1001, 1000))
    if sets:
        source.run(reset)
    source.run("INSERT INTO a VALUES (-1, 'own')")
    source.receive(log, source.lsn(), origin="none")
    found = rows(log)
    assert "".join(row["kind"] for row in found) == ("" if sets else "I" * 2000 + "C") + "IC"
    assert {row["origin"] for row in found} == {None}
    assert {row["commit_lsn"] is None for row in found} == {False}
    assert all(segment.commit_facts is None for segment in log.all_segments()), "nothing was received before its commit"


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("any", "none"), ("none", "any")])
def test_origin_setting_may_change_while_the_slot_is_behind_the_log(source: Source, first: str, second: str) -> None:
    """The slot is behind the log, as after a kill before a confirmation. With a different origin setting, the server
    sends more or fewer transactions again. This must not be mistaken for a different source."""
    log = source.log()
    held = source.slot("held")
    source.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [log.identity.slot, held])
    write(source)
    # The last change is local, so it is received with both settings. If excluded transactions were last, the receiver
    # could end below them.
    source.run("INSERT INTO a VALUES (8, 'own')")
    source.receive(log, source.lsn(), origin=first)
    before = len(rows(log))
    source.conn.execute("SELECT pg_drop_replication_slot(%s)", [log.identity.slot])
    source.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [held, log.identity.slot])
    source.run("INSERT INTO a VALUES (9, 'own')")
    source.receive(log, source.lsn(), origin=second)
    assert len(rows(log)) == before + 2


@pytest.mark.versions(16, 18)
def test_servers_that_replicate_to_each_other_send_each_change_once(
    version_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Two servers replicate to each other with PostgreSQL's own subscriptions."""
    with (
        fresh_database(version_server) as one, fresh_database(version_server) as two,
        one.connect() as first, two.connect() as second,
    ):  # fmt: skip
        sources = [Source(one, first, tmp_path / "one"), Source(two, second, tmp_path / "two")]
        logs = []
        for source in sources:
            source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a")
            source.run(f"SELECT pg_create_logical_replication_slot('sub_{source.database.name}', 'pgoutput')")
        try:
            for source, other in (sources, sources[::-1]):
                conninfo = other.database.conninfo.replace("'", "''")
                source.run(
                    f"CREATE SUBSCRIPTION s_{source.database.name} CONNECTION '{conninfo}' PUBLICATION p WITH "
                    f"(create_slot = false, slot_name = 'sub_{other.database.name}', copy_data = false, origin = none)"
                )
                logs.append(source.log())
            sources[0].run("INSERT INTO a VALUES (1, 'one')")
            sources[1].run("INSERT INTO a VALUES (2, 'two')")
            count = "SELECT count(*) FROM a"
            eventually(lambda: all(conn.execute(count).fetchone() == (2,) for conn in (first, second)))
            for source, log in zip(sources, logs, strict=True):
                source.receive(log, source.lsn(), origin="none")
        finally:
            for source in sources:
                name = f"s_{source.database.name}"
                source.run(
                    f"ALTER SUBSCRIPTION {name} DISABLE", f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)",
                    f"DROP SUBSCRIPTION {name}",
                )  # fmt: skip
                for receiver in source.running:
                    receiver.kill()
        assert [[row["kind"] for row in rows(log)] for log in logs] == [["I", "C"], ["I", "C"]]
        assert b"one" in rows(logs[0], "kind = 'I'")[0]["payload"]
        assert b"two" in rows(logs[1], "kind = 'I'")[0]["payload"]


# With every version, the same history of concurrent sessions results in the same log with and without streaming

MANNERS = settings(
    deadline=None, database=None, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
"""Settings of hypothesis: all examples of a test use the same server, so health checks do not apply."""
MANY = 12
"""Number of examples, of up to 150 steps each. With 60 examples, these tests took a third of the time of all tests of
``--run-long``."""


@contextmanager
def follow(
    server: EmbeddedServer, folder: Path, *, immediate: bool = False, two_phase: bool = False, streaming: bool = True
) -> Iterator[tuple[Twins, Sessions]]:
    """Two receivers, one with ``streaming`` and one without, run in separate processes while the sessions execute a
    history. One session's transactions have an origin. With ``two_phase``, no transaction has an origin, because a
    different session may commit a prepared transaction."""
    with ExitStack() as stack:
        database = stack.enter_context(fresh_database(server))
        conn, *both = (stack.enter_context(database.connect()) for _ in range(2 * SESSIONS + 1))
        others, beside = both[:SESSIONS], both[SESSIONS:]
        source, origin = Source(database, conn, folder), f"o_{database.name}"
        source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE foreign_table (id int)",
                   "CREATE PUBLICATION p FOR TABLE a", *filter(str.strip, SETUP.split(";")))  # fmt: skip
        little_memory(source, immediate=immediate and server.version >= IMMEDIATE_SINCE)
        twins = Twins.of(source, fallback_seconds=0.05, two_phase=two_phase, streaming=streaming)
        others[0].execute("SELECT pg_replication_origin_create(%s)", [origin])
        if not two_phase:
            others[0].execute("SELECT pg_replication_origin_session_setup(%s)", [origin])
        twins.start()
        until_event(twins.whole.start(), "started")
        yield twins, Sessions(others, twins.catch_up, beside)
        for receiver in source.running:
            receiver.stop()
        assert twins.spilled == []
        assert PreparedFolder(twins.streamed.log.path).pending() == []
        if not two_phase:
            others[0].execute("SELECT pg_replication_origin_session_reset()")
        others[0].execute("SELECT pg_replication_origin_drop(%s)", [origin])


def play(twins: Twins, sessions: Sessions, steps: list[Step], *, facts: bool) -> None:
    """Executes the steps, then compares the two logs. At each of the first two LOOK steps, the test records the log's
    position and the rows below this position. At the end, the log must still have the same rows below each recorded
    position."""
    looks: list[tuple[Lsn, list[Row]]] = []

    def look() -> None:
        twins.catch_up()
        if len(looks) < 2:
            position = twins.streamed.log.position()
            looks.append((position, [row for row in twins.streamed.reading.rows(facts=facts) if _at(row) < position]))

    sessions.look = look
    sessions.play(steps)
    end = twins.flushed()
    for twin in (twins.streamed, twins.whole):
        twin.complete_to(end)
    found = twins.check(facts=facts)
    for position, before in looks:
        assert_same(before, [row for row in found if _at(row) < position])


def _at(row: Row) -> int:
    return int(row[4] - 1 if row[0] is None else row[0])


def run(server: EmbeddedServer, folder: Path, actions: list[Action], examples: int, **options: bool) -> None:
    with follow(server, folder, **options) as (twins, sessions):

        @settings(MANNERS, max_examples=examples)
        @given(histories(actions, most=50 if examples < 10 else 150))
        def test(steps: list[Step]) -> None:
            note(f"PostgreSQL {server.version}")
            play(twins, sessions, steps, facts=actions is PLAIN)

        test()
        # With streaming, some files must have been written before their transaction's commit. Without streaming, only
        # content of prepared transactions is written before the commit, and a history may have no prepared transaction.
        assert twins.streamed.reading.late > 0 or not options.get("streaming", True)


@pytest.mark.long
@pytest.mark.versions(15, 18, long=(16, 17))
@pytest.mark.parametrize("streaming", [True, False], ids=["in blocks", "whole"])
def test_log_of_prepared_transactions_is_the_same_with_and_without_streaming(
    version_server: EmbeddedServer, tmp_path: Path, streaming: bool
) -> None:
    actions = [*ALL, *PREPARED, *PREPARED, *PREPARED]
    run(version_server, tmp_path, actions, 3, two_phase=True, streaming=streaming)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.versions(15, 16, 17, 18)
@pytest.mark.parametrize("streaming", [True, False], ids=["in blocks", "whole"])
def test_log_of_many_prepared_transactions_is_the_same_with_and_without_streaming(
    version_server: EmbeddedServer, tmp_path: Path, streaming: bool
) -> None:
    actions = [*ALL, *PREPARED, *PREPARED, *PREPARED]
    run(version_server, tmp_path, actions, MANY, two_phase=True, streaming=streaming)


@pytest.mark.long
@pytest.mark.versions(14, 18, long=(15, 16, 17))
def test_log_is_the_same_with_and_without_streaming(version_server: EmbeddedServer, tmp_path: Path) -> None:
    run(version_server, tmp_path, ALL, 3, immediate=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("immediate", [False, True], ids=["streamed if memory is full", "streamed immediately"])
@pytest.mark.parametrize("actions", [ALL, PLAIN], ids=["all actions", "plain actions"])
def test_log_of_many_histories_is_the_same_with_and_without_streaming(
    version_server: EmbeddedServer, tmp_path: Path, actions: list[Action], immediate: bool
) -> None:
    run(version_server, tmp_path, actions, MANY, immediate=immediate)


@pytest.mark.versions(18)
def test_slot_gets_past_a_rolled_back_rewrite_once_logical_decoding_work_mem_is_raised(source: Source) -> None:
    """PostgreSQL 18 cannot decode this transaction if its changes are slightly larger than logical_decoding_work_mem.
    Later changes arrive once logical_decoding_work_mem was raised, as the error advises."""
    source.run("ALTER TABLE a ADD n int", "INSERT INTO a SELECT g, 'x', g FROM generate_series(1, 300) g")
    little_memory(source)
    log = source.log(two_phase=True)
    prepare(source, "ALTER TABLE a ALTER n TYPE bigint", "SAVEPOINT s", "UPDATE a SET n = n + 1")
    end(source, "ROLLBACK")
    goal = source.run("INSERT INTO a VALUES (-1, 'after')")
    with pytest.raises(SourceFailed, match=r"could not map .* raise logical_decoding_work_mem"):
        source.receive(log, goal, two_phase=True, drain_bytes=NO_DRAIN)
    source.run(f"ALTER DATABASE {source.database.name} SET logical_decoding_work_mem = '64MB'")
    source.receive(log, goal, two_phase=True, drain_bytes=NO_DRAIN)
    assert [row["kind"] for row in rows(log)] == ["I", "C"]
