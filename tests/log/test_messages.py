"""Logical messages: which messages the log stores, where in the order they are stored, and that each is stored once."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.wholetransactions import ResendCheck
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import LogicalMessage
from tests.log.conftest import Source, rows
from tests.log.inside import ranges_of, receive_inside

BETWEEN = "SELECT pg_logical_emit_message(false, '{}', 'between')"
INSIDE = "SELECT pg_logical_emit_message(true, '{}', 'inside')"


def stored_prefixes(log: ChangeLog) -> list[str]:
    """The prefixes of the logical messages in the log, in the order of their WAL records."""
    found = [(row["lsn"], decode(row["payload"])) for row in rows(log, "kind = 'M'")]
    return [
        message.prefix for _, message in sorted(found, key=lambda one: one[0]) if isinstance(message, LogicalMessage)
    ]


def emitted(source: Source, prefix: str) -> Lsn:
    """Emits a message outside of a transaction. Returns the end of its WAL record."""
    return source.scalar_lsn(f"pg_logical_emit_message(false, '{prefix}', 'content')")


def test_only_messages_with_chosen_prefixes_get_rows_in_the_log(source: Source) -> None:
    log = source.log()
    for prefix in ("app", "outbox.orders", "outbox.debug", "application"):
        source.run(BETWEEN.format(prefix), INSIDE.format(prefix))
        source.transaction(INSIDE.format(prefix), "INSERT INTO a VALUES (1, 'x')", "DELETE FROM a")
    end = source.lsn()
    source.receive(log, end, messages=["app", "outbox.*", "-*.debug"])
    assert stored_prefixes(log) == 3 * ["app"] + 3 * ["outbox.orders"]
    # A transaction with only excluded messages gets no rows, not even a Commit. In any other transaction, excluded
    # messages get no ordinal.
    assert sum(row["kind"] == "C" for row in rows(log)) == 2 + 4
    assert sorted(row["tx_ordinal"] for row in rows(log, "kind = 'D'")) == [1, 1, 2, 2]
    assert log.verify(_all(log))


def test_each_message_is_stored_once_wherever_a_run_ends(source: Source) -> None:
    """The runs end at the end of the message's record, below the record, inside it, and above it."""
    log = source.log()
    expected = []
    for number, shift in enumerate([0, 1, -1, 8, -8, -60]):
        prefix = f"m{number}"
        goal = Lsn(emitted(source, prefix) + shift)
        expected.append(prefix)
        source.run("INSERT INTO foreign_table VALUES (1, 'x')")
        source.receive(log, goal)
        assert stored_prefixes(log) == (expected if shift >= 0 else expected[:-1])
        source.receive(log, source.lsn())
        assert stored_prefixes(log) == expected
    assert log.verify(_all(log))


def test_messages_that_a_slot_behind_the_log_resends_are_stored_once(source: Source) -> None:
    """A slot is behind its log if the receiver was killed after it committed a batch and before it confirmed the batch.
    The test replaces the slot by a copy that was made before the batch."""
    log = source.log()
    with source.slot_set_back(log):
        source.run(
            BETWEEN.format("one"), "INSERT INTO a VALUES (1, 'x')", INSIDE.format("two"), BETWEEN.format("three")
        )
        source.receive(log, source.lsn())
        assert stored_prefixes(log) == ["one", "two", "three"]
    source.run(BETWEEN.format("four"))
    source.receive(log, source.lsn())
    assert stored_prefixes(log) == ["one", "two", "three", "four"]
    assert log.verify(_all(log))


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [((), ["*"]), (["*"], ()), (["one"], ["two"]), (["two"], ["one"])])
def test_messages_setting_may_change_while_the_slot_is_behind_the_log(
    source: Source, first: list[str], second: list[str]
) -> None:
    """If the server sends a transaction again, the receiver compares it with the log. The comparison ignores logical
    messages that are only in the log or only in the transaction that was sent again."""
    log = source.log()
    with source.slot_set_back(log):
        ended = source.run("INSERT INTO a VALUES (1, 'x')", INSIDE.format("one"), INSIDE.format("two"))
        # A run may end below its goal, because the server may have nothing to send for the last WAL below the goal.
        while log.position() < ended:
            source.run("INSERT INTO foreign_table VALUES (1, 'x')")
            source.receive(log, source.lsn(), messages=first)
        before = stored_prefixes(log)
    source.run(INSIDE.format("two"), INSIDE.format("one"), "INSERT INTO a VALUES (2, 'x')")
    source.receive(log, source.lsn(), messages=second)
    # Messages below the log's position are not added, even if only the second setting includes their prefix.
    added = [prefix for prefix in ("two", "one") if second == ["*"] or prefix in second]
    assert stored_prefixes(log) == before + added
    assert [row["kind"] for row in rows(log, "kind = 'I'")] == ["I", "I"]


@pytest.mark.long
def test_message_is_stored_once_if_a_drain_range_ends_inside_it(source: Source) -> None:
    """A drain reads the backlog with one SQL call for each LSN range. Here, the ranges are shorter than some
    messages."""
    log = source.log()
    for number in range(20):
        source.run(f"SELECT pg_logical_emit_message(false, 'm{number}', repeat('x', {number * 97}))")
    receive_inside(source, log, source.lsn(), lambda lsn: None, drain_bytes=1, limits=ranges_of(1000))
    assert stored_prefixes(log) == [f"m{number}" for number in range(20)]
    assert log.verify(_all(log))


def test_log_is_accepted_if_the_server_leaves_out_a_transaction_of_logical_messages(source: Source) -> None:
    """If the slot is behind the log, the server must send the log's newest transaction again (ResendCheck). But it may
    leave out a transaction that has only logical messages, because the setting ``messages`` may have changed."""
    log = source.log()
    confirmed = source.confirmed(log)
    source.run("INSERT INTO a VALUES (1, 'x')")
    source.receive(log, source.lsn())
    of_rows = ResendCheck.of(log, confirmed)
    source.run(INSIDE.format("one"))
    source.receive(log, source.lsn())
    of_message = ResendCheck.of(log, confirmed)
    assert of_rows is not None
    assert of_message is not None
    assert (of_rows.came, of_message.came) == (False, True)


def _all(log: ChangeLog) -> LsnRange:
    return LsnRange(log.start, log.position())
