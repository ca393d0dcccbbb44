"""With every version, the same history of concurrent sessions results in the same log with and without streaming."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.log.spill import PreparedFolder
from tests.fix_postgres import fresh_database
from tests.log.conftest import Source, until_event
from tests.log.received_twice import Row, Twins, assert_same, little_memory
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

MANNERS = settings(
    deadline=None, database=None, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
"""Settings of hypothesis: all examples of a test use the same server, so health checks do not apply."""
MANY = 12
"""Number of examples, of up to 150 steps each. With 60 examples, these tests took a third of the long set's time."""


@contextmanager
def follow(
    server: EmbeddedServer, folder: Path, *, immediate: bool = False, two_phase: bool = False, streaming: bool = True
) -> Iterator[tuple[Twins, Sessions]]:
    """Two receivers, one with streaming and one without, run in their own processes while the sessions execute a
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
    """Executes the steps. Checks that the log at any earlier moment equals the part of the final log below its position
    at that moment."""
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
        # Without streaming, a transaction is written before its commit only if it must be stored after its PREPARE.
        assert twins.streamed.reading.late > 0 or not options.get("streaming", True)


@pytest.mark.long
@pytest.mark.versions(15, 18, long=(16, 17))
@pytest.mark.parametrize("streaming", [True, False], ids=["in blocks", "whole"])
def test_logs_with_and_without_streaming_are_equal_with_prepared_transactions(
    version_server: EmbeddedServer, tmp_path: Path, streaming: bool
) -> None:
    actions = [*ALL, *PREPARED, *PREPARED, *PREPARED]
    run(version_server, tmp_path, actions, 3, two_phase=True, streaming=streaming)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.versions(15, 16, 17, 18)
@pytest.mark.parametrize("streaming", [True, False], ids=["in blocks", "whole"])
def test_logs_with_and_without_streaming_are_equal_in_many_histories_with_prepared_transactions(
    version_server: EmbeddedServer, tmp_path: Path, streaming: bool
) -> None:
    actions = [*ALL, *PREPARED, *PREPARED, *PREPARED]
    run(version_server, tmp_path, actions, MANY, two_phase=True, streaming=streaming)


@pytest.mark.long
@pytest.mark.versions(14, 18, long=(15, 16, 17))
def test_logs_with_and_without_streaming_are_equal(version_server: EmbeddedServer, tmp_path: Path) -> None:
    run(version_server, tmp_path, ALL, 3, immediate=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("immediate", [False, True], ids=["full", "immediate"])
@pytest.mark.parametrize("actions", [ALL, PLAIN], ids=["all", "plain"])
def test_logs_with_and_without_streaming_are_equal_in_many_histories(
    version_server: EmbeddedServer, tmp_path: Path, actions: list[Action], immediate: bool
) -> None:
    run(version_server, tmp_path, actions, MANY, immediate=immediate)
