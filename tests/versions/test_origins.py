"""The setting ``origin`` on every version. From 16 on the server filters by origin, before 16 the receiver does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from tests.fix_postgres import fresh_database
from tests.log.conftest import Source, eventually, rows
from tests.log.received_twice import little_memory, many


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
    """Writes local transactions and transactions with a replication origin. The last transaction has an origin."""
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
    # The end of an excluded transaction is recorded and confirmed like any other position. The goal may lie behind
    # records of the server itself. The receiver then ends at the last commit boundary below the goal.
    source.receive(log, source.lsn(), origin="none")
    assert log.position() >= end
    assert source.confirmed(log) == log.position()


@pytest.mark.versions(14, 15)
@pytest.mark.parametrize("sets", [True, False], ids=["sets it", "resets it"])
def test_large_transaction_that_changes_its_origin_is_received_after_its_commit(source: Source, sets: bool) -> None:
    """The server does not filter this transaction, so it must be received only after its commit, with the origin of the
    commit. Streamed before its commit, its first half would have a different origin."""
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
def test_origin_setting_may_change_while_the_slot_is_behind(source: Source, first: str, second: str) -> None:
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
